"""What the flag does to a config, and how a run that cannot be a TLT run ends."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict
from ray._private import services
from ray._private.utils import write_ray_address

from verl_tlt import activation
from verl_tlt.checks.recipe import ray_address
from verl_tlt.config import TLTConfig


def activate(config):
    activation.apply(config, activation.check(config))
    return OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)["custom"]


def test_settings_travel_beside_a_users_own_custom_node_also_when_it_is_done_twice(recipe):
    with open_dict(recipe):
        recipe.actor_rollout_ref.rollout.custom = {"mine": {"a": 1}}
        recipe.tlt = {"speculation": {"policy": "fixed", "fixed": 1}}
    custom = activate(recipe)
    assert custom["mine"] == {"a": 1}
    assert TLTConfig.from_dict(custom["tlt"]).speculation.fixed == 1
    assert activate(recipe) == custom and recipe.trainer.v1.trainer_mode == "tlt_sync"
    with pytest.raises(AttributeError):  # it stays closed to unknown keys
        recipe.actor_rollout_ref.rollout.typo = 1


def test_paths_are_absolute_because_workers_start_elsewhere_and_a_name_on_the_hub_stays(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe.trainer.default_local_dir = "relative"
    settings = TLTConfig.from_dict({"drafter": {"path": "Org/drafter"}})
    resolved = activation.resolve(recipe, settings)
    assert resolved.trace.dir == str(tmp_path / "relative" / "tlt_trace") and resolved.drafter.path == "Org/drafter"
    (tmp_path / "Org" / "drafter").mkdir(parents=True)
    assert activation.resolve(recipe, settings).drafter.path == str(tmp_path / "Org" / "drafter")


def test_a_run_that_only_validates_trains_no_drafter(recipe):
    assert activation.resolve(recipe, TLTConfig()).spot.enable
    OmegaConf.update(recipe, "trainer.val_only", True, force_add=True)
    assert not activation.resolve(recipe, TLTConfig()).spot.enable


def test_no_spot_training_where_nothing_can_feed_it(recipe, capsys):
    recipe.actor_rollout_ref.actor.strategy = "veomni"
    assert activate(recipe)["tlt"]["spot"]["enable"] is False
    assert "actor_rollout_ref.actor.strategy=veomni has no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "engines", "policy", "dtype"),
    [
        ("bfloat16", "half", {}, "half"),
        ("bfloat16", None, {"dtype": "float16"}, "bfloat16"),
        ("auto", None, {"torch_dtype": "float16"}, "float16"),
        ("float16", "auto", {"text_config": {"dtype": "float16"}}, "float16"),
        ("auto", None, {"dtype": "float32"}, "auto"),
    ],
)
def test_drafters_are_published_in_the_dtype_that_engines_have(recipe, asked, engines, policy, dtype):
    file = Path(recipe.actor_rollout_ref.model.path, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **policy}))
    with open_dict(recipe):
        recipe.actor_rollout_ref.rollout.dtype = asked
        recipe.actor_rollout_ref.rollout.engine_kwargs.vllm = {"dtype": engines}
    activation.apply(recipe, TLTConfig())
    assert recipe.actor_rollout_ref.rollout.dtype == dtype


def test_an_engine_without_a_drafter_has_nothing_to_train_and_nothing_to_calibrate(recipe):
    with open_dict(recipe):
        recipe.tlt = {"speculation": {"source": "ngram"}}
    settings = TLTConfig.from_dict(activate(recipe)["tlt"])
    assert not settings.spot.enable and not settings.speculation.calibrate


def test_what_a_driver_that_joins_a_cluster_lacks_may_be_on_its_other_machines(recipe, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    recipe.data.train_files = "/nowhere/train.parquet"
    activate(recipe)
    assert "verl-tlt: data.train_files=/nowhere/train.parquet does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "ray_init", "joined"),
    [
        ({"RAY_TMPDIR": "HERE"}, {}, "10.0.0.1:6379"),
        ({"TMPDIR": "HERE", "RAY_ADDRESS": "auto"}, {"address": None}, "10.0.0.1:6379"),
        ({"RAY_TMPDIR": "HERE"}, {"address": "auto"}, "10.0.0.1:6379"),
        ({"RAY_TMPDIR": "/nowhere"}, {"_temp_dir": "HERE/ray"}, "10.0.0.1:6379"),
        ({"RAY_TMPDIR": "HERE", "RAY_ADDRESS": "10.0.0.2:1"}, {"address": "auto"}, "10.0.0.2:1"),
        ({"RAY_TMPDIR": "HERE", "RAY_ADDRESS": "10.0.0.2:1"}, {"address": "10.0.0.3:1"}, "10.0.0.3:1"),
        ({"RAY_TMPDIR": "HERE", "RAY_ADDRESS": "local"}, {}, None),
        ({"RAY_TMPDIR": "HERE"}, {"address": "local"}, None),
        ({"RAY_TMPDIR": "/nowhere", "TMPDIR": "HERE"}, {}, None),
    ],
)
def test_a_run_joins_the_cluster_that_ray_finds(recipe, tmp_path, monkeypatch, variables, ray_init, joined):
    """As `ray.init` resolves it, which would start a cluster where it finds none."""
    (tmp_path / "ray").mkdir()
    write_ray_address("10.0.0.1:6379", str(tmp_path / "ray"))
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())  # of other users of this machine
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HERE", str(tmp_path)))
    given = {name: value and value.replace("HERE", str(tmp_path)) for name, value in ray_init.items()}
    with open_dict(recipe):
        recipe.ray_kwargs.ray_init = given
    assert services.canonicalize_bootstrap_address(given.get("address"), given.get("_temp_dir")) == joined
    assert ray_address(recipe) == (joined or "")
    recipe.data.train_files = "/nowhere/train.parquet"
    if joined:
        activate(recipe)
    else:
        with pytest.raises(SystemExit, match=r"/nowhere/train\.parquet does not exist on this machine"):
            activate(recipe)


def test_every_reason_is_one_line_and_nothing_is_rewritten(recipe):
    recipe.data.train_files = "/nowhere/train.parquet"
    recipe.actor_rollout_ref.rollout.name = "sglang"
    with pytest.raises(SystemExit) as stop:
        activate(recipe)
    lines = str(stop.value).splitlines()
    assert len(lines) == 2 and all(line.startswith("verl-tlt: ") and line.endswith(".") for line in lines)
    assert "actor_rollout_ref.rollout.name=sglang" in lines[0] and "/nowhere/train.parquet" in lines[1]
    assert recipe.trainer.v1.trainer_mode == "sync"
