"""`verl-tlt advise` as a user calls it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from policy_config import POLICY
from typer.testing import CliRunner

import verl_tlt
from verl_tlt.commands.advise.judge import PEERS
from verl_tlt.commands.cli import app

ROLLOUT = "actor_rollout_ref.rollout"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
RECIPE = [
    "+trainer.plugin=tlt", f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.path=Some/Policy-8B",
    "algorithm.adv_estimator=grpo", "data.train_batch_size=8", f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=8", "data.max_prompt_length=512",
    "data.max_response_length=8192",
]  # fmt: skip
STOCK = {
    "timing_s/gen": 80.0, "timing_s/step": 100.0, "response_length/mean": 1200.0, "response_length/max": 7000.0,
    "response_length/clip_ratio": 0.0, "prompt_length/mean": 120.0,
}  # fmt: skip
PAGE = (Path(verl_tlt.__file__).parents[1] / "docs" / "will-it-pay.md").read_text()


def advise(*words):
    done = CliRunner().invoke(app, ["advise", *words], env={"COLUMNS": "1000"})
    return done.exit_code, done.output


@pytest.fixture
def metrics(tmp_path):
    """Writes verl's metrics of a stock run; returns the options that name it."""

    def write(**changes):
        path = tmp_path / "metrics.jsonl"
        row = {**STOCK, **changes}
        path.write_text("".join(json.dumps({"step": i, "data": row}) + "\n" for i in (1, 2, 3)))
        return "--metrics", str(path)

    return write


def test_a_recipe_alone_is_judged_and_what_was_assumed_is_said():
    code, said = advise(*RECIPE)
    assert code == 0, said
    for what in ("GPU: H100", "policy's shape: 8.0B", "response lengths:", "outside rollout:", "KV cache:",
                 "acceptance:", "32 responses on 4 replicas, each of 2 GPUs; 8 GPUs train", "Most of this is assumed",
                 "Does it pay? yes, with a trained drafter: "):  # fmt: skip
        assert what in said
    assert "Does it pay? yes: " in advise(*RECIPE, "--acceptance", "0.7,0.7,0.7")[1]
    own = advise(*RECIPE, "tlt.drafter.method=mtp")[1]
    assert "Does it pay? yes: " in own and "random head" in said and "random head" not in own


def test_a_stock_run_replaces_assumptions(metrics):
    code, said = advise(*RECIPE, *metrics())
    assert code == 0, said
    assert "80% (80.0 of 100.0 s)" in said and "5.00x" in said and "metrics.jsonl" in said
    assert "response lengths:" not in said and "outside rollout:" not in said and "Most of this is assumed" not in said
    assert "the run's policy: that of the recipe, which --metrics " in said


def test_accept_lengths_are_for_the_context_that_the_run_showed(metrics):
    """A mean response of 1200 tokens behind the run's mean prompt, whatever data.max_prompt_length allows."""
    said = [advise(*RECIPE, *metrics(**{"prompt_length/mean": prompt}))[1] for prompt in (120.0, 480.0)]
    short, long = (int(re.search(r"step costs at (\d+) tokens", text)[1]) for text in said)
    assert long - short == 360


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
    code, said = advise(*RECIPE, *recipe, "--gpu", "H20", *metrics(**run))
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
        (["data.train_batch_size=2147483647"], "ask for 8,589,934,588 responses on 4 replicas: too many to simulate"),
        (["trainer.nnodes=2147483647"], "trainer.nnodes ask for 32 responses on 8,589,934,588 replicas: too many"),
        ([f"{SHARE}=0"], f"{SHARE} must be above 0 and at most 1, not"),
        ([f"{SHARE}=1.5"], f"{SHARE} must be above 0 and at most 1, not"),
        ([f"{SHARE}=much"], f"{SHARE} must be above 0 and at most 1, not"),
        ([f"{SHARE}=true"], f"{SHARE} must be above 0 and at most 1, not"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=1", "--parameters", "70"],
         "70.0B parameters leave no room for a KV cache on 1 such GPUs"),
        (["trainer.n_gpus_per_node=1"], "ask for 2 GPUs a replica"),
        (["no.such.key=1"], "no.such.key"),
        (["tlt.spot.max_epochs=never"], "tlt.spot.max_epochs"),
        (["tlt.speculation.source=ngram"], "has no drafter to advise on"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(words, said):
    code, output = advise(*RECIPE, *words)
    assert code == 1 and said in output and output.count("\n") == 1, output


def test_a_run_with_another_response_limit_is_refused(metrics):
    """Responses longer than the recipe allows, or in every step several of one length, the longest."""
    code, said = advise(*RECIPE, "data.max_response_length=1024", *metrics())
    assert code == 1 and "has responses of 7000 tokens, and the recipe data.max_response_length=1024." in said
    code, said = advise(*RECIPE, *metrics(**{"response_length/clip_ratio": 0.25}))
    assert code == 1 and "cut its responses at 7000 tokens, and the recipe has data.max_response_length=8192." in said
    assert said.count("\n") == 1


def test_the_longest_of_each_step_is_not_taken_for_cut(metrics):
    """verl counts the step's longest response as clipped, wherever it ends."""
    counted = advise(*RECIPE, *metrics(**{"response_length/clip_ratio": 1 / 32}))
    assert counted == advise(*RECIPE, *metrics()) and counted[0] == 0


def test_the_kv_cache_is_that_of_the_gpu():
    words = [*RECIPE, "data.train_batch_size=256", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{SHARE}=0.8"]
    said = [advise(*words, "--gpu", gpu)[1] for gpu in ("H200", "L40S")]
    large, small = (int(re.search(r"cache of an engine +([\d,]+)", text)[1].replace(",", "")) for text in said)
    assert large > 4 * small


def test_a_script_names_its_policy_from_where_it_starts_verl(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(POLICY))
    words = shlex.join([*RECIPE, "actor_rollout_ref.model.path=policy"])
    (script := tmp_path / "recipe.sh").write_text(f"cd {tmp_path}\npython3 -m verl.trainer.main_ppo {words}\n")
    assert "parameters, from its config.json" in advise(str(script))[1]


@pytest.mark.parametrize("acceptance", ["0.8", "0.8,0.75,0.7"])
def test_acceptance_that_was_extended_is_said(acceptance):
    positions = acceptance.count(",") + 1
    said = f"acceptance beyond position {positions}: 0.{acceptance[-1]}0 as there"
    assert said in advise(*RECIPE, "--acceptance", acceptance)[1]
    assert "acceptance beyond" not in advise(*RECIPE, "--acceptance", ",".join([acceptance] * 8))[1]


def test_the_pages_example_is_what_the_command_prints():
    command, printed = re.search(r"## An example\n+```bash\n(.*?)```.*?```console\n(.*?)```", PAGE, re.DOTALL).groups()
    _, _, *words = shlex.split(command.replace("\\\n", " "))
    code, said = advise(*words)
    assert code == 0 and "".join(said.split()).startswith("".join(printed.split()))


def test_the_table_beside_the_papers_clusters_is_what_the_command_prints():
    rows = re.findall(r"^\| ([\w-]+/[\w.-]+) \| (\d) \| ([\d.]+) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    assert max(paper for _, _, paper, _ in rows) in PEERS
    for policy, nodes, paper, answer in rows:
        low, high = re.search(r"\((.*) to (.*)\)", answer).groups()
        assert float(low) <= float(paper) <= float(high), "the range is one"
        recipe = [
            *RECIPE, f"actor_rollout_ref.model.path={policy}", "data.train_batch_size=64", f"{ROLLOUT}.n=8",
            f"{ROLLOUT}.tensor_model_parallel_size={4 if '7B' in policy else 8}", f"trainer.nnodes={nodes}",
            "data.max_prompt_length=2048", "data.max_response_length=30720",
        ]  # fmt: skip
        _, said = advise(*recipe, "--gpu", "H100")
        assert re.search(rf"step, times as fast as stock +{re.escape(answer)} ", said), f"{policy}, {nodes} nodes"
