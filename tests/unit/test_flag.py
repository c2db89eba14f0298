"""What asks for TLT, and what only looks so."""

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
        (
            {"trainer": {"plugin": "tlt2"}},
            "trainer.plugin=tlt2 names no trainer plugin that is installed here; did you",
        ),
        ({"trainer": {"plugin": "other"}}, "trainer.plugin=other names no trainer plugin that is installed here (inst"),
        ({"trainer": {"plugn": "tlt"}}, "trainer.plugn=tlt has no effect; did you mean trainer.plugin=tlt?"),
        ({"trainer": {"Plugins": "TLT"}}, "trainer.Plugins=TLT has no effect"),
        ({"trainer": {"v1": {"plugin": "tlt"}}}, "trainer.v1.plugin=tlt has no effect"),
        ({"plugin": "tlt"}, "plugin=tlt has no effect"),
        (
            {"trainer": {}, "tlt": {"drafter": {"path": "/d"}}},
            "tlt.drafter.path is set but TLT is off: add +trainer.pl",
        ),
        ({"trainer": None, "tlt": {}}, "tlt is set but TLT is off"),
    ],
)
def test_what_was_meant_for_tlt_is_a_sentence_that_names_its_key(tree, sentence):
    found = flag.mistaken(closed(tree))
    assert found.startswith(sentence) and found[-1] in ".?" and "\n" not in found


@pytest.mark.parametrize(
    "tree",
    [
        {"trainer": {"plugin": "tlt", "plugn": "tlt"}, "tlt": {"spot": {}}},
        {"trainer": {"plugin": None}, "tlt": {"spot": {"enable": False}}},
        {"trainer": {"plugin": None, "experiment_name": "tlt", "v1": {"trainer_mode": "sync"}}},
        {"trainer": {"plugins": ["profiler"], "logger": "${nowhere}"}},
        {"trainer": None},
        {},
    ],
)
def test_a_run_that_has_nothing_to_do_with_tlt_or_says_so_is_no_mistake(tree):
    assert flag.mistaken(closed(tree)) is None


def test_another_package_s_plugin_is_its_own_matter(tmp_path, monkeypatch):
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{flag.GROUP}]\nother = other.trainer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert flag.mistaken(closed({"trainer": {"plugin": "other"}})) is None
