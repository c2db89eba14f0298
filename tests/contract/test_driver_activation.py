"""The flag on stock verl, in real processes: a run that cannot be a TLT run ends in one sentence before Ray starts,
and without the flag nothing differs from a verl without the plugin.

Every process imports verl, which takes longest by far: they are forks of one that has all but verl (fork_server.py).
"""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from one_row import one_row
from policy_config import write_policy

# What a process without the flag sees of verl: the composed config before and after validation, the registries, and how
# validation ends with other overrides, or with the user's own config.
FACTS = """
    import inspect, json, sys
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config
    import verl.trainer.main_ppo
    import verl.trainer.ppo.v1 as v1
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    place, *recipe = sys.argv[1:]

    def composed(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=[*recipe, *overrides])

    def end(make):
        try:
            return validate_config(make(), use_reference_policy=False, use_critic=False)
        except (HydraException, SystemExit) as stop:
            return str(stop)

    def own():
        with initialize_config_dir(place, version_base=None):
            return compose("mine", overrides=recipe)

    config = composed()
    before = OmegaConf.to_container(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    facts = {
        "config": before,
        "unchanged": OmegaConf.to_container(config) == before,
        "signature": f"{validate_config.__module__}.{validate_config.__qualname__}{inspect.signature(validate_config)}",
        "trainers": {name: str(cls) for name, cls in TRAINER_REGISTRY.items()},
        "replicas": {name: loader.__module__ for name, loader in RolloutReplicaRegistry._registry.items()},
        "engines": {m: {b: {str(k): str(c) for k, c in keys.items()} for b, keys in backends.items()}
                    for m, backends in EngineRegistry._engines.items()},
    }
    ours = sorted(name for name in sys.modules if name.startswith("verl_tlt"))
    found = {}
    for mode in ("sync", "colocate_async", "separate_async"):
        try:
            trainer = v1.get_trainer_cls("tlt_" + mode)
            found[mode] = [cls.__module__ for cls in trainer.__mro__]
            assert trainer.tlt_base_mode == mode and issubclass(trainer, v1.get_trainer_cls(mode))
        except ValueError as error:
            found[mode] = str(error)
    others = [["+trainer.plugin=tlt2"], ["+tlt.drafter.path=/d", "+trainer.plugin=null"], ["tlt.spot.enable=false"]]
    ends = {words[0]: end(lambda: composed(*words)) for words in others}
    def unprepared():
        verl.trainer.main_ppo.run_ppo(composed("+trainer.plugin=tlt"), None)

    hooked = hasattr(verl.trainer.main_ppo.run_ppo, "_verl_tlt")
    ends |= {"own": end(own), "unprepared": end(unprepared) if hooked else None}
    print(json.dumps({"facts": facts, "ours": ours, "trainers": found, "ends": ends}))
"""

FLAG = "+trainer.plugin=tlt"
MINE = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: [pkg://verl.trainer.config]}
trainer: {plugin: tlt}
tlt: {spot: {max_epochs: -1}}
"""
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A policy, a data file and a config of the user's own."""
    path = tmp_path_factory.mktemp("activation")
    write_policy(path / "policy")
    one_row(path / "data.parquet")
    (path / "mine.yaml").write_text(MINE)
    return path


@pytest.fixture(scope="module")
def ended(place, forked):
    """Starts every process of this file; {name: finished process}."""
    recipe = [
        f"data.train_files={place / 'data.parquet'}", f"data.val_files={place / 'data.parquet'}",
        f"actor_rollout_ref.model.path={place / 'policy'}", "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.device=cpu",
    ]  # fmt: skip
    facts = ["-c", textwrap.dedent(FACTS), str(place), *recipe]
    hydra = f"hydra.run.dir={place / 'hydra'}"
    nowhere = ["data.train_files=/nowhere/train.parquet", "tlt.drafter.path=/nowhere/drafter"]
    commands = {
        "missing files": (["-m", "verl.trainer.main_ppo", hydra, *recipe, FLAG, *nowhere], {}),
        "fully async": (["-m", FULLY_ASYNC, hydra, FLAG], {}),
        "no flag": (facts, {}),
        "no plugin": (facts, {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
    }
    common = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "VLLM_", "RAY_"))}
    common |= {"RAY_TMPDIR": str(place / "ray"), "TLT_TESTS_FORKED": "python"}  # all of them

    def end(command):
        arguments, changed = command
        how = {"cwd": place, "capture_output": True, "text": True, "timeout": 900}
        return subprocess.run([sys.executable, *arguments], env=common | changed, **how)

    with ThreadPoolExecutor(2) as two:
        return dict(zip(commands, two.map(end, commands.values()), strict=True))


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("fully async", "trainer.plugin=tlt works with verl.trainer.main_ppo only"),
        ("missing files", "data.train_files=/nowhere/train.parquet does not\ntlt.drafter.path=/nowhere/drafter is not"),
    ],
)
def test_a_run_that_cannot_be_a_tlt_run_does_not_start(ended, place, name, sentences):
    process = ended[name]
    said = [line for line in process.stderr.splitlines() if line.startswith("verl-tlt: ")]
    for line, sentence in zip(said, sentences.splitlines(), strict=True):
        assert line.startswith(f"verl-tlt: {sentence}") and line.endswith((".", "?")), process.stderr
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert "ray init" not in process.stdout and not (place / "ray").exists()


def report(process):
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_without_the_flag_verl_is_as_without_the_plugin(ended):
    with_plugin, without = report(ended["no flag"]), report(ended["no plugin"])
    assert with_plugin["facts"] == without["facts"]
    assert with_plugin["facts"]["unchanged"] and set(with_plugin["facts"]["trainers"]) >= {"sync"}
    assert without["ours"] == []
    light = {"verl_tlt", *(f"verl_tlt.{name}" for name in ("capture", "flag", "plugin"))}
    assert set(with_plugin["ours"]) == light


def test_what_was_meant_for_tlt_never_trains_stock_verl_in_silence(ended):
    ends, without = (report(ended[name])["ends"] for name in ("no flag", "no plugin"))
    assert ends["own"] == "verl-tlt: tlt.spot.max_epochs must be greater than 0, not -1."
    assert "call run_ppo without verl.utils.config.validate_config" in ends["unprepared"]
    assert ends["+trainer.plugin=tlt2"].startswith("verl-tlt: trainer.plugin=tlt2 names no trainer plugin")
    assert ends["+tlt.drafter.path=/d"] is None, "it says that it is stock verl"
    assert without.pop("tlt.spot.enable=false").startswith("Could not override"), "there is no such key"
    assert set(without.values()) == {None}


def test_the_process_that_builds_the_trainer_finds_tlt_or_stops(ended):
    found, missing = report(ended["no flag"])["trainers"], report(ended["no plugin"])["trainers"]
    for mode, modules in found.items():
        assert "verl_tlt.trainer.mixin" in modules
        assert missing[mode].startswith(f"Unknown trainer 'tlt_{mode}'.")
