"""`python docs/generate.py` writes settings.md and the tables of figures.

The settings come from the dataclasses in verl_tlt/config.py, so that the page cannot differ from the code
(tests/unit/test_docs.py compares). What concerns several keys at once is in `NOTES`. tables/ makes the figures.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from verl_tlt import config
from verl_tlt.config import TLTConfig, is_setting

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "settings.md"

INTRO = """# Settings

<!-- Written by docs/generate.py from verl_tlt/config.py: edit those. -->

`+trainer.plugin=tlt` switches TLT on, with every setting at its default. Settings follow it on the command line:

```bash
python -m verl.trainer.main_ppo <your recipe> +trainer.plugin=tlt \\
    tlt.drafter.path=/models/my-drafter tlt.speculation.max_draft_length=5
```

Each of these may begin with a plus or not. Where verl-tlt is not installed, verl refuses those without a plus. A YAML
config of your own may hold `trainer: {plugin: tlt}` and a `tlt:` node instead, and
`++trainer.plugin=null` at the end of a command line runs stock verl.

An unknown key, a value of the wrong type, or values that contradict each other stop the run before Ray starts, with a
sentence that names the key. `verl-tlt doctor <your recipe> +trainer.plugin=tlt ...` says so without a run.

Most runs need only these:

| You want | Set |
|---|---|
| to start with a trained drafter | `path` in [tlt.drafter](#tltdrafter) |
| a larger or smaller longest draft | `max_draft_length` in [tlt.speculation](#tltspeculation) |
| less host memory | `max_mb` in [tlt.buffer](#tltbuffer) |
| never to wait for a first drafter, or longer | `cold_start_s` in [tlt.spot](#tltspot) |
| speculation alone, or training alone | `enable=false` in [tlt.spot](#tltspot) or [tlt.speculation](#tltspeculation) |
"""

NOTES = {
    "drafter": [
        "`vocab` is a random head's; a drafter from `path` brings its own.",
        "`method=mtp` is for policies that have such a head; `vocab` is then refused.",
        "In a resumed run the drafter in the checkpoint wins over `path`.",
        "`save_dir` is written only where spot training runs.",
    ],
    "speculation": [
        "`enable=false` starts engines without a drafter; `policy=off` starts them with one that never runs.",
        "`policy=fixed` drafts however little is accepted: for tests and comparisons.",
    ],
    "spot": [
        "`cold_start_s` counts training, scores and publication. A resumed run with a drafter has no"
        " [cold start](how-it-works.md#a-cold-start), nor has `separate_async`.",
        "After three failures in a row nothing is trained any more in this run; the drafter is still written.",
    ],
    "buffer": [
        "One token takes 8 bytes per unit of the policy's hidden size, 32 KiB at 4096; an MTP head's takes 2 bytes.",
    ],
    "gate": [
        "*Surely* means at a level of 1 %. In doubt the served drafter stays, and the candidate trains on.",
        "With fewer than 512 positions, or fewer than 7 prompts, it stays, too, unless what is served is useless.",
    ],
    "trace": ["What the files hold: [metrics](metrics.md). `verl-tlt report DIR` reads them."],
}
"""What a single key's line cannot say, by section."""


def render() -> str:
    """The page of settings: for each section its keys, each once, and what concerns several."""
    defaults = TLTConfig().to_dict()
    parts = [INTRO]
    for section in dataclasses.fields(TLTConfig):
        cls = typing.get_type_hints(TLTConfig)[section.name]
        lines = [
            f"* `tlt.{section.name}.{key}` = `{_yaml(defaults[section.name][key])}` ({kind}): {meaning}"
            for key, kind, meaning in _fields(cls.__name__)
            if key in {f.name for f in dataclasses.fields(cls) if is_setting(f)}
        ]
        lines += ["", *(f"* {note}" for note in NOTES[section.name])]
        parts.append(f"## tlt.{section.name}\n\n{inspect.cleandoc(cls.__doc__)}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


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
        f" from {low} to {high}": high is not None, f" >= {low}": low is not None,
        f" > {above} and < {below}": below is not None, f" > {above}": above is not None,
    }  # fmt: skip
    return name[schema["type"]] + next((words for words, holds in bounds.items() if holds), "")


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
    for page, text in ((PAGE, render()), *filled):
        page.write_text(text)
        print(f"{page.relative_to(ROOT)} written")
