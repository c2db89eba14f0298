"""Settings: one default each; a wrong one is one clear sentence."""

import ast
import dataclasses
import math
import typing
from pathlib import Path

import pytest

from verl_tlt import config as module
from verl_tlt.config import TLTConfig, TLTConfigError, dtype_name, is_setting

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


def leaves(tree, prefix=""):
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def settings():
    """(section, key) of all that a user may set."""
    for section, cls in typing.get_type_hints(TLTConfig).items():
        yield from ((section, f.name) for f in dataclasses.fields(cls) if is_setting(f))


def test_a_constant_or_a_setting_of_the_release_before_leads_to_what_to_do_instead():
    constants = set(leaves(TLTConfig().to_dict())) - {f"{section}.{key}" for section, key in settings()}
    for name in {"spot.poll_s", *constants}:
        section, key = name.split(".")
        with pytest.raises(TLTConfigError, match=rf"^tlt\.{name} is not a setting of .* CHANGELOG\.md lists removed"):
            TLTConfig.from_user({section: {key: 1}})
        assert f"| `tlt.{name}` |" in CHANGELOG


def test_null_may_be_spelled_as_python_does():
    assert TLTConfig.from_user({"trace": {"dir": "None"}, "buffer": {"max_mb": "None"}}) == TLTConfig()


def test_plain_values_come_back_as_the_same_settings():
    settings = TLTConfig.from_dict({"speculation": {"max_draft_length": 2}, "spot": {"max_epochs": 1}})
    assert settings.speculation.max_draft_length == 2 and settings.spot.max_epochs == 1.0
    assert TLTConfig.from_dict(settings.to_dict()) == settings
    assert TLTConfig.from_dict(None) == TLTConfig()


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"spott": {}}, "tlt.spott is not a setting of verl-tlt. Did you mean tlt.spot?"),
        ({"spot": {"wibble": 1}}, "tlt.spot.wibble is not a setting of verl-tlt. Known keys: enable, stop_timeout_s,"),
        ({"spot": 3}, "tlt.spot must be a mapping"),
        ({"spot": {"enable": 1}}, "tlt.spot.enable must be a valid boolean, not 1"),
        ({"drafter": {"vocab": 1}}, "tlt.drafter.vocab must be greater than or equal to 2 or 'full', not 1."),
        ({"drafter": {"method": "mtp", "vocab": 100}}, "tlt.drafter.vocab shapes an EAGLE-3 head"),
        ({"speculation": {"policy": "fixed", "fixed": 4}}, "tlt.speculation.fixed must be 0..max_draft_length=3"),
        ({"speculation": {"fixed": 2}}, "tlt.speculation.fixed needs tlt.speculation.policy=fixed: set that too"),
        ({"speculation": {"max_draft_length": None}}, "tlt.speculation.max_draft_length must be a valid integer, not"),
        ({"speculation": {"max_draft_length": 17}}, "tlt.speculation.max_draft_length must be less than or equal to"),
        ({"buffer": {"held_out": 1.0}}, "tlt.buffer.held_out must be less than 0.9, not 1.0."),
        ({"speculation": {"policy": "godput"}}, "tlt.speculation.policy must be live_table, fixed or"),
    ],
)
def test_a_wrong_setting_names_its_key(tree, sentence):
    with pytest.raises(TLTConfigError) as error:
        TLTConfig.from_dict(tree)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def numbers():
    """(section, key) of every setting that is a number."""
    for section, keys in typing.get_type_hints(TLTConfig).items():
        for key, hint in typing.get_type_hints(keys).items():
            if {int, float} & {hint, *typing.get_args(hint), *sum(map(typing.get_args, typing.get_args(hint)), ())}:
                yield section, key


def test_every_number_has_bounds_and_infinity_is_only_a_number_of_epochs():
    assert len(list(numbers())) >= 14
    for section, key in numbers():
        for number in (-1, 1e300, 2**64, math.inf if key != "max_epochs" else math.nan):
            with pytest.raises(TLTConfigError, match=rf"tlt\.{section}\.{key}"):
                TLTConfig.from_dict({section: {key: number}})
    assert TLTConfig.from_dict({"spot": {"max_epochs": math.inf}}).spot.max_epochs == math.inf


@pytest.mark.parametrize(
    ("spelled", "name"), [("auto", "bfloat16"), ("float", "float32"), ("float16", "float16"), ("torch.half", "float16")]
)
def test_dtypes_have_one_spelling(spelled, name):
    assert dtype_name(spelled) == name


def test_every_setting_is_read_somewhere():
    package = Path(module.__file__).parent
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py") if path.name != "config.py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    sections = typing.get_type_hints(TLTConfig).values()
    assert {f.name for section in sections for f in dataclasses.fields(section)} <= read
