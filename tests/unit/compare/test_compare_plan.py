"""A recipe taken apart into what every arm is given, and what is refused before anything starts."""

import dataclasses
import json
from importlib.metadata import version
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import verl_tlt
from verl_tlt import flag
from verl_tlt.checks.recipe import Recipe, _composed, quoted
from verl_tlt.commands.compare.plan import (
    STOCK,
    TLT,
    Arm,
    check_arms,
    first_drafter,
    make_plan,
    measured_with,
    named_arms,
    vllm_arm,
    without_drafter,
)
from verl_tlt.commands.compare.record import CompareError
from verl_tlt.errors import TLTError
from verl_tlt.upstream.versions import location

BASE = ("actor_rollout_ref.rollout.name=vllm", "trainer.device=cpu", "trainer.resume_mode=disable")
WITH = (*BASE, "+trainer.plugin=tlt", "tlt.spot.max_epochs=3")

MINE = "hydra: {searchpath: [pkg://verl.trainer.config]}\ndefaults: [ppo_trainer, _self_]\n"


def plan_of(folder, *overrides, base=BASE):
    return make_plan(Recipe((*base, *overrides)), 4, folder)


def composed(plan, arm, turn=0):
    return plan.recipe.compose(*plan.overrides(arm, turn))


def arm_of(name, drafter=None):
    return {arm.name: arm for arm in named_arms([TLT, name], drafter)}[name]


@pytest.mark.parametrize("given", [BASE, WITH, (*BASE, "+trainer.plugin=tlt")], ids=["stock", "set", "plugin"])
def test_stock_runs_without_tlt_and_tlt_with_the_recipes_settings(tmp_path, given):
    plan = plan_of(tmp_path, base=given)
    tlt = composed(plan, arm_of("tlt-no-spot"))
    assert flag.wanted(tlt) and tlt.tlt.trace.dir == str(tmp_path / "tlt-no-spot" / "trace") and not tlt.tlt.spot.enable
    stock = composed(plan, arm_of(STOCK))
    assert not flag.wanted(stock) and flag.refusal(stock) is None
    if given is WITH:
        assert tlt.tlt.spot.max_epochs == 3


def test_a_recipe_may_be_a_config_that_has_the_flag_without_overrides(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"{MINE}trainer: {{nnodes: 7, plugin: tlt}}\ntlt: {{}}\n")
    plan = make_plan(Recipe((), "mine", folder=str(tmp_path)), 4, tmp_path)
    assert not flag.wanted(composed(plan, arm_of(STOCK))) and flag.wanted(composed(plan, arm_of(TLT)))
    assert composed(plan, arm_of(TLT)).trainer.nnodes == 7
    assert f"--config-path={tmp_path}" in plan.job(arm_of(TLT), 0, {})[0]


@pytest.mark.parametrize(
    ("words", "horizon", "rate"),
    [
        (["lr_warmup_steps=10"], None, 1.0),
        (["lr_warmup_steps=10", "lr_decay_style=cosine"], None, 1.0),
        (["lr_warmup_steps=10", "lr_decay_style=linear", "lr_decay_steps=30"], 30, 0.75),
        (["lr_warmup_steps_ratio=0.5"], 4, 1.0),
        (["lr_warmup_steps=10", "lr_decay_style=linear", "trainer.total_training_steps=30"], 30, 0.75),
        (["lr_warmup_steps_ratio=0.1", "lr_decay_style=linear", "trainer.total_training_steps=100"], 100, 85 / 90),
        (["lr_warmup_steps=10", "trainer.total_training_steps=30", "trainer.v1.trainer_mode=separate_async"], 120, 1.0),
    ],
)
def test_megatrons_learning_rate_is_that_of_the_real_run(tmp_path, words, horizon, rate):
    """By Megatron's own schedule, which does not take a warmup that is longer than its decay."""
    pytest.importorskip("megatron.core")
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    given = [w if w[0] == "t" else f"{node}.optim.{w}" for node in ("actor_rollout_ref.actor", "critic") for w in words]
    plan = plan_of(tmp_path, "model_engine=megatron", *dict.fromkeys(given))
    for arm in (arm_of(STOCK), arm_of(TLT)):
        config = composed(plan, arm)
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            optim.total_training_steps = config.trainer.total_training_steps  # as verl's trainer does
            optimizer = Mock(param_groups=[{}])
            schedule = get_megatron_optimizer_param_scheduler(optimizer, optim)
            schedule.step(15)
            assert horizon in (None, schedule.lr_decay_steps)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(optim.lr * rate)
    assert not any("lr_decay_steps" in word for word in plan_of(tmp_path).overrides(arm_of(TLT), 0)), "of FSDP"


def test_jobs_have_the_same_prompts_where_verl_takes_some_of_the_data(tmp_path):
    def seed(*given):
        return composed(plan_of(tmp_path, *given), arm_of(STOCK)).data.seed

    assert seed("data.train_max_samples=100") == 0 and seed("data.train_max_samples=100", "data.seed=7") == 7
    assert seed() is None


def test_a_checkpoint_is_whole_when_its_job_ends(tmp_path):
    given = ("model_engine=megatron", "actor_rollout_ref.actor.checkpoint.async_save=True")
    assert not composed(plan_of(tmp_path, *given), arm_of(STOCK)).actor_rollout_ref.actor.checkpoint.async_save


@pytest.mark.parametrize("contents", ["save_contents", "load_contents"])
def test_checkpoints_that_no_job_can_go_on_with_are_named(tmp_path, contents):
    key = f"actor_rollout_ref.actor.checkpoint.{contents}"
    with pytest.raises(
        CompareError, match=rf"checkpoint.*{contents}=\['hf_model'\].* lack model, .*: add model to both\.$"
    ):
        plan_of(tmp_path, f"{key}=[hf_model]")


def test_megatron_goes_on_with_the_layout_that_it_has_saved(tmp_path):
    checkpoint, megatron = "actor_rollout_ref.actor.checkpoint", "model_engine=megatron"
    assert plan_of(tmp_path, megatron, f"{checkpoint}.save_contents=[hf_model]")  # verl then loads the same
    with pytest.raises(CompareError, match=r"load_contents=\['hf_model'\] lack model"):
        plan_of(tmp_path, megatron, f"{checkpoint}.load_contents=[hf_model]")


def test_a_config_is_searched_for_where_the_script_starts_verl(tmp_path, overrides):
    """As verl's own examples have it, for which a script changes to the clone's folder."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "verl").symlink_to(location("verl"))
    (tmp_path / "mine.yaml").write_text(MINE.replace("pkg://verl.trainer.config", "file://verl/trainer/config"))
    words = (*overrides, "trainer.resume_mode=disable", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True")
    recipe = Recipe(words, "mine", str(tmp_path / "clone"), str(tmp_path))
    plan, arms = make_plan(recipe, 4, tmp_path), [arm_of(STOCK), arm_of(TLT)]
    assert first_drafter(plan, [TLT], None) is None
    check_arms(plan, arms)
    _composed.cache_clear()
    assert without_drafter(plan, arms) == {TLT: True}
    _composed.cache_clear()
    with recipe.composed() as config:
        assert config.trainer.device == "cpu"


def test_every_turn_goes_on_from_the_one_before(tmp_path):
    plan, arm = plan_of(tmp_path), arm_of(TLT)
    assert {"trainer.resume_mode=disable", "trainer.total_training_steps=4"} <= set(plan.overrides(arm, 0))
    real_runs = {"trainer.rollout_data_dir=null", "trainer.checkpoint_callback_class=null"}
    assert real_runs <= set(plan.overrides(arm, 0)), "its files are left alone, and nobody is told of a checkpoint"
    keeping = dataclasses.replace(arm, overrides=("trainer.rollout_data_dir=/mine",))
    assert composed(plan, keeping).trainer.rollout_data_dir == "/mine", "a benchmark reads the responses"
    second = composed(plan, arm, 1).trainer
    assert (second.resume_mode, second.total_training_steps) == ("resume_path", 8)
    assert second.resume_from_path == str(tmp_path / "tlt" / "global_step_4")
    assert second.default_local_dir == str(tmp_path / "tlt")


def test_the_first_turn_begins_where_the_recipe_would(tmp_path):
    (run := tmp_path / "it's, a run").joinpath("global_step_30").mkdir(parents=True)
    (latest := run / "latest_checkpointed_iteration.txt").write_text("30")
    newest = ("trainer.resume_mode=auto", f"trainer.default_local_dir={quoted(run)}")
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={quoted(run / 'global_step_30')}")
    for given in (newest, named):
        plan = plan_of(tmp_path / "out", *given)
        begin = composed(plan, arm_of(TLT)).trainer
        assert (begin.resume_from_path, begin.total_training_steps) == (str(run / "global_step_30"), 34)
        assert plan.checkpoint(arm_of(TLT), 2) == tmp_path / "out" / "tlt" / "global_step_38"
    for text in (b"30\xff", b"3/0", b"\0", b""):
        latest.write_bytes(text)
        with pytest.raises(CompareError, match="which is no checkpoint"):
            plan_of(tmp_path / "out", *newest)
    (run / "global_step_30").rmdir()
    with pytest.raises(CompareError, match="which is no checkpoint"):
        plan_of(tmp_path / "out", *named)


@pytest.mark.parametrize("drafter", ["/a/drafter", "RedHatAI/Qwen3-8B-speculator.eagle3"])
def test_arms_of_vllm_are_given_the_drafter_and_are_stock_otherwise(tmp_path, drafter):
    plan = plan_of(tmp_path, f"tlt.drafter.path={drafter}", base=WITH)
    arms = {arm.name: arm for arm in named_arms([TLT, "vllm-3"], first_drafter(plan, [TLT], None))}
    assert list(arms) == [STOCK, TLT, "vllm-3"]
    config = composed(plan, arms["vllm-3"])
    engine = config.actor_rollout_ref.rollout
    speculative = engine.engine_kwargs.vllm.speculative_config
    assert (speculative.model, speculative.num_speculative_tokens) == (drafter, 3)
    assert not engine.disable_log_stats and not engine.free_cache_engine and not flag.wanted(config)
    assert composed(plan, arms[TLT]).tlt.drafter.path == drafter


def test_on_a_cluster_a_relative_checkpoint_is_not_looked_for_here(tmp_path, monkeypatch):
    """Where Ray was started, verl may find one."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    auto, named = "trainer.resume_mode=auto", "trainer.resume_mode=resume_path"
    for words, key in (
        ([auto], "default_local_dir"),
        ([named, "trainer.resume_from_path=run/global_step_3"], "resume_from_path"),
    ):
        with pytest.raises(CompareError, match=rf"^trainer\.{key}=.* is relative"):
            plan_of(tmp_path, *words)
    (begin := tmp_path / "run" / "global_step_3").mkdir(parents=True)
    assert plan_of(tmp_path).start is None, "this recipe resumes from nothing"
    assert plan_of(tmp_path, auto, f"trainer.default_local_dir={tmp_path}").start is None
    assert plan_of(tmp_path, named, f"trainer.resume_from_path={begin}").start == begin


def test_all_arms_begin_with_the_drafter_of_the_checkpoint(tmp_path):
    (begin := tmp_path / "run" / "global_step_30").mkdir(parents=True)
    plan = plan_of(tmp_path / "out", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={begin}")
    assert first_drafter(plan, [TLT, "vllm-3"], None) is None
    assert first_drafter(plan, [TLT, "vllm-3"], "/d") == "/d"
    (begin / "tlt_drafter").mkdir()
    (begin / "tlt_drafter" / "config.json").write_text("{}")
    assert first_drafter(plan, [TLT, "vllm-3"], None) == str(begin / "tlt_drafter")
    assert first_drafter(plan, ["vllm-3"], "/d") == "/d"
    with pytest.raises(CompareError, match=r"--drafter is empty"):
        first_drafter(plan, ["vllm-3"], "")
    with pytest.raises(CompareError, match=r"TLT goes on with .*, not with --drafter /d: .* remove .*_step_30\."):
        first_drafter(plan, ["vllm-3", TLT], "/d")


@pytest.mark.parametrize("text", ["/plain", "it's", "a, b = {c} [d]", r"back\slash", "ends in \\", "${not} $(this)"])
def test_whatever_a_path_holds_hydra_reads_it(text):
    value = OverridesParser.create().parse_override(f"a.b={quoted(text)}").value()
    assert str(getattr(value, "text", value)) == text


@pytest.mark.parametrize(
    ("names", "drafter", "said"),
    [
        (["tltt"], "/d", "There is no arm 'tltt': there are stock, tlt, tlt-no-spot, vllm-1 to vllm-16"),
        (["vllm-0"], "/d", "There is no arm"),
        (["vllm-17"], "/d", "There is no arm"),
        (["tlt", "vllm-3"], None, "vllm-3 needs a drafter: name one with --drafter or tlt.drafter.path"),
        (["stock", ""], None, "compared with nothing"),
    ],
)
def test_arms_that_there_are_not_are_refused(names, drafter, said):
    with pytest.raises(CompareError, match=said):
        named_arms(names, drafter)


def test_what_the_doctor_or_hydra_refuses_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(CompareError, match="There is no recipe"):
        plan_of(tmp_path, base=())
    with pytest.raises(TLTError, match=r"no\.such\.key"):
        plan_of(tmp_path, "no.such.key=1")
    other = plan_of(tmp_path, "actor_rollout_ref.rollout.name=sglang")
    far = first_drafter(other, [TLT], "hdfs://nn/d")
    for arms, drafter, said in (
        ([arm_of(TLT)], None, r"Arm tlt: .*rollout\.name=sglang is not supported"),
        ([Arm("odd", "", False, ("no.such.key=1",))], None, r"Arm odd: .*no\.such\.key"),
        (named_arms(["vllm-3"], "/no/drafter"), "/no/drafter", r"tlt\.drafter\.path=/no/drafter is not a directory"),
        ([arm_of(TLT, far)], far, r"tlt\.drafter\.path=hdfs://nn/d is on another file system"),
    ):
        with pytest.raises(CompareError, match=said):
            check_arms(other, arms, drafter)
    with pytest.raises(TLTError, match=r"^nobody/no-head is no folder here and could not be fetched"):
        check_arms(plan_of(tmp_path), named_arms(["vllm-3"], "nobody/no-head"), "nobody/no-head")
    assert not list(tmp_path.iterdir())


def test_a_comparison_keeps_the_releases_and_the_gpu_it_was_measured_with(monkeypatch):
    """vLLM's platform names the GPU; here is none, so vLLM's name of this machine stands for it."""
    here = measured_with(Recipe(BASE))
    assert here == {"verl": version("verl"), "vllm": version("vllm"), "verl-tlt": verl_tlt.__version__}
    on_gpu = Recipe((*BASE, "trainer.device=cuda", "trainer.n_gpus_per_node=1"))
    assert measured_with(on_gpu) == here
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert measured_with(on_gpu) == {**here, "GPU": "cpu"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # whose machines may have others
    assert measured_with(on_gpu) == here


def test_what_two_calls_may_differ_in_is_no_other_comparison(tmp_path):
    """Many a script writes the date into its names."""
    arms = named_arms([TLT], None)
    one, two = (plan_of(tmp_path, f"trainer.experiment_name={name}").asked(arms) for name in "ab")
    assert one == two
    (tmp_path / "mine.yaml").write_text(MINE)
    for other in (Recipe((*BASE, "data.seed=2")), Recipe(BASE, "mine", folder=str(tmp_path))):
        asked = make_plan(other, 4, tmp_path).asked(arms)
        assert {name for name, value in asked.items() if value != one[name]} == {"recipe"}
    more = plan_of(tmp_path).asked([*arms, vllm_arm("vllm-3", "", "/d", 3)])
    assert json.loads(json.dumps(more))["arm vllm-3"]
