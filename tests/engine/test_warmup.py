"""`verl-tlt warmup` and `verl-tlt evaluate` as a user runs them, with files that lead astray.

The policy's tokenizer ends at another token than its configs say, it has a million positions, and its chat template
wants an argument: an engine of verl's ends at the tokenizer's token, has room for what the run asks, and passes the
argument on. The drafter that is trained on is in SpecForge's layout, with a pruned vocabulary, a head of its own and
few positions. vLLM's own count proves conversion, index maps and head.
"""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cli import cli
from safetensors.torch import save_file
from tiny_recipe import tiny_recipe

from verl_tlt.commands.doctor.standalone_engine import set_up
from verl_tlt.commands.options import EvaluateOptions, WarmupOptions
from verl_tlt.commands.warmup import engine
from verl_tlt.commands.warmup.prompts import read_prompts
from verl_tlt.drafter import VerifierWeights, build_drafter, provenance

pytestmark = pytest.mark.engine

END, SAID, THINKING = 7, 47, 46
"""The tokenizer's end, the configs', and what the template adds when it is told to."""
KEPT = torch.arange(THINKING)
PROMPTS = 120
LONGEST, POSITIONS, FEW = 96, 1 << 20, 32


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from tiny_policy import make_policy
    from word_tokenizer import save_tokenizer

    path = tmp_path_factory.mktemp("hostile") / "policy"
    shape = dict(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=POSITIONS)
    made = make_policy(**shape, eos_token_id=SAID)
    for layer in made.model.layers:  # the last token says more of the next than at random: a few texts teach it
        layer.self_attn.o_proj.weight.mul_(0.6)
        layer.mlp.down_proj.weight.mul_(0.6)
    made.save_pretrained(path)
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == SAID
    save_tokenizer(path, 48, END, "{{ messages[0].content }} {{ 'w46' if thinking else 'w45' }}")
    return path


@pytest.fixture(scope="module")
def overrides(policy, tmp_path_factory):
    """A recipe of it."""
    folder = tmp_path_factory.mktemp("recipe")
    words = torch.randint(8, 44, (PROMPTS, 4), generator=torch.manual_seed(5))
    chats = [[{"role": "user", "content": " ".join(f"w{i}" for i in row)}] for row in words.tolist()]
    pq.write_table(pa.table({"question": chats}), folder / "train.parquet")
    rollout = "actor_rollout_ref.rollout"
    return [
        *tiny_recipe(policy, folder / "train.parquet"),
        "data.prompt_key=question", "data.max_prompt_length=16", f"data.max_response_length={LONGEST}",
        "+data.apply_chat_template_kwargs.thinking=True",
        f"{rollout}.temperature=0.9", f"{rollout}.max_num_seqs=16",
        "+trainer.plugin=tlt", "tlt.speculation.max_draft_length=2",
    ]  # fmt: skip


@pytest.fixture
def specforge(policy, tmp_path):
    """An untrained drafter as SpecForge would have saved it."""
    (path := tmp_path / "specforge").mkdir()
    model = build_drafter(policy, seed=2)
    own = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in own.items()}
    tensors["lm_head.weight"] = VerifierWeights.from_policy_dir(policy).lm_head[KEPT].float() * 1.1
    tensors["d2t"] = torch.zeros(len(KEPT), dtype=torch.int64)
    tensors["t2d"] = torch.arange(48) < len(KEPT)
    save_file(tensors, path / "model.safetensors")
    config = model.config.transformer_layer_config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 48,
        "draft_vocab_size": len(KEPT), "max_position_embeddings": FEW,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def answers(monkeypatch):
    """What engines answered, by call: (job, responses)."""
    found, generate = [], engine.generate

    def generated(job, *args):
        answer = generate(job, *args)
        found.append((job, answer[0]))
        return answer

    monkeypatch.setattr(engine, "generate", generated)
    return found


def run(*words):
    code, said = cli(*words)
    return code, re.sub(r"\s+", " ", said)


def test_from_prompts_to_an_accept_length_that_vllm_confirms(policy, overrides, specforge, answers, tmp_path):
    out = tmp_path / "drafter"
    code, said = run(
        *("warmup", *overrides, "--out", out, "--drafter", specforge, "--epochs", 30),
        *("--batch-tokens", 512, "--learning-rate", 3e-3, "--objective", "eagle"),
    )
    assert code == 0, said
    assert re.search(r"generate: (\d+) of \1 responses", said)
    ((job, responses),) = answers
    check_responses(job, responses)
    facts = provenance(out)
    assert facts["policy"] == str(policy) and facts["started from"] == str(specforge) and facts["tau_sim"] > 1.15

    config = json.loads((out / "config.json").read_text())
    assert config["transformer_layer_config"]["max_position_embeddings"] > FEW
    config["transformer_layer_config"]["max_position_embeddings"] = FEW
    (out / "config.json").write_text(json.dumps(config))
    code, said = run("evaluate", out, *overrides, "--draft-length", 2, "--limit", 12)
    assert code == 0 and "within 5 %" in said, said
    lengths = re.search(r"accept length [│|] ([\d.]+) [│|] ([\d.]+)", said)
    assert float(lengths[2]) > 1.1, said


def check_responses(job, responses):
    """They end where the run's would."""
    assert {prompt.tokens[-1] for prompt in job.prompts} == {THINKING} and len(responses) == PROMPTS
    for response in responses:
        *before, last = response.tokens
        assert not {END, SAID} & set(before), "one more token after an end"
        assert last in (END, SAID) or len(response.tokens) == LONGEST
    assert any(response.tokens[-1] == END for response in responses)


def test_an_engine_has_room_for_what_is_needed(overrides, policy, tmp_path):
    options = WarmupOptions(**WarmupOptions.completed({"overrides": overrides, "out": tmp_path / "drafter"}))
    assert (options.temperature, options.response_length) == (0.9, LONGEST)
    prompts = read_prompts(options, tmp_path).all
    longest = max(len(prompt.tokens) for prompt in prompts)
    none = Path("none")
    without_a_run = EvaluateOptions(drafter=none, model=policy, prompts=[none], response_length=LONGEST)
    for given in (options, without_a_run):
        job = engine.generation_job(given, prompts)
        assert set_up(job.recipe, job.changes).rollout.max_model_len == longest + LONGEST < POSITIONS
