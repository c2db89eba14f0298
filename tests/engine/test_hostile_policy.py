"""`verl-tlt warmup` and `evaluate` with a policy whose files lead astray: they start vLLM as its run does.

Its tokenizer ends at another token than its configs say, it has a million positions, and its chat template wants an
argument. An engine of verl's ends at the tokenizer's token, has room for what the run asks, and passes the argument on.
"""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from verl_tlt.commands.cli import app
from verl_tlt.commands.doctor.standalone_engine import set_up
from verl_tlt.commands.options import EvaluateOptions, WarmupOptions
from verl_tlt.commands.warmup import engine
from verl_tlt.commands.warmup.prompts import read_prompts
from verl_tlt.drafter import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drafter"))  # tiny_policy.py

pytestmark = pytest.mark.engine

END, SAID, THINKING = 7, 47, 46
"""The tokenizer's end, the configs', and what the template adds when it is told to."""
LONGEST, POSITIONS = 96, 1 << 20


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from tiny_policy import make_policy
    from word_tokenizer import save_tokenizer

    path = tmp_path_factory.mktemp("hostile") / "policy"
    shape = dict(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=POSITIONS)
    make_policy(**shape, eos_token_id=SAID).save_pretrained(path)
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == SAID
    save_tokenizer(path, 48, END, "{{ messages[0].content }} {{ 'w46' if thinking else 'w45' }}")
    return path


@pytest.fixture(scope="module")
def script(policy, tmp_path_factory):
    """A recipe of it."""
    folder, words = tmp_path_factory.mktemp("recipe"), torch.randint(8, 44, (40, 4), generator=torch.manual_seed(5))
    chats = [[{"role": "user", "content": " ".join(f"w{i}" for i in row)}] for row in words.tolist()]
    pq.write_table(pa.table({"question": chats}), folder / "train.parquet")
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet",
        "data.prompt_key=question", "data.max_prompt_length=16", f"data.max_response_length={LONGEST}",
        "+data.apply_chat_template_kwargs.thinking=True", f"actor_rollout_ref.model.path={policy}",
        f"{rollout}.name=vllm", f"{rollout}.dtype=float32", f"{rollout}.enforce_eager=True",
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.temperature=0.9", f"{rollout}.max_num_seqs=16",
        f"++{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        "+trainer.plugin=tlt", "tlt.speculation.max_draft_length=2",
    ]  # fmt: skip
    return overrides


def options_of(kind, script, **given):
    return kind(**kind.completed({"overrides": script, "device": "cpu", **given}))


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def answered(script, tmp_path_factory):
    """What the engine of the recipe answers to its prompts: options, prompts, responses and where they are."""
    folder = tmp_path_factory.mktemp("answers")
    options = options_of(WarmupOptions, script, out=folder / "drafter")
    prompts = read_prompts(options)
    stage = engine.Stage(engine.make_bars(Console(quiet=True)), "generate", "")
    found, _ = engine.generate(engine.generation_job(options, prompts.tokens), folder, stage)
    return options, prompts, found, folder / engine.RESPONSES


def test_responses_end_where_the_runs_would(answered):
    options, prompts, responses, _ = answered
    assert (options.temperature, options.response_length) == (0.9, LONGEST)
    assert {prompt[-1] for prompt in prompts.tokens} == {THINKING}
    assert len(responses) == 40
    for response in responses:
        *before, last = response.tokens
        assert not {END, SAID} & set(before), "one more token after an end"
        assert last in (END, SAID) or len(response.tokens) == LONGEST
    assert any(response.tokens[-1] == END for response in responses)


@pytest.mark.parametrize("listed", [True, False])
def test_an_engine_has_room_for_what_is_needed(answered, script, policy, listed):
    options, prompts, _, _ = answered
    if not listed:
        options = EvaluateOptions(
            drafter=Path("none"), model=policy, prompts=[Path("none")], response_length=LONGEST, device="cpu"
        )
    job = engine.generation_job(options, prompts.tokens)
    setup = set_up(job.recipe, job.changes)
    longest = max(map(len, prompts.tokens))
    assert setup.rollout.max_model_len == longest + LONGEST < POSITIONS


def test_a_head_with_few_positions_drafts_as_is_predicted(answered, script, policy, tmp_path):
    file = answered[3]
    out, work = tmp_path / "drafter", tmp_path / "drafter.warmup" / "responses"
    work.mkdir(parents=True)
    shutil.copy(file, work)
    code, said = run(
        *("warmup", *script, "--out", out, "--device", "cpu", "--epochs", 30, "--batch-tokens", 512),
        *("--learning-rate", 3e-3, "--objective", "eagle"),
    )
    assert code == 0, said
    assert provenance(out)["policy"] == str(policy)
    config = json.loads((out / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = 32
    (out / "config.json").write_text(json.dumps(config))
    code, said = run("evaluate", out, *script, "--device", "cpu", "--draft-length", 2, "--limit", 12)
    assert code == 0 and "within 5 %" in said, said
