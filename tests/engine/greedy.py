"""Greedy decoding with a draft length that changes, and how far the log-probabilities told are from transformers'."""

from __future__ import annotations

from functools import cache

import numpy as np
from policies import Scripted
from tiny_engine import Engine, prompts, sampled

from benchmarks.lossless.exact import Exact

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
