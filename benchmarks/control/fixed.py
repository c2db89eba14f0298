"""Adaptive draft lengths against vLLM's own fixed K and against no drafts, in drains of one real vLLM engine.

The engine's step costs are calibrated first, up to the largest batch. From them and the drafter's acceptance follows
what each arm is expected to take, which is printed before anything runs, after the rule of the verdict (`drains.py`).
All arms share the engine and take turns drain by drain, in another order each round, on the same prompts: whole runs
minutes apart differ by what the machine does meanwhile. Where lengths are drawn, all arms write the same text greedily,
but for ties that kernels break otherwise. Where responses end by themselves, each arm samples its own at temperature 1,
as in RL. Their lengths differ, so an arm's seconds are divided by what its own would take without drafts.
`table` and `goodput` are told the calibration and the drafter's held-out acceptance; what `goodput` learns it keeps for
the load. Rounds are kept in a folder, and a command that was killed goes on after them.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.control.drains import ADAPTIVE, ARMS, LONGEST, NONE, RULE, Drain, over_goodput, predict, verdict
from benchmarks.control.engine import Engine, Models
from benchmarks.gpu.parts import machine
from demo.machine import find_dtype
from verl_tlt.commands.warmup.prompts import load_tokenizer, read_prompts
from verl_tlt.drafter import DrafterError, files_digest, policy_shape, provenance
from verl_tlt.files.disk import replacing
from verl_tlt.speculation.costs.tables import LatencyTable

CALIBRATION_S = 600.0
BLOCK = 16
"""Tokens of a block of the prefix cache, the fewest that vLLM takes on a CPU. A round's prompts are computed before its
first drain: to read them takes all arms equally long, and would hide what is compared."""
Prompts = Sequence[list[int]]
"""Token ids."""
Found = dict[str, Any]
Say = Callable[[str], None]


def given_models(policy: Path, drafter: Path, prompts: Path) -> tuple[Models, Prompts]:
    """Any policy and EAGLE-3 head that vLLM can serve, and the prompts of a file."""
    acceptance = provenance(drafter).get("acceptance")
    if not acceptance:
        raise DrafterError(f"--drafter {drafter} does not say its acceptance, as a head of `verl-tlt warmup` does.")
    tokenizer = load_tokenizer(policy)
    read = read_prompts([prompts], tokenizer, sys.maxsize, least=1)
    return Models(policy, drafter, list(acceptance), end=tokenizer.eos_token_id), [list(ids) for ids in read.tokens]


def against_fixed(
    models: Models, prompts: Prompts, drains: Sequence[Drain], rounds: int, seconds: float, work: Path, say: Say
) -> Found:
    """Race every arm in all drains, so many rounds of each, and begin none after so many seconds.

    `work` is the folder that keeps the rounds; `say` is called with a line for each. Returns the record as it is
    published: `loads` by name, each with what was `predicted`, its `rounds`, and the `verdict`.
    """
    models = sized(models, prompts, drains)
    file, record = open_record(work, models)
    say(f"Rule: {RULE}")
    if missing(record, drains, rounds):
        until, engine = time.monotonic() + seconds, Engine(models)
        _foresee(engine, record, prompts, drains, rounds, say)
        _keep(file, record)
        for turn, drain in missing(record, drains, rounds):
            if time.monotonic() > until:
                break
            found = _round(engine, drain, turn, prompts, LatencyTable.from_list(record["costs"]))
            record["loads"][str(drain)]["rounds"].append(found)
            _keep(file, record)
            say(f"{drain}, {turn + 1}: " + ", ".join(f"{arm} {s:.1f}" for arm, s in found["seconds"].items()))
    return published(record)


def sized(models: Models, prompts: Prompts, drains: Sequence[Drain]) -> Models:
    """The models with an engine as large as these drains need."""
    context = max(map(len, prompts)) + max(drain.longest for drain in drains) + 4 * LONGEST
    return replace(models, longest=LONGEST, batch=max(drain.requests for drain in drains), context=context, block=BLOCK)


def open_record(work: Path, models: Models) -> tuple[Path, Found]:
    """The file of a race of these models, and what it holds: an earlier, unfinished race, or nothing yet."""
    weights = [file for folder in (models.policy, models.drafter) for file in sorted(folder.glob("*.safetensors"))]
    file = work / f"{files_digest([models.policy / 'config.json', *weights])}-{models.batch}.json"
    if file.exists():
        return file, dict(json.loads(file.read_text()))
    shape = policy_shape(models.policy)
    policy = {"parameters": shape.parameters[0], "layers": shape.num_layers, "vocabulary": shape.vocab_size}
    told = {"policy": policy, "acceptance": models.acceptance, "dtype": find_dtype(), "rule": RULE}
    return file, {"machine": machine(), **told, "costs": [], "loads": {}}


def missing(record: Found, drains: Sequence[Drain], rounds: int) -> list[tuple[int, Drain]]:
    """(turn, load) of the rounds that the record does not have, the loads in turn."""
    done = {drain: len(record["loads"].get(str(drain), {}).get("rounds", ())) for drain in drains}
    return [(turn, drain) for turn in range(rounds) for drain in drains if turn >= done[drain]]


def published(record: Found) -> Found:
    """The record with what follows from it: ratios and verdicts of the loads that have rounds, costs in short."""
    costs, loads = LatencyTable.from_list(record["costs"]), {}
    for name, load in record["loads"].items():
        if load["rounds"]:
            over = over_goodput(load["rounds"])
            loads[name] = {**load, "over": over, "verdict": verdict(over, len(load["rounds"]))}
    ms = {k: {batch: round(1000 * s, 1) for batch, s in costs.by_batch(k)} for k in costs.lengths()}
    return {**record, "costs": ms, "loads": loads}


def _keep(file: Path, record: Found) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:
        whole.write(json.dumps(record, indent=1).encode())


def _foresee(engine: Engine, record: Found, prompts: Prompts, drains: Sequence[Drain], rounds: int, say: Say) -> None:
    """Calibrate unless an earlier call did, and say what each drain is expected to take before its first round."""
    models = engine.models
    if not record["costs"]:
        batches = [1, models.batch, *(b for b in (256, 128, 64, 32, 16, 8, 4, 2) if b < models.batch)]
        record["costs"] = engine.calibrate(CALIBRATION_S, batches).to_list()
    table = LatencyTable.from_list(record["costs"])
    for drain in drains:
        if str(drain) not in record["loads"]:
            lengths: list[Sequence[int]] = [drain.lengths(turn) for turn in range(rounds)]
            if drain.own:  # of one round: to know them takes a drain
                lengths = [engine.sample(_asked(drain, 0, prompts), drain.own).lengths]
            predicted = predict(table, models.acceptance, lengths, _read_again(prompts))
            record["loads"][str(drain)] = {"predicted": predicted, "rounds": []}
        load = record["loads"][str(drain)]
        least = load["predicted"]["goodput"]
        shown = ", ".join(f"{arm} {s:.1f} ({s / least:.2f}x)" for arm, s in load["predicted"].items())
        say(f"{drain}: predicted seconds, and over goodput: {shown}")
        for arm in ADAPTIVE:
            engine.add_arm(f"{arm}/{drain}", table)
    engine.add_arm("off", table)


def _read_again(prompts: Prompts) -> int:
    """Tokens of a prompt that are computed though the prefix cache has it, their mean."""
    return sum(min(len(prompt), BLOCK * 3 // 2) for prompt in prompts) // len(prompts)


def _asked(drain: Drain, turn: int, prompts: Prompts) -> Prompts:
    """The prompts of that round."""
    rng = random.Random(turn)
    return [prompts[i % len(prompts)] for i in rng.sample(range(max(len(prompts), drain.requests)), drain.requests)]


def _round(engine: Engine, drain: Drain, turn: int, prompts: Prompts, table: LatencyTable) -> Found:
    """Seconds of each arm, in another order each round, and what the adaptive ones chose.

    `undrafted` is what `table` says that each arm's responses take without drafts.
    """
    chosen, rng = _asked(drain, turn, prompts), random.Random(f"order {turn}")
    seconds: dict[str, float] = {}
    decoded: dict[str, tuple[int, ...]] = {}
    told: Found = {}
    engine.remember(chosen)
    for arm in rng.sample(ARMS, len(ARMS)):
        name = f"{arm}/{drain}" if arm in ADAPTIVE else arm
        engine.use(name)
        if drain.own:
            done = engine.sample(chosen, drain.own)
        else:
            lengths = drain.lengths(turn)
            done = engine.decode(list(zip(chosen, lengths, strict=True)), greedy=True)
            if list(done.lengths) != lengths:
                raise RuntimeError(f"{arm} decoded {sum(done.lengths)} tokens of {sum(lengths)}.")
        seconds[arm], decoded[arm] = round(done.seconds, 3), done.lengths
        if arm in ADAPTIVE:
            stats = engine.stats(name)
            accepted = stats["num_decode_tokens"] / max(stats["num_passes"], 1)
            steps = {str(k): n for k, n in stats["steps_by_draft_length"].items()}
            told[arm] = {"steps_by_draft_length": steps, "tokens_a_pass": round(accepted, 3)}
    tokens, longest = ({arm: what(decoded[arm]) for arm in ARMS} for what in (sum, max))
    again = _read_again(prompts)
    undrafted = {arm: predict(table, (), [decoded[arm]], again, (NONE,))[NONE] for arm in ARMS}
    ordered = {arm: seconds[arm] for arm in ARMS}
    return {"seconds": ordered, "undrafted": undrafted, "chose": told, "tokens": tokens, "longest": longest}
