"""The Hydra side: it finds the config group, refuses what it must, and leaves every other application alone."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

import verl_tlt

spec = importlib.util.spec_from_file_location(
    "verl_tlt_search_under_test", Path(verl_tlt.__file__).parents[1] / "hydra_plugins" / "verl_tlt_search.py"
)
search = importlib.util.module_from_spec(spec)
spec.loader.exec_module(search)

FLAG = ["+trainer.plugin=tlt"]


def plugin(armed):
    return types.SimpleNamespace(armed=lambda: armed)


def main(name):
    return types.SimpleNamespace(__spec__=types.SimpleNamespace(name=name))


STOCK = {"verl": object(), "__main__": main("verl.trainer.main_ppo")}
ARMED = STOCK | {"verl_tlt.plugin": plugin(True)}


@pytest.mark.parametrize(
    "argument",
    [
        "+trainer.plugin=tlt", "trainer.plugin=tlt", "++trainer.plugin=tlt", "+trainer.plugin='tlt'", "+tlt=default",
        "+tlt.drafter.path=/d", "tlt.spot.enable=False",
    ],
)  # fmt: skip
def test_every_spelling_of_the_flag_is_guarded(argument):
    assert search.refusal([argument], STOCK, {}) is not None
    assert search.refusal([argument, "--config-name=mine"], ARMED, {}) is None


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("+tlt=defualt", "write +tlt=default."),
        ("tlt=default", "write +tlt=default."),
        ("trainer.plugin=tlt", "write +trainer.plugin=tlt."),
        ("tlt.spot.enable=False", "is not there without +tlt=default: add that."),
    ],
)
def test_a_misspelt_flag_is_answered_before_hydra_does(argument, instead):
    said = search.refusal([argument, "data.x=1"], ARMED, {})
    assert said.startswith(f"{argument} ") and said.endswith(instead) and "\n" not in said
    assert search.refusal(["+tlt=default", "tlt.spot.enable=False"], ARMED, {}) is None


@pytest.mark.parametrize(
    "arguments",
    [["+trainer.plugin=tlt2"], ["+trainer.plugn=tlt"], ["tltx=1"], ["+tlt.spot.enable=False", "+trainer.plugin=null"]],
)
def test_stock_runs_are_left_alone(arguments):
    assert search.refusal(arguments, STOCK, {}) is None


def test_a_users_own_script_may_use_the_flag_and_other_hydra_applications_are_left_alone():
    assert search.refusal(FLAG, ARMED | {"__main__": types.SimpleNamespace()}, {}) is None
    assert search.refusal(FLAG, {"__main__": main("some.app")}, {}) is None


@pytest.mark.parametrize("name", search.OTHERS)
def test_verls_other_trainers_are_refused(name):
    sentence = f"trainer.plugin=tlt works with verl.trainer.main_ppo, and this is {name}."
    assert search.refusal(FLAG, ARMED | {"__main__": main(name)}, {}) == sentence
    # Also when a script of the user's own calls them.
    assert search.refusal(FLAG, ARMED | {"__main__": types.SimpleNamespace(), name: object()}, {}) == sentence


def test_only_the_refusal_leaves(monkeypatch):
    class Broken:
        def append(self, **_kwargs):
            raise RuntimeError("a Hydra that has changed")

    search.VerlTLTSearchPath().manipulate_search_path(Broken())
    monkeypatch.setattr(search, "refusal", lambda *_: "No.")
    with pytest.raises(SystemExit, match="verl-tlt: No"):
        search.VerlTLTSearchPath().manipulate_search_path(types.SimpleNamespace(append=lambda **_: None))


def test_a_real_hydra_application_finds_the_group_and_nothing_else_changes(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("trainer: {}\nx: 1\n")
    (tmp_path / "app.py").write_text(
        "import hydra\nfrom omegaconf import OmegaConf\n"
        "@hydra.main(config_path='conf', config_name='app', version_base=None)\n"
        "def main(config): print(OmegaConf.to_yaml(config))\nmain()\n"
    )

    def run(*arguments):
        command = [sys.executable, "app.py", "hydra.run.dir=.", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True).stdout

    assert run() == "trainer: {}\nx: 1\n\n"
    assert "plugin: tlt" in run("+tlt=default")
