"""Greedy decoding with a draft length that changes, and how far the log-probabilities told are from transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from policies import Scripted
from tiny_engine import Engine, prompts, sampled

from benchmarks.lossless.exact import Exact

K_MAX = 7
WIDER = 1.5
"""So much farther off than the engine without speculation log-probabilities may be; faults are tenfold."""
Off = tuple[float, float]
"""How far off log-probabilities are: mean, largest."""


@cache
def expected(exact: Exact, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of a text's tokens by transformers; most texts come again with another draft length."""
    return np.array(exact.of_tokens([*prompt], [*tokens], None))


def decode(engine: Engine, exact: Exact) -> tuple[list[list[int]], Off]:
    """(tokens of eight requests, how far the log-probabilities told are from those of transformers)."""
    asked = [sampled(12 * (i + 1), logprobs=0) for i in range(8)]
    tokens, off = [], []
    for prompt, output in zip(prompts(8), engine.llm.generate(prompts(8), asked, use_tqdm=False), strict=True):
        tokens.append(list(output.outputs[0].token_ids))
        told = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens[-1], strict=True)]
        known = expected(exact, tuple(prompt["prompt_token_ids"]), tuple(tokens[-1]))
        off += np.abs(np.array(told) - known).tolist()
    return tokens, (float(np.mean(off)), max(off))


def near(off: Off, reference: Off) -> bool:
    """Whether log-probabilities are as good as an engine's that drafts nothing."""
    return all(mine < WIDER * its for mine, its in zip(off, reference, strict=True))


def choose(engine: Engine, *arms: int) -> None:
    """One of these draft lengths in each step, at random."""
    rng = np.random.default_rng(7)
    engine.scheduler.tlt.policy = Scripted(lambda *_: int(rng.choice(arms)))


def flip(engine: Engine, step: int, longest: int) -> None:
    """The longest draft up to a step, then none."""
    engine.scheduler.tlt.policy = Scripted(lambda n, _: longest if n < step else 0)


def stays_the_same(engine: Engine, exact: Exact, reference: Off, other: Path) -> tuple[list[list[int]], int]:
    """(tokens, drafts accepted with K = 3), once neither draft lengths, OFF nor the `other` drafter change a token.

    The log-probabilities told are as good as `reference`.
    """
    choose(engine, 3)
    first, off = decode(engine, exact)
    accepted = sum(engine.scheduler.tlt.stats(reset=True).num_accepted_tokens_per_pos)
    assert near(off, reference), (off, reference)
    for arms in ((K_MAX,), (0, 1, 3, 7), (0,)):
        choose(engine, *arms)
        tokens, off = decode(engine, exact)
        assert tokens == first, arms
        assert near(off, reference), (arms, off)
    flip(engine, 12, K_MAX)
    assert decode(engine, exact)[0] == first
    engine.rpc("tlt_set_drafting", False)  # OFF
    choose(engine, 0)
    assert decode(engine, exact)[0] == first
    engine.rpc("tlt_set_drafting", True)
    assert engine.rpc("tlt_load_drafter", str(other / "model.safetensors")) is None
    choose(engine, 0, 1, 3, 7)
    assert decode(engine, exact)[0] == first
    assert engine.scheduler.tlt.stats().failure is None
    return first, accepted
