"""A tiny policy with a tokenizer, prompts for it, and answers as an earlier, killed run would have left them."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafter"))  # tiny_policy.py


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
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompt_lines))
    return file


@pytest.fixture(scope="session")
def answers(policy_dir, prompt_lines):
    """What the policy says, sampled once: [prompt number] -> tokens."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(policy_dir)
    ids = torch.tensor([[int(word[1:]) for word in line.split()] for line in prompt_lines])
    torch.manual_seed(3)
    out = policy.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=24, min_new_tokens=24
    )
    return out[:, 4:].tolist()


@pytest.fixture
def answered(answers):
    """Writes responses into a warm-up's working directory, so that no engine has to run."""

    def write(work, samples=1):
        folder = work / "responses"
        folder.mkdir(parents=True)
        rows = [{"prompt": i, "sample": s, "tokens": said} for i, said in enumerate(answers) for s in range(samples)]
        (folder / "responses.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return write
