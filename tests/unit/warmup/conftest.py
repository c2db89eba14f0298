"""A tiny policy with a tokenizer, prompts for it, and warm-ups whose answers an earlier, killed run would have left."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory):
    from tiny_policy import make_policy
    from word_tokenizer import save_tokenizer

    path = tmp_path_factory.mktemp("warmup") / "policy"
    make_policy().save_pretrained(path)
    save_tokenizer(path, 48, template="{% for m in messages %}{{ m['content'] }} {% endfor %}w47")
    return path


@pytest.fixture(scope="session")
def prompt_lines():
    generator = torch.Generator().manual_seed(5)
    return [" ".join(f"w{i}" for i in torch.randint(1, 47, (4,), generator=generator).tolist()) for _ in range(40)]


@pytest.fixture
def prompts_file(tmp_path, prompt_lines):
    file = tmp_path / "prompts.jsonl"
    rows = ({"prompt": [{"role": "user", "content": line}]} for line in prompt_lines)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def answers(policy_dir, prompt_lines):
    """What the policy says, sampled once: [prompt number] -> tokens."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(policy_dir)
    ids = torch.tensor([[*(int(word[1:]) for word in line.split()), 47] for line in prompt_lines])
    torch.manual_seed(3)
    out = policy.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=24, min_new_tokens=24
    )
    return out[:, 5:].tolist()


@pytest.fixture
def settings(policy_dir, prompts_file, tmp_path):
    """Makes the options of a warm-up."""
    from verl_tlt.commands.options import WarmupOptions

    def make(**changes):
        defaults = dict(
            model=policy_dir, prompts=[prompts_file], out=tmp_path / "drafter", response_length=24,
            epochs=1, batch_tokens=128, learning_rate=3e-3, objective="eagle",
        )  # fmt: skip
        return WarmupOptions(**{**defaults, **changes})

    return make


@pytest.fixture
def answer(answers):
    """Writes responses into a warm-up's working directory, so that no engine has to run; returns its options."""

    def write(options, answers=answers):
        folder = options.work / "responses"
        folder.mkdir(parents=True)
        samples = range(options.samples)
        order = np.random.default_rng(0).permutation(len(answers)).tolist()  # of the prompts (`prompts.py`)
        rows = [{"prompt": i, "sample": s, "tokens": answers[row]} for i, row in enumerate(order) for s in samples]
        (folder / "responses.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return options

    return write


@pytest.fixture
def warm(settings, answer):
    """Warms up with some options, on those answers; returns the options and what was printed."""
    from verl_tlt.commands.warmup.command import warmup

    def run(**changes):
        options, said = settings(**changes), io.StringIO()
        if not options.work.exists():
            answer(options)
        assert warmup(options, Console(file=said, width=300)) == options.out
        return options, said.getvalue()

    return run
