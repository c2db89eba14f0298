"""Two policies and what each wrote at temperature 1, with its hidden states, for comparisons between drafters.

`toy`: the demo's policy and its task, nearly certain text. `prose`: a Qwen3 of 1M parameters trained here, in minutes,
on the language reference that Python ships (`pydoc_data.topics`), in 512 byte pairs: each token is open. Everything
is made once, and read by whoever comes later.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.drafter.trajectory import MAX_DIGITS, Taught, TorchSampler, capture
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.drafter import TrainingSequence, VerifierWeights

AUX = AUX_LAYERS["small"]
VOCABULARY, PROMPT, RESPONSE = 512, 16, 112
"""Of `prose`, in tokens."""
STEPS, ROWS, CONTEXT, LEARNING_RATE = 700, 12, 128, 2e-3
"""How the policy of `prose` is trained: sequences a step, tokens in each, AdamW's peak."""
TRAINED, HELD_OUT = {"toy": 736, "prose": 1600}, 32
"""Responses to train on, and to score by."""
SAMPLED = 256
"""Responses decoded side by side."""


@dataclass(frozen=True)
class Corpus:
    """What drafters of one policy are trained and scored on."""

    policy: Path
    train: list[TrainingSequence]
    held_out: list[TrainingSequence]

    @property
    def weights(self) -> VerifierWeights:
        """The policy's embedding, head and norm."""
        return VerifierWeights.from_policy_dir(self.policy)


def load_corpus(name: str, work: Path) -> Corpus:
    """`toy` or `prose`, made in `work` by the first call."""
    policy, prompts, sampler = CORPORA[name](work)
    file = work / f"{name}.pt"
    if not file.exists():
        torch.save(_states(policy, prompts, sampler), file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)
    held = torch.load(file, weights_only=True, mmap=True)
    sequences = [TrainingSequence(tokens, prompt_len, aux, last) for tokens, prompt_len, aux, last in held]
    return Corpus(policy, sequences[HELD_OUT:], sequences[:HELD_OUT])


def _states(
    policy: Path, prompts: list[list[int]], sampler: TorchSampler
) -> list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]]:
    taught = Taught(policy)
    found = []
    for begin in range(0, len(prompts), SAMPLED):
        texts = sampler.generate(taught.model, prompts[begin : begin + SAMPLED], 1, seed=begin)
        found += [(s.tokens, s.prompt_len, s.aux, s.last) for s in capture(taught, texts)]
        print(f"{policy.name}: {len(found)} of {len(prompts)} responses", flush=True)
    return found


def _toy(work: Path) -> tuple[Path, list[list[int]], TorchSampler]:
    rng = random.Random("a drafter's comparison")
    problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(HELD_OUT + TRAINED["toy"])]
    return SHIPPED_POLICY, [[task.TOKEN_ID[t] for t in task.prompt_tokens(p)] for p in problems], TorchSampler()


def _prose(work: Path) -> tuple[Path, list[list[int]], TorchSampler]:
    """Prompts are beginnings of lines; the held-out ones are of pages that the policy was not trained on."""
    pages = [topics[name] for name in sorted(topics)]
    tokenizer = _tokenizer(work / "prose-tokenizer.json", pages)
    rng = random.Random("a drafter's comparison")
    rng.shuffle(pages)
    unseen = [tokenizer.encode(page).ids for page in pages[: len(pages) // 10]]
    seen = [tokenizer.encode(page).ids for page in pages[len(pages) // 10 :]]
    policy = work / "prose-policy"
    if not policy.exists():
        _train_prose(torch.tensor([i for page in seen for i in page])).save_pretrained(policy)
    prompts = [_excerpt(unseen, rng) for _ in range(HELD_OUT)] + [_excerpt(seen, rng) for _ in range(TRAINED["prose"])]
    return policy, prompts, TorchSampler(end=None, longest=RESPONSE)


def _excerpt(pages: list[list[int]], rng: random.Random) -> list[int]:
    page = rng.choice([p for p in pages if len(p) > PROMPT])
    begin = rng.randrange(len(page) - PROMPT)
    return page[begin : begin + PROMPT]


def _tokenizer(file: Path, pages: list[str]) -> Tokenizer:
    """Byte pairs of these pages."""
    if not file.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(pages, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
        made.save(str(file))
    return Tokenizer.from_file(str(file))


def _train_prose(tokens: torch.Tensor) -> Qwen3ForCausalLM:
    """Next-token training on random windows of int64 [N]; prints its loss."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, head_dim=32, max_position_embeddings=512, rope_theta=10000.0,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        at = torch.randint(len(tokens) - CONTEXT - 1, (ROWS, 1)) + torch.arange(CONTEXT + 1)  # [B, T + 1]
        logits = model(tokens[at[:, :-1]]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[at[:, 1:]].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, 0.02 + 2 * (1 - step / STEPS))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"prose policy: step {step}, loss {loss.item():.3f}", flush=True)
    return model


CORPORA: dict[str, Callable[[Path], tuple[Path, list[list[int]], TorchSampler]]] = {"toy": _toy, "prose": _prose}
