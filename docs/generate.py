"""`python docs/generate.py` writes configuration.md, api.md, patches/README.md, and tables of figures.

The settings come from the dataclasses in verl_tlt/config.py, and the interface from the docstrings of what
verl_tlt/drafter exports, so that no page can differ from the code (tests/unit/test_docs.py compares). What concerns
several keys at once is in `NOTES`. Tables of figures are made by tables/.

mkdocs loads this file too, as a hook (mkdocs.yml): pages link to source files, which a built site does not hold.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import runpy
import sys
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from verl_tlt import config, drafter
from verl_tlt.config import TLTConfig

sys.path.append(str(Path(__file__).parents[1]))  # patches/ is no installed package
from patches import cpu_changes, upstream_changes
from patches.upstream_changes import UpstreamChange

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "configuration.md"
API_PAGE = Path(__file__).parent / "api.md"
PATCHES_PAGE = ROOT / "patches" / "README.md"

INTRO = """# Settings

<!-- Written by docs/generate.py from verl_tlt/config.py: edit those. -->

The flag takes every setting at its default. A setting follows it on the command line:

```bash
python -m verl.trainer.main_ppo <your recipe> +trainer.plugin=tlt \\
    +tlt.drafter.path=/models/my-drafter +tlt.speculation.max_draft_length=5
```

`+tlt=default` instead of the flag does the same, puts all keys into the composed config (they are then given without
the plus), and fails where verl-tlt is not installed; there verl ignores the flag.

An unknown key, a value of the wrong type, or values that contradict each other stop the run before Ray starts, with a
sentence that names the key. Try it without a run: `verl-tlt doctor <your recipe> +trainer.plugin=tlt ...`.

Most runs need only these:

| You want | Set |
|---|---|
| to start with a trained drafter | `tlt.drafter.path` |
| a larger or smaller longest draft | `tlt.speculation.max_draft_length` |
| training in smaller buffers or shorter bubbles | `tlt.buffer.min_tokens`, `tlt.spot.min_merge_steps` |
| a quicker stop at the end of sampling | a smaller `tlt.drafter.batch_tokens` |
| less host memory | `tlt.buffer.max_mb`, `tlt.buffer.keep_steps` |
| a run without a drafter never to wait for one, or longer | `tlt.spot.cold_start_s` |
| speculation without training | `tlt.spot.enable=false` |
| training without speculation | `tlt.speculation.enable=false` |
"""

_RELEASES = ", ".join(f"{name} {version}" for name, version in upstream_changes.CAUSES_IN.items())
PATCHES_INTRO = f"""# What is changed upstream at run time

<!-- Written by docs/generate.py from upstream_changes.py and cpu_changes.py: edit those. -->

verl-tlt works on released packages: nothing here has to be applied. Each change to verl, vLLM or megatron-core that is
made while they run is listed, with its cause in {_RELEASES}. A diff is
what upstream would do instead; with it applied, the change steps aside.
[test_patches.py](../tests/contract/test_patches.py) holds both to that;
[test_shims.py](../tests/contract/test_shims.py) fails once the CPU platform needs a change no more.
"""

API_INTRO = """# The drafter in your own code

<!-- Written by docs/generate.py from the docstrings in verl_tlt/drafter: edit those. -->

`verl_tlt.drafter` is everything about the drafter without verl, vLLM or Ray. In
[custom_worker.py](../examples/custom_worker.py) a verl worker trains one with it, in
[custom_megatron_worker.py](../examples/custom_megatron_worker.py) verl's own Megatron actor does.

```python
from verl_tlt.drafter import DrafterTrainer, build_drafter, refresh_verifier_weights, save_drafter
```

* **What is here** can be imported from `verl_tlt.drafter`, and from nowhere else: files below it may move. Names load
  on first use, so importing the package alone is quick.
* **Stability.** verl-tlt is 0.x: a name or argument here may change with a minor version, not with a patch version.
  Drafters that an earlier version wrote stay loadable, by vLLM and here.
* **Errors.** What a caller did wrong (a model of another family, a file that is missing or does not fit) raises
  `DrafterError`, a `TLTError` and `ValueError` whose sentence names it. Anything else is a bug.
* **Letters** in shapes: B sequences, L tokens of one, T of a packed batch, H the policy's hidden size, V its
  vocabulary.
* **Types** in signatures: `Model` is a folder as text or path, or a name on the hub such as "Qwen/Qwen3-8B".
  `PolicyLike` is a `Model`, a `transformers` config, a mapping of its fields, or a `PolicyShape`. `Fields` is a JSON
  object as a dict. `Span` is some tokens of a text, as `plan_epoch` makes them. `Feed` and `FedBatch` are what
  `DrafterTrainer.feed` returns and what that makes of a `Batch`.
  `Eagle3DraftModel` and `Eagle3SpeculatorConfig` are `speculators`' own, `PreTrainedModel` is `transformers`'.

## A complete example

From a policy to a drafter that `vllm serve` loads. It runs as it is, in a few seconds on a CPU; put the path of your
policy and your own texts in place of the tiny ones.

```python
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    build_drafter,
    load_policy,
    refresh_verifier_weights,
    save_drafter,
    train_until,
)

policy = "policy"  # yours: a folder, or a name on the hub
tiny = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
Qwen3ForCausalLM(tiny).save_pretrained(policy)
texts = [Text(tokens=tuple(torch.randint(64, (32,)).tolist()), prompt_len=8) for _ in range(16)]

drafter = build_drafter(policy)
refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(policy))  # again after each update of the policy
states = PolicyStates(load_policy(policy, "cpu"), drafter.target_layer_ids)
sequences = states(texts)  # tokens with the policy's hidden states

trainer = DrafterTrainer(drafter, learning_rate=1e-3, ttt_steps=3)
for epoch in range(3):
    summary = train_until(trainer, batches(sequences, budget=512), should_stop=lambda: False)
    print(f"epoch {epoch}: loss {summary.loss:.2f} over {summary.tokens} tokens")

scores = acceptance(drafter, sequences, max_draft=3)
print(f"accept length at K=3: {accept_length(scores):.2f}")
print(save_drafter(drafter, "drafter", {"policy": policy}, policy=policy))
```
"""

NOTES = {
    "drafter": [
        "`aux_layers`, `intermediate_size` and `vocab` are a random head's; a drafter from `path` brings its own.",
        "`method=mtp` is for policies that have such a head; those three keys are then refused.",
        "In a resumed run the drafter in the checkpoint wins over `path`.",
        "`save_dir` is written only where spot training runs.",
    ],
    "speculation": [
        "`arms` must ascend, start with 0 and end at `max_draft_length` or below.",
        "With the environment variable `TLT_FULL_GRAPHS=0`, K_max is 3 on engines with CUDA graphs too, where none is"
        " given.",
        "`enable=false` starts engines without a drafter; `policy=off` starts them with one that never runs.",
        "`policy=fixed` drafts in every step, however little is accepted: for tests and comparisons.",
    ],
    "spot": [
        "The steps of a session below `min_merge_steps` are kept: its worker continues from them in the next session.",
        "`cold_start_s` counts with everything: training, scores, merges, publication. A resumed run that has a drafter"
        " never has [a cold start](how-it-works.md#a-cold-start), nor one in `separate_async`.",
        "After a failed session its replica pauses for 1, 2, ... RL steps; after three in a row it trains no more.",
    ],
    "buffer": [
        "One token takes 8 bytes per unit of the policy's hidden size: 32 KiB at 4096; with `tlt.drafter.method=mtp` 2"
        " bytes: 8 KiB.",
        "`max_mb`, `min_tokens` and `tokens_per_step` are per spot worker. `min_tokens` leaves out what is held out.",
        "`tlt/tap_tokens` is what `tokens_per_step` has become; other sizes of a run are in its trace's first event.",
        "`held_out` is one share for the whole run, and a prompt's responses are held out on all workers or on none. "
        "Null is the share with which two steps hold out 12 prompts, from a tenth to a quarter.",
    ],
    "gate": [
        "*Surely* means at a level of 1 %, because a candidate is judged after every session. In doubt the served"
        " drafter stays, and the candidate trains on.",
        "With fewer than `min_tokens` positions, or fewer than 7 sequences, it is held, unless what is served is"
        " useless or the candidate is far better.",
    ],
    "trace": [
        "The trainer writes `trainer.jsonl`, each engine `engine-<replica>.jsonl`; `verl-tlt report DIR` reads both."
        " What they hold: [metrics](metrics.md).",
    ],
}
"""What a single key's line cannot say, by section."""


def render() -> str:
    """The page's text: for each section a table of what most readers ask, and below it types, bounds and the rest."""
    defaults = TLTConfig().to_dict()
    parts = [INTRO]
    for section in dataclasses.fields(TLTConfig):
        cls = typing.get_type_hints(TLTConfig)[section.name]
        table, more = ["| Key | Default | Meaning |", "|---|---|---|"], []
        for key, kind, meaning in _fields(cls.__name__):
            first, rest = _first_sentence(meaning)
            table.append(f"| `{key}` | `{_yaml(defaults[section.name][key])}` | {_cell(first)} |")
            more.append(f"* `tlt.{section.name}.{key}`: {kind}. {rest}".rstrip())
        notes = [f"* {note}" for note in NOTES[section.name]]
        text = "\n".join([*table, "", "Types and details:", "", *more, *notes])
        parts.append(f"## tlt.{section.name}\n\n{inspect.cleandoc(cls.__doc__)}\n\n{text}\n")
    return "\n".join(parts)


def _first_sentence(meaning: str) -> tuple[str, str]:
    """A docstring's first sentence, or what it says before a semicolon, and the rest as sentences."""
    end = re.search(r"[.;](?= |$)(?![^(]*\))", meaning)
    rest = meaning[end.end() :].strip() if end else ""
    return f"{meaning[: end.start()] if end else meaning}.", rest[:1].upper() + rest[1:]


def render_api() -> str:
    """The text of the page about `verl_tlt.drafter`."""
    parts = [API_INTRO]
    for module, names in itertools.groupby(drafter._HOME, drafter._HOME.__getitem__):
        tree = ast.parse((Path(drafter.__file__).parent / f"{module}.py").read_text())
        about = ast.get_docstring(tree).partition("\n\n")[0]
        parts.append(f"## {module}\n\n{about}\n")
        defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        parts += [_entry(defined[name]) for name in names if name in defined]  # the error is in the introduction
    return "\n".join(parts)


def render_patches() -> str:
    """patches/README.md, from the two lists of upstream changes."""
    parts = [PATCHES_INTRO, "## On every machine\n", *map(_change, upstream_changes.CHANGES)]
    parts += ["## Where `VERL_PLATFORM=cpu`\n", *map(_change, cpu_changes.CHANGES)]
    offered = [f"* [{patch}]({patch}): {what}" for patch, what in upstream_changes.OFFERED.items()]
    return "\n".join([*parts, "## Diffs of what verl-tlt does without\n", *offered, ""])


def _change(change: UpstreamChange) -> str:
    """One change as a section."""
    module, _, function = change.applied_by.partition(":")
    said = {
        "Replaces": ", ".join(f"`{symbol.removesuffix(':')}`" for symbol in change.changes),
        "Symptom": change.symptom,
        "Cause": change.cause,
        "Upstream": f"{change.upstream}.",
        "Applies to": f"{change.releases}.",
        "Goes with": change.removed_by,
        "Made by": f"[{function}](../{module.replace('.', '/')}.py).",
        "Diff": change.patch and f"[{change.patch}]({change.patch}).",
    }
    title = f"### {change.name[0].upper()}{change.name[1:]}\n"
    return "\n".join([title, *(f"* **{key}**: {text}" for key, text in said.items() if text), ""])


def on_page_markdown(markdown: str, *, config: Mapping[str, Any], **_: Any) -> str:
    """A page for the built site: links that leave docs/ lead to `repo_url`, or become the file's name without one."""
    return str(runpy.run_path(str(ROOT / "setup.py"))["linked"](markdown, config.get("repo_url"), "../"))


def _entry(node: ast.FunctionDef | ast.ClassDef) -> str:
    """One exported function or class: how it is called, what its docstring says, and a class's fields and methods."""
    parts = [f"### {node.name}\n"]
    if isinstance(node, ast.FunctionDef):
        parts.append(_call(node))
    elif start := next((n for n in node.body if getattr(n, "name", "") == "__init__"), None):
        parts.append(_call(start, node.name))
    parts.append(_prose(ast.get_docstring(node) or "") + "\n")
    rows = [f"* `{ast.unparse(field)}`{_about(text)}" for field, text in itertools.pairwise([*node.body, None])
            if isinstance(node, ast.ClassDef) and isinstance(field, ast.AnnAssign)]  # fmt: skip
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            said = (ast.get_docstring(method) or "").partition("\n\n")[0]
            own = [arg for arg in ast.unparse(method.args).split(", ") if arg not in ("self", "cls")]
            shown = method.name if _is_property(method) else f"{method.name}({', '.join(own)})"
            rows.append(f"* `{shown}`: {' '.join(said.split())}")
    return "\n".join([*parts, *rows, ""] if rows else parts)


def _call(function: ast.FunctionDef, name: str = "") -> str:
    """A signature as a block of code."""
    given = [arg for arg in ast.unparse(function.args).split(", ") if arg != "self"]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and not name else ""
    line = f"{name or function.name}({', '.join(given)}){returns}"
    return f"```python\n{line}\n```\n"


def _is_property(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)


def _about(text: ast.stmt | None) -> str:
    """The docstring below a field, if that is what follows it."""
    said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and " ".join(text.value.value.split())
    return f": {said}" if said else ""


def _prose(docstring: str) -> str:
    """A docstring in Markdown: its sections become lists."""
    text, *sections = re.split(r"^(Args|Returns|Yields|Raises):\n", docstring, flags=re.MULTILINE)
    parts = [text.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", textwrap.dedent(body).strip())]
        if title in ("Returns", "Yields"):
            parts.append(f"{title}: {' '.join(entries)}")
        else:
            named = [re.sub(r"^(\**\w+): ", r"`\1`: ", entry) for entry in entries]
            parts.append(f"{title}:\n\n" + "\n".join(f"* {entry}" for entry in named))
    return "\n\n".join(parts)


def _fields(class_name: str) -> list[tuple[str, str, str]]:
    """(name, type and bounds in words, docstring) of each field, in the order of the source."""
    schema = TypeAdapter(getattr(config, class_name)).json_schema()["properties"]
    module = ast.parse(Path(config.__file__).read_text())
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found = []
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            meaning, name = " ".join(ast.literal_eval(text.value).split()), ast.unparse(field.target)
            found.append((name, _kind(schema[name]), meaning))
    return found


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {_kind(schema['items']).replace('integer', 'integers', 1)}"
    name = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "`null`"}
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = {
        f" from {low} to {high}": high is not None, f" of at least {low}": low is not None,
        f" above {above} and below {below}": below is not None, f" above {above}": above is not None,
    }  # fmt: skip
    return name[schema["type"]] + next((words for words, holds in bounds.items() if holds), "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml(value: Any) -> str:
    """As it is written in a YAML file or on the command line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip("'")


if __name__ == "__main__":
    import tables
    from tables import picture

    rows = picture.shown()
    if picture.drawn() != picture.digest(rows):  # another matplotlib would draw the same rows a little differently
        picture.draw(rows)
    filled = [(page, tables.render(page.read_text())) for page in tables.PAGES]
    for page, text in ((PAGE, render()), (API_PAGE, render_api()), (PATCHES_PAGE, render_patches()), *filled):
        page.write_text(text)
        print(f"{page.name} written")
