"""`verl-tlt advise` as a user calls it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import verl_tlt
from verl_tlt.checks.recipe import compose
from verl_tlt.commands.advise.hardware import find_shape, read_workload
from verl_tlt.commands.advise.judge import PEERS
from verl_tlt.commands.cli import app
from verl_tlt.errors import TLTError

ROLLOUT = "actor_rollout_ref.rollout"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
RECIPE = [
    "+tlt=default", f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.path=Some/Policy-8B",
    "algorithm.adv_estimator=grpo", "data.train_batch_size=8", f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=8", "data.max_prompt_length=512",
    "data.max_response_length=8192",
]  # fmt: skip
STOCK = {
    "timing_s/gen": 80.0, "timing_s/step": 100.0, "response_length/mean": 1200.0, "response_length/max": 7000.0,
    "response_length/clip_ratio": 0.0, "prompt_length/mean": 120.0,
}  # fmt: skip


def advise(*words):
    done = CliRunner().invoke(app, ["advise", *words], env={"COLUMNS": "1000"})
    return done.exit_code, done.output


@pytest.fixture
def metrics(tmp_path):
    """Writes verl's metrics of a stock run; returns the file."""

    def write(**changes):
        path = tmp_path / "metrics.jsonl"
        row = {**STOCK, **changes}
        path.write_text("".join(json.dumps({"step": i, "data": row}) + "\n" for i in (1, 2, 3)))
        return str(path)

    return write


def test_a_recipe_alone_is_judged_and_what_was_assumed_is_said():
    code, said = advise(*RECIPE)
    assert code == 0, said
    for what in ("GPU: H100", "policy's shape: 8.0B", "response lengths:", "outside rollout:", "KV cache:"):
        assert what in said
    assert "32 responses on 4 replicas, each of 2 GPUs; 8 GPUs train" in said
    assert "acceptance:" in said
    assert "Does it pay? yes, with a trained drafter: " in said and "Most of this is assumed" in said
    assert "Does it pay? yes: " in advise(*RECIPE, "--acceptance", "0.7,0.7,0.7")[1]
    own = advise(*RECIPE, "tlt.drafter.method=mtp")[1]
    assert "Does it pay? yes: " in own and "random head" in said and "random head" not in own


def test_a_stock_run_replaces_assumptions(metrics):
    code, said = advise(*RECIPE, "--metrics", metrics())
    assert code == 0, said
    assert "80% (80.0 of 100.0 s)" in said and "5.00x" in said and "metrics.jsonl" in said
    assert "response lengths:" not in said and "outside rollout:" not in said and "Most of this is assumed" not in said
    assert "the run's policy: that of the recipe, which --metrics " in said


def test_accept_lengths_are_for_the_context_that_the_run_showed(metrics):
    """A mean response of 1200 tokens behind the run's mean prompt, whatever data.max_prompt_length allows."""
    contexts = []
    for prompt in (120.0, 480.0):
        _, said = advise(*RECIPE, "--metrics", metrics(**{"prompt_length/mean": prompt}))
        contexts.append(int(re.search(r"step costs at (\d+) tokens", said)[1]))
    assert contexts[1] - contexts[0] == 360


@pytest.mark.parametrize(
    ("recipe", "run", "decides"),
    [
        ([], {"timing_s/gen": 10.0, "timing_s/reward": 60.0}, "reward-bound: reward takes 60.0 s"),
        ([], {"timing_s/agent_loop/tool_calls/mean": 9.0, "timing_s/agent_loop/generate_sequences/mean": 1.0},
         "tool-bound: responses wait for tools 90%"),
        (["data.max_response_length=64"], {"timing_s/gen": 1.2, "timing_s/step": 2.0, "response_length/mean": 30.0,
                                          "response_length/max": 64.0}, "its responses are short: "),
        (["data.train_batch_size=8192", f"{ROLLOUT}.max_num_seqs=1024", "data.max_response_length=512"],
         {"response_length/mean": 500.0, "response_length/max": 512.0, "response_length/clip_ratio": 0.9},
         "its replicas never drain: "),
    ],
    ids=["reward", "tools", "short", "full"],
)  # fmt: skip
def test_no_where_it_is_no(recipe, run, decides, metrics):
    code, said = advise(*RECIPE, *recipe, "--gpu", "H20", "--metrics", metrics(**run))
    assert code == 0 and "Does it pay? no: " in said and decides in " ".join(said.split()), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "TPU"], "--gpu TPU is not one of A100"),
        (["--acceptance", "0.8,2"], "--acceptance takes numbers in 0..1"),
        (["--acceptance", "much"], "--acceptance takes numbers in 0..1"),
        (["--response-length", "9000"], "--response-length must be between 1 and data.max_response_length=8192"),
        (["--metrics", "nowhere.jsonl"], "--metrics nowhere.jsonl cannot be read: No such file"),
        (["--metrics", "a", "--response-length", "9"], "--response-length is read from the run in a"),
        (["actor_rollout_ref.model.path=unnamed/policy"], "its name does not tell its size"),
        (["actor_rollout_ref.model.path=unnamed/policy-0b"], "its name does not tell its size"),
        (["data.train_batch_size=2147483647"], "ask for 8,589,934,588 responses on 4 replicas: too many to simulate"),
        (["trainer.nnodes=2147483647"], "trainer.nnodes ask for 32 responses on 8,589,934,588 replicas: too many"),
        *(
            ([f"{SHARE}={value}"], f"{SHARE} must be above 0 and at most 1, not")
            for value in ("0", "1.5", "much", "true")
        ),
        (["trainer.n_gpus_per_node=1"], "ask for 2 GPUs a replica"),
        (["data.train_batch_size=0"], "data.train_batch_size"),
        (["no.such.key=1"], "no.such.key"),
        (["tlt.spot.poll_s=never"], "tlt.spot.poll_s"),
        (["tlt.speculation.arms=[0]"], "never drafts"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, said):
    code, output = advise(*RECIPE, *words)
    assert code == 1 and said in output and output.count("\n") == 1, output


def test_a_run_with_another_response_limit_is_refused(metrics):
    """Responses longer than the recipe allows, or in every step several of one length, the longest."""
    code, said = advise(*RECIPE, "data.max_response_length=1024", "--metrics", metrics())
    assert code == 1 and "has responses of 7000 tokens, and the recipe data.max_response_length=1024." in said
    cut = metrics(**{"response_length/clip_ratio": 0.25})
    code, said = advise(*RECIPE, "--metrics", cut)
    assert code == 1 and "cut its responses at 7000 tokens, and the recipe has data.max_response_length=8192." in said
    assert said.count("\n") == 1


def test_the_longest_of_each_step_is_not_taken_for_cut(metrics):
    """verl counts the step's longest response as clipped, wherever it ends."""
    counted = advise(*RECIPE, "--metrics", metrics(**{"response_length/clip_ratio": 1 / 32}))
    assert counted == advise(*RECIPE, "--metrics", metrics()) and counted[0] == 0


def test_what_does_not_fit_into_the_kv_cache_waits():
    large = [*RECIPE, "data.train_batch_size=256", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    rooms = []
    for gpu in ("H200", "L40S"):
        code, said = advise(*large, f"{ROLLOUT}.gpu_memory_utilization=0.8", "--gpu", gpu)
        assert code == 0
        rooms.append(int(re.search(r"cache of an engine +([\d,]+)", said)[1].replace(",", "")))
    assert rooms[0] > 4 * rooms[1]
    code, said = advise(*RECIPE, f"{ROLLOUT}.tensor_model_parallel_size=1", "--parameters", "70")
    assert code == 1 and "70.0B parameters leave no room for a KV cache on 1 such GPUs" in said


def test_the_work_of_recipes_is_read():
    sync = read_workload(compose([*RECIPE, "actor_rollout_ref.actor.use_kl_loss=true"], "ppo_trainer"))
    assert (sync.replicas, sync.requests, sync.reference, sync.critic) == (4, 32, True, False)
    apart = [*RECIPE, "trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4"]
    assert read_workload(compose(apart, "ppo_trainer")).replicas == 4
    assert read_workload(compose([*RECIPE, "algorithm.adv_estimator=gae"], "ppo_trainer")).critic


def test_a_policys_shape_is_that_of_its_config(tmp_path, monkeypatch):
    fields = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "model_type": "qwen3",
              "max_position_embeddings": 40960}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    shape, source = find_shape(f"~/{tmp_path.name}")
    assert shape.parameters == pytest.approx(8.2e9, rel=0.02) and shape.kv_bytes == 147456 and "config" in source
    assert shape.head == 32_768 * 4096, "of a new drafter, not of the policy"
    script = tmp_path / "recipe.sh"
    words = shlex.join([*RECIPE, f"actor_rollout_ref.model.path={tmp_path.name}"])
    script.write_text(f"cd {tmp_path.parent}\npython3 -m verl.trainer.main_ppo {words}\n")
    assert "policy's shape: 8.2B parameters, from its config.json" in advise(str(script))[1]
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048,
               "num_hidden_layers": 48, "num_key_value_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields | experts))
    shape, _ = find_shape(str(tmp_path))
    assert shape.parameters == pytest.approx(30.5e9, rel=0.03) and shape.active == pytest.approx(3.3e9, rel=0.1)
    named, _ = find_shape("Qwen/Qwen3-30B-A3B")
    assert (named.parameters, named.active, named.kv_bytes) == (30e9, 3e9, 98e3), "a mixture is like a mixture"
    assert find_shape("Qwen/Qwen2.5-32B")[0].kv_bytes == 262e3
    with pytest.raises(TLTError, match="--parameters"):
        find_shape("mine/policy")


@pytest.mark.parametrize("acceptance", ["0.8", "0.8,0.75,0.7"])
def test_acceptance_that_was_extended_is_said(acceptance):
    positions = acceptance.count(",") + 1
    said = f"acceptance beyond position {positions}: 0.{acceptance[-1]}0 as there"
    assert said in advise(*RECIPE, "--acceptance", acceptance)[1]
    assert "acceptance beyond" not in advise(*RECIPE, "--acceptance", ",".join([acceptance] * 8))[1]
    assert "acceptance beyond" not in advise(*RECIPE)[1]


def test_the_pages_example_is_what_the_command_prints():
    page = (Path(verl_tlt.__file__).parents[1] / "docs" / "will-it-pay.md").read_text()
    command, printed = re.search(r"## An example\n+```bash\n(.*?)```.*?```console\n(.*?)```", page, re.DOTALL).groups()
    _, _, *words = shlex.split(command.replace("\\\n", " "))
    code, said = advise(*words)
    assert code == 0 and "".join(said.split()).startswith("".join(printed.split()))


def test_the_table_beside_the_papers_clusters_is_what_the_command_prints():
    page = (Path(verl_tlt.__file__).parents[1] / "docs" / "will-it-pay.md").read_text()
    rows = re.findall(r"^\| ([\w-]+/[\w.-]+) \| (\d) \| ([\d.]+) \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    assert max(paper for _, _, paper, _ in rows) in PEERS
    for policy, nodes, paper, answer in rows:
        low, high = re.search(r"\((.*) to (.*)\)", answer).groups()
        assert float(low) <= float(paper) <= float(high), "the range is one"
        recipe = [
            "+tlt=default", f"{ROLLOUT}.name=vllm", f"actor_rollout_ref.model.path={policy}",
            "algorithm.adv_estimator=grpo", "data.train_batch_size=64", f"{ROLLOUT}.n=8",
            f"{ROLLOUT}.tensor_model_parallel_size={4 if '7B' in policy else 8}", "trainer.n_gpus_per_node=8",
            f"trainer.nnodes={nodes}", "data.max_prompt_length=2048", "data.max_response_length=30720",
        ]  # fmt: skip
        _, said = advise(*recipe, "--gpu", "H100")
        assert re.search(rf"step, times as fast as stock +{re.escape(answer)} ", said), f"{policy}, {nodes} nodes"
