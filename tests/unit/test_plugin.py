"""The entry point: light, silent without the flag, and in the way with it; what asks for TLT."""

import contextlib
import re
import subprocess
import sys
import types

import pytest
from omegaconf import OmegaConf

from verl_tlt import flag, plugin


def closed(tree):
    """As Hydra hands it over."""
    config = OmegaConf.create(tree)
    OmegaConf.set_struct(config, True)
    return config


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"v1": {"trainer_mode": "tlt_sync"}}, True),
        ({"plugin": None, "v1": {"trainer_mode": "sync"}}, False),
        (None, False),
    ],
)
def test_the_flag_is_recognised(trainer, expected):
    assert flag.wanted(closed({"trainer": trainer})) is expected


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"trainer": {"plugin": "tlt2"}}, r"trainer.plugin=tlt2 names no trainer plugin"),
        ({"trainer": {"plugn": "tlt"}, "tlt": {}}, r"trainer.plugn=tlt is no .* Did you mean \+trainer.plugin=tlt"),
        ({"trainer": {"plugins": "tlt"}}, r"trainer.plugins=tlt is no .* Did you mean \+trainer.plugin=tlt"),
        ({"trainer": {"plugins": ["tlt"]}}, r"trainer.plugins=\['tlt'\] is no .* Did you mean \+trainer.plugin=tlt"),
        ({"trainer": {}, "tlt": {}}, "the tlt node does nothing without trainer.plugin: add"),
        ({"trainer": {}, "tlt": "default"}, "the tlt node does nothing without trainer.plugin: add"),
        ({"trainer": {"plugin": "TLT"}, "tlt": {"spot": {}}}, None),
        ({"trainer": {"plugin": None}, "tlt": {"spot": {"enable": False}}}, None),
        ({"trainer": {"plugins": ["profiler"], "logger": "${nowhere}"}}, None),
    ],
)
def test_what_asks_for_a_plugin_that_will_not_run_is_refused_and_nothing_else(tree, sentence):
    refusal = flag.refusal(closed(tree))
    assert re.match(sentence, refusal) if sentence else refusal is None


MAIN = "verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("argv", "started", "program"),
    [
        (["-m", "a=1"], ["python", "-u", "-m", MAIN, "a=1"], MAIN),
        (["-m"], ["python", f"-m{MAIN}"], MAIN),
        (["/a/verl/trainer/main_ppo.py", "b=1"], ["python", "/a/verl/trainer/main_ppo.py", "b=1"], f".a.{MAIN}"),
        (["-c", MAIN], ["python", "-c", "print()", MAIN], "print()"),
        ([""], ["python"], "python"),
        (["job", "a=1", "b=2"], [], ""),
    ],
)
def test_what_python_was_started_with(argv, started, program):
    assert flag.started_program(argv, started) == program


@pytest.mark.parametrize("switch", ["trainer.plugin=tlt", "+trainer.plugin=TLT", "++trainer.plugin=null"])
def test_overrides_of_tlt_need_no_plus(switch):
    given = ["a.b=1", "tlt.drafter.path=/d=x", "+tlt.spot.enable=false", switch, "~tlt.gate", "tlts.x=1"]
    key = switch.lstrip("+")
    ours = ["++tlt.drafter.path=/d=x", "++tlt.spot.enable=false", f"++{key}"]
    assert flag.joined(given) == ["a.b=1", *ours, "~tlt.gate", "tlts.x=1"]


def test_importing_the_plugin_loads_the_standard_library_and_wrapt_only():
    code = (
        "import sys; before = set(sys.modules); import verl_tlt.plugin\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert new == {'verl_tlt', 'wrapt'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [([], 0, "could not install its hooks"), (["+trainer.plugin=tlt"], 1, "this run cannot be a TLT run")],
)
def test_a_plugin_that_cannot_install_its_hooks_says_so(words, status, said):
    code = "import sys; sys.modules['wrapt'] = None; import verl_tlt.plugin"
    done = subprocess.run([sys.executable, "-c", code, *words], timeout=300, capture_output=True, text=True)
    assert done.returncode == status and said in done.stderr


@pytest.mark.parametrize("switched_on", [False, True])
def test_a_verl_without_a_hooked_function_runs_stock_and_refuses_the_flag(monkeypatch, said, switched_on):
    monkeypatch.setattr(sys, "argv", ["main_ppo", *["+trainer.plugin=TLT"] * switched_on])
    with pytest.raises(SystemExit, match=r"no other\.validate_config") if switched_on else contextlib.nullcontext():
        plugin._wrap_validate_config(types.ModuleType("other"))
    assert switched_on or "this verl has no other.validate_config" in said.text


@pytest.mark.parametrize(
    ("trainer", "runs"),
    [
        ({"plugin": "tlt", "v1": {"trainer_mode": "sync"}}, False),
        ({"plugin": "tlt", "v1": {"trainer_mode": "tlt_sync"}}, True),
        ({"v1": {"trainer_mode": "sync"}}, True),
    ],
)
def test_a_program_that_does_not_prepare_the_config_runs_stock_alone(trainer, runs):
    """As verl's fully asynchronous trainer, with the switch in its YAML."""
    stock = types.ModuleType("stock")
    stock.run_ppo = lambda config, **_: "ran"
    plugin._wrap_run_ppo(stock)
    with contextlib.nullcontext() if runs else pytest.raises(SystemExit, match=r"call run_ppo without"):
        assert stock.run_ppo(closed({"trainer": trainer}), task_runner_class=None) == "ran"


def test_with_the_flag_a_broken_install_refuses(recipe, monkeypatch):
    stock = types.ModuleType("stock")
    stock.validate_config = lambda *_: pytest.fail("stock verl went on")
    plugin._wrap_validate_config(stock)
    monkeypatch.setitem(sys.modules, "verl_tlt.activation", None)
    with pytest.raises(SystemExit, match="does not import"):
        stock.validate_config(recipe, True, False)
