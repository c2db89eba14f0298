"""The doctor's rules on plain facts: what is refused, what is only said, and that each sentence names its key."""

import dataclasses

import pytest

from verl_tlt.compat.versions import SUPPORTED, release
from verl_tlt.config import DrafterConfig, SpotConfig, TLTConfig
from verl_tlt.doctor.facts import Environment, RecipeFacts
from verl_tlt.doctor.models import Look
from verl_tlt.doctor.rules import MODES, UNTAPPED_LAYOUTS, examine, judge_version

GOOD = Environment("3.11.9", {"verl": "0.9.1", "vllm": "0.24.0", "speculators": "0.9.0"})
BY_NAME = {s.name: s for s in SUPPORTED}


def levels(run, settings=None):
    """{what: level} for everything that is not ok."""
    found = examine(GOOD, run, settings or TLTConfig())
    return {f.what: f.level for f in found if f.level != "ok"}


@pytest.mark.parametrize(
    ("run", "level", "begins"),
    [
        (RecipeFacts(), "ok", "TLT is on"),
        (RecipeFacts(on=False), "warn", "TLT is off: this recipe trains with stock verl until +trainer.plugin=tlt"),
        (RecipeFacts(on=False, mistaken="trainer.plugn=tlt has no effect."), "refuse", "TLT is off: trainer.plugn=tlt"),
    ],
)
def test_the_first_line_says_whether_tlt_is_on(run, level, begins):
    first = examine(GOOD, run, TLTConfig())[0]
    assert (first.level, first.what) == (level, "trainer.plugin") and first.sentence.startswith(begins)


def test_a_good_run_has_nothing_to_say():
    assert levels(RecipeFacts()) == {}


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("verl", "0.9.1", "ok"),
        ("verl", "0.9.1.post1", "ok"),
        ("verl", "0.9.0", "refuse"),
        ("vllm", "0.28.3", "ok"),
        ("verl", "0.8.0", "refuse"),
        ("verl", "0.10.0.dev", "refuse"),
        ("verl", None, "refuse"),
        ("verl", "unknown", "warn"),
        ("vllm", "0.28.0+cpu", "ok"),
        ("vllm", "0.23.1", "refuse"),
        ("vllm", "0.32.0", "warn"),
        ("vllm", None, "refuse"),
        ("speculators", None, "refuse"),
        ("speculators", "0.10.0", "refuse"),
    ],
)
def test_versions(name, version, level):
    finding = judge_version(BY_NAME[name], version)
    assert (finding.level, finding.what) == (level, name)
    assert name in finding.sentence and (version is None or version in finding.sentence or level == "warn")


def test_a_missing_package_says_how_to_get_it():
    assert "pip install 'speculators>=0.9,<0.10'" in judge_version(BY_NAME["speculators"], None).sentence


def test_releases_compare_as_numbers():
    assert release("0.10.1rc2") == (0, 10, 1) > release("0.9.1") == (0, 9, 1)
    assert release("0.24+cpu") == (0, 24, 0)
    assert release("main") is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"trainer_mode": "fully_async"}, "trainer.v1.trainer_mode"),
        ({"trainer_mode": "separate_async", "hybrid_engine": False}, "actor_rollout_ref.hybrid_engine"),
        ({"use_v1": False}, "trainer.use_v1"),
        ({"other_trainer": "async_training"}, "async_training"),
        ({"rollout": "sglang"}, "actor_rollout_ref.rollout.name"),
        ({"disaggregation": True}, "actor_rollout_ref.rollout.disaggregation"),
        ({"data_parallel": 2}, "actor_rollout_ref.rollout.data_parallel_size"),
        ({"refused_sampling": ("actor_rollout_ref.rollout.min_p",)}, "actor_rollout_ref.rollout.min_p"),
        ({"engine_problems": ("s.",)}, "actor_rollout_ref.rollout.engine_kwargs"),
        ({"mtp_rollout": True}, "actor_rollout_ref.model.mtp.enable_rollout"),
        ({"missing_data": (("data.val_files", "/x.parquet"),)}, "data.val_files"),
        ({"policy": Look(problem="p.")}, "actor_rollout_ref.model.path"),
        ({"drafter": Look(problem="d.")}, "tlt.drafter.path"),
        ({"quantized_by": "rollout.quantization=fp8"}, "rollout.quantization"),
    ],
)
def test_each_impossible_run_is_refused_for_that_one_reason(change, what):
    assert levels(RecipeFacts(**change)) == {what: "refuse"}


def test_an_unsupported_mode_says_which_are_supported():
    finding = next(
        f for f in examine(GOOD, RecipeFacts(trainer_mode="fully_async"), TLTConfig()) if f.level == "refuse"
    )
    assert "fully_async" in finding.sentence and all(mode in finding.sentence for mode in MODES)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_the_v1_trainer_is_welcome(mode):
    assert levels(RecipeFacts(trainer_mode=mode)) == {}


@pytest.mark.parametrize("strategy", ["veomni", "torchtitan", "automodel", "mindspeed"])
def test_an_engine_without_a_tap_speculates_only(strategy):
    assert levels(RecipeFacts(strategy=strategy)) == {"actor_rollout_ref.actor.strategy": "warn"}


def test_megatron_feeds_the_drafter_but_for_layouts_without_a_tap():
    assert levels(RecipeFacts(strategy="megatron")) == {}
    for name in UNTAPPED_LAYOUTS:
        key = f"actor_rollout_ref.actor.megatron.{name}"
        assert levels(RecipeFacts(strategy="megatron", megatron=(name,))) == {key: "warn"}
    assert levels(RecipeFacts(strategy="fsdp2", megatron=tuple(UNTAPPED_LAYOUTS))) == {}


def test_a_random_drafter_that_cannot_learn_is_called_useless():
    def sentence(settings):
        return next(f.sentence for f in examine(GOOD, RecipeFacts(strategy="veomni"), settings) if f.level == "warn")

    assert "random" in sentence(TLTConfig())
    assert "random" not in sentence(TLTConfig(drafter=DrafterConfig(path="/d")))


@pytest.mark.parametrize("mode", MODES)
def test_one_replica_alone_warns_that_nothing_will_ever_be_idle(mode):
    alone = {} if mode == "separate_async" else {"trainer.n_gpus_per_node": "warn"}
    assert levels(RecipeFacts(trainer_mode=mode, replicas=1)) == alone
    assert levels(RecipeFacts(trainer_mode=mode, replicas=1), TLTConfig(spot=SpotConfig(enable=False))) == {}


def test_what_could_not_be_looked_at_is_a_warning():
    run = RecipeFacts(policy=Look(unseen="p."), drafter=Look(unseen="d."))
    assert levels(run) == {"actor_rollout_ref.model.path": "warn", "tlt.drafter.path": "warn"}


def test_the_policy_s_family_is_named():
    assert any("is a qwen3 model" in f.sentence for f in examine(GOOD, RecipeFacts(), TLTConfig()))


def test_bypass_mode_warns_that_nothing_feeds_the_drafter():
    assert levels(RecipeFacts(bypass_old_log_prob=True)) == {"algorithm.rollout_correction.bypass_mode": "warn"}


@pytest.mark.parametrize("run", [RecipeFacts(strategy="veomni"), RecipeFacts(bypass_old_log_prob=True)])
def test_a_drafter_that_is_not_to_learn_needs_no_tap(run):
    assert levels(run, TLTConfig(spot=SpotConfig(enable=False))) == {}


def test_a_remote_driver_warns_instead_of_judging_its_own_disk():
    run = RecipeFacts(remote_driver=True, missing_data=(("data.train_files", "/x"),))
    assert levels(run) == {"ray_init.address": "warn"}


def test_without_a_run_only_packages_are_judged():
    assert [f.what for f in examine(GOOD, None, TLTConfig())] == ["verl", "vllm", "speculators"]


def test_every_finding_that_is_not_ok_is_one_sentence():
    worst = RecipeFacts(
        trainer_mode="x", use_v1=False, other_trainer="rollout", strategy="veomni", rollout="sglang",
        disaggregation=True, data_parallel=2, refused_sampling=("k",), engine_problems=("s.",), mtp_rollout=True,
        missing_data=(("data.train_files", "/x"),),
    )  # fmt: skip
    nothing = dataclasses.replace(GOOD, versions={})
    for finding in examine(nothing, worst, TLTConfig()):
        if finding.level != "ok":
            assert finding.sentence.endswith(".") and "\n" not in finding.sentence
