"""`python docs/generate.py` writes settings.md and the tables of figures.

The settings come from the dataclasses in verl_tlt/config.py, so that the page cannot differ from the code
(tests/unit/test_docs.py compares). What concerns several keys at once is in `NOTES`. tables/ makes the figures.
"""

from __future__ import annotations

import ast
import dataclasses
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

`+trainer.plugin=tlt` switches TLT on. Every setting has a default, and most runs set `tlt.drafter.path` alone.

| To do this | Set |
|---|---|
| start with a trained drafter | `tlt.drafter.path=DIR` |
| draft with the policy's own MTP head | `tlt.drafter.method=mtp` |
| allow longer or only shorter drafts | `tlt.speculation.max_draft_length=7` |
| use less host memory | `tlt.buffer.max_mb=4096`, which is two RL steps of a 7B policy |
| never pause RL to train a first drafter | `tlt.spot.cold_start_s=0` |
| draft with a drafter that is never trained | `tlt.spot.enable=false` |
| train a drafter and decode as stock verl does | `tlt.speculation.enable=false` |
| run stock verl with the same command | `++trainer.plugin=null` at its end, with verl-tlt still installed |

Only `trainer.plugin` needs Hydra's plus. Settings can also be in [a YAML file](quickstart.md#your-own-yaml-file). If a
setting is wrong, the run stops before Ray starts, with a message that names the key.
"""

NOTES = {
    "drafter": "`vocab` is refused with `method=mtp`. If a new run publishes no drafter, a drafter that is already in"
    " `save_dir` stays.",
    "speculation": "An engine uses only [these draft lengths](how-it-works.md#which-draft-lengths-an-engine-uses), up"
    " to the longest one. Every node must be able to import the module of `module:Class`"
    " ([example](../examples/custom_policy.py)).",
    "spot": "[What a cold start is](how-it-works.md#a-cold-start).",
    "buffer": "Up to eight RL steps are kept.",
    "gate": "[How drafters are compared](how-it-works.md#test-and-publication).",
    "trace": "[Content and size](metrics-and-troubleshooting.md#the-trace). No setting turns the trace off.",
}
"""What concerns several keys of a section, below its table."""


def render() -> str:
    """The page of settings: a table for each section."""
    defaults = TLTConfig().to_dict()
    parts = [INTRO]
    for section in dataclasses.fields(TLTConfig):
        cls = typing.get_type_hints(TLTConfig)[section.name]
        settings = {f.name for f in dataclasses.fields(cls) if is_setting(f)}
        rows = [
            f"| `tlt.{section.name}.{key}` | `{_yaml(defaults[section.name][key])}` | {kind} | {meaning} |"
            for key, kind, meaning in _fields(cls.__name__)
            if key in settings
        ]
        rows = ["| Setting | Default | Value | Meaning |", "|---|---|---|---|", *rows]
        doc = " ".join(cls.__doc__.split())
        parts.append(f"## tlt.{section.name}\n\n{doc}\n\n" + "\n".join(rows) + f"\n\n{NOTES[section.name]}\n")
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

    filled = [(page, tables.render(page.read_text())) for page in tables.PAGES]
    for page, text in ((PAGE, render()), *filled):
        page.write_text(text)
        print(f"{page.relative_to(ROOT)} written")
