"""What a GPU changes for an engine with a drafter: sleep, sampling, and what a step costs.

    python -m benchmarks.gpu.engine --out FILE --budget 880

* small: one engine of a tiny policy. After verl's deepest sleep (level 2) and a reload, does the drafter accept as
  before (`sleep`)? Are tokens sampled at temperature 1 distributed alike with drafts and without, however long they are
  (`distribution`)? Are tokens still the policy's while the drafter computes NaN (`nan`)?
* race: drains from 256 requests to one, with a chosen K, every fixed K and no drafts (`race.py`).

Without a GPU: `--tiny`, which says of no figure that it is one of a GPU.
"""

import asyncio
from typing import Any

from benchmarks.gpu.chi_square import compare
from benchmarks.gpu.engines import (
    ENVIRONMENT,
    K_MAX,
    accepted,
    hold,
    in_worker,
    overwrite,
    prompts,
    sample,
    slept,
    stats,
    tiny_engine,
)
from benchmarks.gpu.parts import Bench, Part, main
from benchmarks.gpu.race import race
from verl_tlt.commands.doctor.standalone_engine import StandaloneEngine
from verl_tlt.speculation.types import OFF

BEGINNING = [1]
"""One prompt for all draws."""


async def small(bench: Bench) -> dict[str, Any]:
    """Three checks in one engine. One that fails or hangs leaves the others their turn: each has half of the time that
    is left, and sleep, which could block the engine, comes behind what needs none.
    """
    found: dict[str, Any] = {}
    async with tiny_engine(bench) as engine:
        for check in (distribution, sleep, nan):
            try:
                async with asyncio.timeout(bench.left() / 2):
                    found[check.__name__] = await check(bench, engine)
            except Exception as error:  # noted like a finding: what a GPU breaks is what is asked
                found[check.__name__] = {"error": f"{type(error).__name__}: {error}"}
            bench.note(**found)
    return found


async def sleep(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Acceptance before a sleep and after the reload; whether sleep lost weights or buffers."""
    await hold(engine, K_MAX)
    before = await accepted(engine)
    return {"accepted_before": before, **await slept(bench, engine), "accepted_after": await accepted(engine)}


async def nan(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Share of token 0 at temperature 1 without the drafter, and with one that has begun to compute NaN.

    Such a file is refused; this one goes wrong while it is live.
    """
    await hold(engine, OFF)
    without = await sample(engine, prompts(16), 64)
    await hold(engine, K_MAX)
    filled = await in_worker(engine, overwrite, float("nan"), "fc.weight")
    await stats(engine)
    tokens = await sample(engine, prompts(16), 64)
    done = await stats(engine)
    return {
        "filled": filled,
        "token_0_share_without_drafter": _share(without, 0),
        "token_0_share_with_nan_drafter": _share(tokens, 0),
        "drafts_verified": done.num_drafts,
        "drafts_accepted": sum(done.num_accepted_tokens_per_pos),
    }


def _share(outputs: list[list[int]], token: int) -> float:
    return round(sum(row.count(token) for row in outputs) / sum(map(len, outputs)), 4)


async def distribution(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Chi-square of outputs after one prompt, not drafted against drafted: with the longest drafts, and with lengths
    drawn anew in every step; and of two halves without drafts.

    The first token comes with the prompt, the others are drafted. The halves show what the test says of equals.
    `uniform_share`: of the tokens with the longest drafts, those from steps that only verified drafts.
    """
    draws, tokens = (300, 4) if bench.tiny else (4000, 4)
    alike = [BEGINNING] * draws
    await hold(engine, OFF)
    plain = await sample(engine, alike, tokens)
    await hold(engine, K_MAX)
    await stats(engine)
    drafted = await sample(engine, alike, tokens)
    done = await stats(engine)
    await hold(engine, None)
    drawn = await sample(engine, alike, tokens)
    varied = await stats(engine)
    return {
        "draws": draws,
        "tokens": tokens,
        "drafts": done.num_drafts,
        "accepted": list(done.num_accepted_tokens_per_pos),
        "uniform_share": round(sum(done.tokens_by_batch.values()) / max(1, done.num_decode_tokens), 4),
        "steps_by_drawn_length": dict(varied.steps_by_draft_length),
        "drafted_against_plain": compare(drafted, plain),
        "drawn_against_plain": compare(drawn, plain),
        "plain_against_plain": compare(plain[::2], plain[1::2]),
    }


PARTS = {
    "small": Part(small, 90, most_s=240, environment=ENVIRONMENT),
    "race": Part(race, 180, environment=ENVIRONMENT),
}
"""In the order of what a user meets first."""

if __name__ == "__main__":
    main("benchmarks.gpu.engine", PARTS, __doc__)
