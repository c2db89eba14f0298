"""Whether an engine whose drafter is OFF decodes as fast as stock vLLM: three engines side by side, in turns.

    python -m benchmarks.control.off [--rounds 15] [--toy FOLDER] [--out FILE]

Two are stock vLLM: the second shows how far two equal engines differ here. The third is as a run with TLT starts it,
and drafts nothing. Each has its own process, as in a run, and only one decodes at a time. In a round each decodes the
same prompts once, another first every round, so that the machine's pace meets all alike. A ratio is of the seconds of
all rounds, with its 95 % interval.
"""

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.e2e.__main__ import recipe_of
from benchmarks.e2e.loads import LOADS
from benchmarks.e2e.subject import toy
from benchmarks.stored import store
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.compare.result import pooled
from verl_tlt.commands.doctor.standalone_engine import Setup, StandaloneEngine, set_up, start
from verl_tlt.server.engine_calls import ask_scheduler

ROOT = Path(__file__).parents[2]
BATCHES = (1, 4, 16)
STOCK, AGAIN, OFF = "stock", "stock again", "off"
Seconds = dict[str, list[float]]
"""Of an engine step, by engine; one for each round."""


async def race(engines: dict[str, StandaloneEngine], batch: int, rounds: int) -> Seconds:
    """Each engine once a round, after a round that does not count."""
    seconds: Seconds = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = await engines[name].step_seconds(batch)
            if turn:
                seconds[name].append(taken)
    return seconds


async def measure(setup: Setup, folder: Path, rounds: int) -> dict[int, Seconds]:
    """The race at each batch."""
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(start(setup, folder, drafting=name == OFF))
            for name in (STOCK, AGAIN, OFF)
        }
        if why := await engines[OFF].rpc("tlt_set_drafting", False):
            raise RuntimeError(why)
        await ask_scheduler(engines[OFF].llm, "control", drafting=False)
        return {batch: await race(engines, batch, rounds) for batch in BATCHES}


def judged(seconds: Seconds) -> dict[str, object]:
    """Milliseconds of stock's step, and how many times as long the others take: [ratio, low, high]."""
    stock = seconds[STOCK]
    over = {
        name: [round(x, 4) for x in pooled(list(zip(taken, stock, strict=True)), lambda s: s[:, 0] / s[:, 1])]
        for name, taken in seconds.items()
        if name != STOCK
    }
    return {"stock_ms": round(1e3 * sum(stock) / len(stock), 3), "over_stock": over, "rounds": len(stock)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--toy", type=Path, default=ROOT / ".cache" / "toy", help="where the drafter is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "off.json")
    options = parser.parse_args()
    os.environ.update(CPU_ENGINE)
    with tempfile.TemporaryDirectory(prefix="tlt-off-") as work:
        subject = toy(options.toy.resolve(), Path(work))
        recipe = recipe_of(Path(work), subject, LOADS["small"], forced=False)
        setup = set_up(recipe, {"tlt.drafter.path": str(subject.warm.drafter)})
        found = asyncio.run(measure(setup, Path(work), options.rounds))
    store(options.out, {"batches": {str(batch): judged(seconds) for batch, seconds in found.items()}})


if __name__ == "__main__":
    main()
