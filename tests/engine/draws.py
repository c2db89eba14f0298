"""Samples of a tiny engine, and how likely they are if every token has exactly the target's distribution.

All thresholds are p-values: a correct engine fails one test in ten thousand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from tiny_engine import Engine

from benchmarks.lossless.drawing import draw as drawn
from benchmarks.lossless.drawing import filled, parameters
from benchmarks.lossless.exact import Exact, Sampling

PROMPTS = ([3, 14, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8])
DRAWS, TOKENS, ENUMERATED = 1200, 10, 4  # per prompt; the first token is the prefill's, three are drafted
HOT = Sampling()
HOTTER = Sampling(temperature=2.0)  # for the small mixtures, which are nearly sure of each token at 1
COOL = Sampling(temperature=0.8, top_p=0.9, top_k=6)
CAUGHT = 1e-6
CASES = {  # what requests may ask for: (sampling, more of `draw`)
    "penalties": (Sampling(0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3), {}),
    "bad-words": (Sampling(bad_words=((7,), (3, 14), (1, 5, 9))), {}),
    "seeds": (HOT, {"seeded": True}),
    "several-outputs": (HOT, {"n": 4}),
    "stop-strings": (Sampling(stop=((5,), (3, 14), (9, 9))), {}),
}
STRUCTURED = Sampling(turns=(tuple(range(3, 8)), tuple(range(8, 16))))


def exact_models(models) -> dict[str, Exact]:
    """The small targets, by family."""
    return {family: Exact(models[f"{family}-small-target"]) for family in ("qwen3", "llama")}


def draw(
    engine: Engine,
    sampling: Sampling,
    draws: int = DRAWS,
    n: int = 1,
    seeded: bool = False,
    tokens: int = TOKENS,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[np.ndarray]:
    """`draws` outputs [draws, tokens] of each prompt, `n` of each request, all of them in flight together; what ends
    early is filled up. `seeded`: every request has a seed of its own.
    """
    params = [parameters(sampling, tokens, n=n, seed=i if seeded else None) for i in range(draws // n)]
    found = drawn(engine.llm, prompts, params)
    return [filled([one.token_ids for one in completions], tokens) for completions in found]


def p_values(
    exact: Exact, draws: list[np.ndarray], sampling: Sampling, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[float, float]:
    """Smallest p-value over the prompts of (chi-square over first tokens, martingale over all)."""
    chi, martingale = [], []
    for prompt, outputs in zip(prompts, draws, strict=True):
        p, cells = exact.chi_square(list(prompt), outputs[:, :ENUMERATED], sampling)
        assert cells > 25 * len(outputs) / DRAWS
        chi.append(p)
        martingale.append(exact.judge(list(prompt), outputs, sampling).martingale())
    return min(chi), min(martingale)


def before_each_step(engine: Engine, act: Callable[[int], None]) -> None:
    """Have `act(number of the step)` called before each engine step, until the engine is given back."""
    vllm_engine, number = engine.llm.llm_engine, itertools.count()
    step = vllm_engine.step

    def acted() -> object:
        act(next(number))
        return step()

    engine.patch.setattr(vllm_engine, "step", acted)


def swaps_and_pauses(engine: Engine, drafters: Sequence[str], more: Callable[[int], None] = lambda _: None) -> None:
    """From now on drafters are swapped and the drafter goes off and on between steps; `more` is called before each."""
    control = engine.scheduler.tlt

    def act(step: int) -> None:
        if step % 10 == 3:
            assert engine.rpc("tlt_load_drafter", drafters[step // 10 % 2]) is None
        if step % 15 == 7:
            control.control(drafting=not control.drafting)
            engine.rpc("tlt_set_drafting", control.drafting)
        more(step)

    before_each_step(engine, act)
