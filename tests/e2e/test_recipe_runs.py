"""Recipes, unchanged and scaled down, really run: all but one that is another's run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.faults.run import REPLAY
from recipes import check
from tests.toy.assets import Assets, build_reward_model
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.timeline import rl_steps

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

RM = "reward.reward_model"
REWARD_MODEL = (
    "reward.custom_reward_function.path=null", f"{RM}.enable=True", f"{RM}.rollout.name=vllm",
    f"{RM}.rollout.dtype=float32", f"{RM}.rollout.tensor_model_parallel_size=1", f"{RM}.rollout.max_model_len=320",
    f"{RM}.rollout.max_num_batched_tokens=1024",
    f"{RM}.rollout.max_num_seqs=16", f"{RM}.rollout.gpu_memory_utilization=0.1",
)  # fmt: skip
"""verl's own reward model, on the devices of the rollout."""

FORCED = (
    "data.shuffle=False",
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={Assets.agent_loop}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
)
"""Every response of a given length."""
ROUTER = f"actor_rollout_ref.rollout.router_config_path={Assets.router}"
"""And on a given replica."""
RECORDED = "TLT_FAULTS_RECORDED"


def test_conversations_with_a_tool_and_n_grams(tmp_path):
    recipe, extra = check.RECIPES["grpo_tools_qwen3_4b"], ["tlt.speculation.source=ngram"]
    steps = check.run(recipe, tmp_path / "tools", extra=extra)
    assert all(step["num_turns/mean"] > 2 for step in steps), "nobody called the tool"
    assert any(step.get("tlt/draft_length_mean", 0.0) > 0.0 for step in steps), "nothing was drafted"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)


def test_a_critic(tmp_path):
    steps = check.run(check.RECIPES["ppo_qwen3_8b"], tmp_path / "ppo", steps=3)
    assert [step["tlt/drafter_off_frac"] for step in steps] == [0.0, 0.0, 0.0]


def test_groups_that_teach_nothing_are_sampled_anew(tmp_path):
    """DAPO's dynamic sampling: at a low temperature many groups are all right or all wrong; others are asked for."""
    out = tmp_path / "dapo"
    extra = ["actor_rollout_ref.rollout.temperature=0.5", "algorithm.filter_groups.max_num_gen_batches=1000"]
    steps = check.run(check.RECIPES["dapo_qwen2.5_32b"], out, extra=extra)
    used = 2 * len(steps)  # groups
    kinds = [f"training/filter_groups/{kind}_samples" for kind in ("evicted", "discarded_surplus")]
    unused = sum(step.get(kind, 0) for step in steps for kind in kinds)
    assert unused > 0.3 * used, "every group was used: nothing was refilled"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)


def forced(out: Path, steps: list[dict]) -> None:
    """No response was lost or cut short: every step's lengths are those of its prompts."""
    rows = pq.read_table(out / "assets" / "train.parquet")["extra_info"].to_pylist()
    for i, step in enumerate(steps):
        given = [min(length, 192) for row in rows[4 * i : 4 * i + 4] for length in row["forced_lengths"][:4]]
        assert step["response_length/mean"] == pytest.approx(sum(given) / 16), i
        assert (step["response_length/min"], step["response_length/max"]) == (min(given), max(given)), i


def score(model: Path, prompt: str, response: str) -> float:
    """What the reward model thinks of a text, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return scorer(**tokenizer(prompt + response, return_tensors="pt")).logits.item()


def test_lora_and_a_colocated_reward_model(tmp_path):
    """At given lengths and replicas, of which some step surely leaves one idle; the reward model's engines, which are
    stock ones, wake up on the devices on which the drafter was trained a moment ago."""
    out, rm = tmp_path / "lora", build_reward_model(tmp_path / "reward")
    extra = [*FORCED, ROUTER, *REWARD_MODEL, f"{RM}.model_path={rm}", f"trainer.rollout_data_dir={out}/dump"]
    steps = check.run(check.RECIPES["grpo_lora_qwen3_8b"], out, steps=4, extra=extra)
    assert steps[-1]["tlt/drafter_version"] >= 1.0, "nothing was trained and published"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    forced(out, steps)
    for line in (out / "dump" / "4.jsonl").read_text().splitlines()[:3]:
        said = json.loads(line)
        assert said["score"] == pytest.approx(score(rm, said["input"], said["output"]), abs=1e-3)
    trace = read_trace(out / "trace")
    assert len(trace.engine_files) == 2, "the reward model's engines are not ours"
    for session in trace.sessions:
        (reward,) = (p for p in trace.phases if (p.step, p.name) == (session.step, "reward"))
        assert session.end <= reward.start


def test_n_grams_alone(tmp_path):
    """Without a drafter and without training: what engines without hidden-state capture get; the paper's TLT-Base."""
    out, recipe = tmp_path / "alone", check.RECIPES["grpo_deepseek_r1_distill_qwen_7b"]
    extra = [
        *FORCED,
        "tlt.spot.enable=false",
        "tlt.speculation.source=ngram",
    ]
    steps = check.run(recipe, out, steps=3, extra=extra)
    for step in steps:
        assert step["tlt/accept_rate_pos_1"] > 0.2
        assert 1.0 < step["tlt/accept_length"] <= 3.0
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    forced(out, steps)
    assert not read_trace(out / "trace").sessions
    assert all(step.get("tlt/trained_s", 0.0) == 0.0 == step["tlt/errors"] for step in steps)
    assert not list(out.rglob("provenance.json")), "a drafter was saved"


def test_a_mixture_of_experts_on_one_replica(tmp_path):
    """One replica is never idle while another decodes: it speculates, and nothing goes wrong."""
    sizes = ("trainer.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node", "ray_kwargs.ray_init.num_gpus")
    steps = check.run(check.RECIPES["grpo_qwen3_30b_a3b"], tmp_path / "moe", extra=[f"{size}=1" for size in sizes])
    assert any(step["tlt/draft_length_frac_2"] > 0.5 for step in steps), "nothing was drafted"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert all(step.get("tlt/idle_s", 0.0) < 1.0 for step in steps)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """(folder, overrides, steps) of a run with verl's Megatron actor over two ranks, with tensor and sequence
    parallelism and offloading, that left a checkpoint and what it trained on. It learns so fast that a replica with
    weights of the step before would be far off."""
    out = tmp_path_factory.mktemp("megatron")
    (out / "recorded").mkdir()
    extra = [*FORCED, *REPLAY, ROUTER, "actor_rollout_ref.actor.optim.lr=1e-4", "trainer.save_freq=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORDED, str(out / "recorded"))
        recipe = check.RECIPES["grpo_llama3.3_70b_megatron"]
        yield out, extra, check.run(recipe, out, steps=5, extra=extra)


def test_a_megatron_actor(megatron):
    out, _, steps = megatron
    trace = read_trace(out / "trace")
    sessions = [session for session in trace.sessions if session.steps]
    assert sessions, "no idle time was used"
    for session in sessions:
        rollout = rl_steps(trace)[session.step]
        assert rollout.start < session.start < rollout.end
    assert steps[-1]["tlt/drafter_version"] >= 1.0, "nothing was trained and published"
    assert all(step["tlt/reload_failures"] == 0.0 for step in steps)
    assert all(reload.ok for reload in trace.reloads)
    assert all(step["tlt/spot_failures"] == 0.0 for step in steps)
    assert all(step["actor/grad_norm"] > 0.0 for step in steps), "the actor learned nothing"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    forced(out, steps)


def same_update(one, other):
    """Two steps trained on the same responses, with the same policy."""
    assert one["critic/score/mean"] == other["critic/score/mean"]
    assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.01)
    assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-3)


def test_fsdp2_makes_the_same_updates_of_the_same_responses(megatron, tmp_path, monkeypatch):
    """The recipe for FSDP2, with the loss of the one for Megatron, replays what that one recorded.

    What was recorded is as probable as its own policy says before an update, and in the last step, which is its own:
    in between the two policies differ by what Adam makes of a gradient's rounding.
    """
    out, extra, theirs = megatron
    monkeypatch.setenv(RECORDED, str(shutil.copytree(out / "recorded", tmp_path / "recorded")))
    extra = [*extra, "actor_rollout_ref.actor.use_kl_loss=False", "trainer.save_freq=-1"]
    ours = check.run(check.RECIPES["grpo_qwen2.5_7b"], tmp_path / "fsdp2", steps=6, extra=extra)
    for one, other in zip(ours[:5], theirs, strict=True):
        same_update(one, other)
    assert any(step["tlt/draft_length_frac_2"] > 0.5 for step in ours), "nothing was drafted"
    assert max(step["training/rollout_probs_diff_max"] for step in (ours[0], ours[5])) < 1e-4


def test_a_megatron_run_goes_on_with_its_policy_and_its_drafter(megatron, tmp_path):
    """From its fourth step, in a copy: the fifth is the one that it made before, the sixth is new."""
    before, extra, steps = megatron
    out = tmp_path / "resumed"
    shutil.copytree(before, out, ignore=shutil.ignore_patterns("trace", "recorded"))
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    recipe = check.RECIPES["grpo_llama3.3_70b_megatron"]
    again, new = check.run(recipe, out, steps=6, extra=extra, done=4)
    same_update(again, steps[4])
    assert max(step["training/rollout_probs_diff_max"] for step in (again, new)) < 1e-4
    saved = json.loads((out / "checkpoints/global_step_4/tlt_drafter/provenance.json").read_text())
    assert saved["policy_step"] == 4 and read_trace(out / "trace").reloads[0].version == saved["version"] >= 1


def test_dapo_over_the_stages_of_a_megatron_pipeline(tmp_path):
    """What is captured comes from both stages, embedding and head from the first and the last.

    At given lengths and replicas, so that one is idle, and without refills, during which none leaves.
    """
    out, recipe = tmp_path / "pipeline", check.RECIPES["dapo_qwen2.5_32b_megatron"]
    extra = [*FORCED, ROUTER, "algorithm.filter_groups.enable=False", "actor_rollout_ref.actor.optim.lr=1e-4"]
    steps = check.run(recipe, out, steps=4, extra=extra)
    assert any(step.get("tlt/trained_s", 0.0) > 0.0 for step in steps), "nothing was captured"
    assert any(step["tlt/draft_length_frac_2"] > 0.5 for step in steps), "nothing was drafted"
    assert all(step["actor/grad_norm"] > 0.0 for step in steps), "the actor learned nothing"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert all(reload.ok for reload in read_trace(out / "trace").reloads)


def test_experts_dealt_out_to_the_ranks_of_a_megatron_actor(tmp_path):
    """A mixture whose attention is split over two ranks, and of whose experts each rank has half."""
    out, recipe = tmp_path / "experts", replace(check.RECIPES["grpo_llama3.3_70b_megatron"], policy="moe")
    megatron = "actor_rollout_ref.actor.megatron"
    ranks = [f"{megatron}.expert_model_parallel_size=2", f"{megatron}.expert_tensor_parallel_size=1"]
    # Nothing that it writes is rewarded; it learns to be surer.
    learning = ["actor_rollout_ref.actor.entropy_coeff=-0.1", "actor_rollout_ref.actor.optim.lr=1e-3"]
    # The gate needs seven held-out prompts. Eight steps of four prompts hold out six.
    extra = [*FORCED, ROUTER, *ranks, *learning, "tlt.gate.enable=false"]
    steps = check.run(recipe, out, steps=8, extra=extra)
    assert all(step["actor/grad_norm"] > 0.0 for step in steps), "the actor learned nothing"
    assert any(session.steps for session in read_trace(out / "trace").sessions), "no idle time was used"
    assert steps[-1]["tlt/drafter_version"] >= 1.0, "nothing was trained and published"
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    forced(out, steps)
