"""Writes docs/configuration.md from the dataclasses in verl_tlt/config.py: `python docs/generate.py`.

Keys, types, defaults and meanings are read from the source, so that the page cannot differ from the code
(tests/unit/test_docs.py compares). What concerns several keys at once is in `NOTES`.

mkdocs loads this file too, as a hook (mkdocs.yml): pages link to source files, which a built site does not hold.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from verl_tlt import config
from verl_tlt.config import TLTConfig

PAGE = Path(__file__).parent / "configuration.md"

INTRO = """# Settings

<!-- Written by docs/generate.py from verl_tlt/config.py: edit those. -->

Start a run with `+tlt=default`, and every key below can be given on the command line or in your own YAML:

```bash
python -m verl.trainer.main_ppo <your recipe> +tlt=default \\
    tlt.drafter.path=/models/my-drafter tlt.speculation.max_draft_length=5
```

`+trainer.plugin=tlt` alone is the same with every setting at its default. An unknown key, a value of the wrong type, or
values that contradict each other stop the run before Ray starts, with a sentence that names the key. Try it without a
run: `verl-tlt doctor <your recipe> +tlt=default ...`.

Most runs need only these:

| You want | Set |
|---|---|
| to start with a trained drafter | `tlt.drafter.path` |
| a larger or smaller longest draft | `tlt.speculation.max_draft_length` |
| training in smaller buffers or shorter bubbles | `tlt.buffer.min_tokens`, `tlt.spot.min_merge_steps` |
| a quicker stop at the end of sampling | a smaller `tlt.drafter.batch_tokens` |
| less host memory | `tlt.buffer.max_mb`, `tlt.buffer.keep_steps` |
| speculation without training | `tlt.spot.enable=false` |
| training without speculation | `tlt.speculation.enable=false` |
"""

NOTES = {
    "drafter": [
        "`aux_layers` counts for a random head only; a drafter from `path` brings its own layers.",
        "In a resumed run the drafter in the checkpoint wins over `path`.",
        "`save_dir` is written only where spot training runs.",
    ],
    "speculation": [
        "`arms` must ascend, start with 0 and end at `max_draft_length` or below.",
        "With the environment variable `TLT_FULL_GRAPHS=0`, K_max is 3 on engines with CUDA graphs too, where none is"
        " given.",
        "`enable=false` starts engines without a drafter; `policy=off` starts them with one that never runs.",
        "`policy_options` are the chosen policy's, for example `'+tlt.speculation.policy_options={epsilon: 0.2}'` of"
        " `tlt.speculation.policy=bandit`.",
        "`policy=fixed` drafts in every step, however little is accepted: for tests and comparisons.",
    ],
    "spot": [
        "A session below `min_merge_steps` is not lost: its worker goes on from there and hands it in later.",
        "After a failed session its replica pauses for 1, 2, 4, ... RL steps, until `max_failures` in a row.",
    ],
    "buffer": [
        "One token takes 8 bytes per unit of the policy's hidden size: 32 KiB at 4096.",
        "`max_mb`, `min_tokens` and `tokens_per_step` are per spot worker. `min_tokens` leaves out what is held out.",
        "`tlt/tap_tokens` is what `tokens_per_step` has become; other sizes of a run are in its trace's first event.",
        "While fewer than 24 sequences are held out, a quarter of what arrives is.",
    ],
    "gate": [
        "In doubt the served drafter stays and the candidate trains on: it is published only when it is *surely* (1 %"
        " level, since it is judged after every session) not worse by `margin`, and given up only when it is surely"
        " worse by `revert`.",
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
    """The page's text."""
    defaults = TLTConfig().to_dict()
    parts = [INTRO]
    for section in dataclasses.fields(TLTConfig):
        cls = typing.get_type_hints(TLTConfig)[section.name]
        rows = [
            f"| `tlt.{section.name}.{key}` | {kind} | `{_yaml(defaults[section.name][key])}` | {meaning} |"
            for key, kind, meaning in _fields(cls.__name__)
        ]
        table = "\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows])
        notes = "\n".join(f"* {note}" for note in NOTES[section.name])
        parts.append(f"## {section.name}\n\n{inspect.cleandoc(cls.__doc__)}\n\n{table}\n\n{notes}\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, *, config: Mapping[str, Any], **_: Any) -> str:
    """A page for the built site: links that leave docs/ lead to `repo_url`, or become the file's name without one."""
    repository = (config.get("repo_url") or "").rstrip("/")

    def elsewhere(link: re.Match[str]) -> str:
        label, path = link.groups()
        kind = "tree" if path.endswith("/") else "blob"
        return f"[{label}]({repository}/{kind}/main/{path})" if repository else f"`{path}`"

    return re.sub(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)", elsewhere, markdown)


def _fields(class_name: str) -> list[tuple[str, str, str]]:
    """(name, type and bounds in words, docstring) of each field, in the order of the source."""
    schema = TypeAdapter(getattr(config, class_name)).json_schema()["properties"]
    module = ast.parse(Path(config.__file__).read_text())
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found = []
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            meaning, name = " ".join(ast.literal_eval(text.value).split()), ast.unparse(field.target)
            found.append((name, _kind(schema[name]), _cell(meaning)))
    return found


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        given, nothing = schema["anyOf"]
        assert nothing == {"type": "null"}
        return f"{_kind(given)}, or null"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    name = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "object": "mapping"}[
        schema["type"]
    ]
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = {
        f"{low}..{high}": high is not None, f"{low} or above": low is not None,
        f"above {above}, below {below}": below is not None, f"above {above}": above is not None,
    }  # fmt: skip
    return ", ".join([name, *[words for words, holds in bounds.items() if holds][:1]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml(value: Any) -> str:
    """As it is written in a YAML file or on the command line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip("'")


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"{PAGE.name} written")
