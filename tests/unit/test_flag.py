"""What asks for TLT, and what is refused because it would not run with it."""

import re

import pytest
from omegaconf import OmegaConf

from verl_tlt import flag


def closed(tree):
    """As Hydra hands it over."""
    config = OmegaConf.create(tree)
    OmegaConf.set_struct(config, True)
    return config


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"plugin": "tlt"}, True),
        ({"plugin": "TLT"}, True),
        ({"plugin": None}, False),
        ({"plugin": "other"}, False),
        ({"v1": {"trainer_mode": "tlt_sync"}}, True),
        ({"v1": {"trainer_mode": "sync"}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_the_flag_is_recognised(trainer, expected):
    assert flag.wanted(closed({"trainer": trainer})) is expected


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"trainer": {"plugin": "tlt2"}}, r"trainer.plugin=tlt2 names no trainer plugin .* \(installed: .*tlt.*\)\."),
        ({"trainer": {"plugn": "tlt"}, "tlt": {}}, "the tlt node does nothing without trainer.plugin: add"),
        ({"trainer": None, "tlt": {}}, "the tlt node does nothing"),
        ({"trainer": {"plugin": "TLT"}, "tlt": {"spot": {}}}, None),
        ({"trainer": {"v1": {"trainer_mode": "tlt_sync"}}, "tlt": {"spot": {}}}, None),
        ({"trainer": {"plugin": None}, "tlt": {"spot": {"enable": False}}}, None),
        ({"trainer": {"plugn": "tlt", "v1": {"plugin": "tlt"}}, "plugin": "tlt"}, None),
        ({"trainer": {"plugins": ["profiler"], "logger": "${nowhere}"}}, None),
        ({}, None),
    ],
)
def test_what_asks_for_a_plugin_that_will_not_run_is_refused_and_nothing_else(tree, sentence):
    refusal = flag.refusal(closed(tree))
    assert re.match(sentence, refusal) if sentence else refusal is None
