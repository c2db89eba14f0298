"""A chosen draft length against vLLM's own fixed K, its own table and no drafts, in drains of one real vLLM engine.

The policy is the real one, its prompts are those of runs. Step costs are measured first, at two contexts. From them and
the head's acceptance follows what each arm is expected to take, which is printed before the first round, after the rule
of the verdict (`drains.py`). All arms share the engine and take turns drain by drain, in another order each round, on
the same prompts: whole runs minutes apart differ by what the machine does meanwhile. Each arm samples its own responses
at temperature 1, as in RL. The adaptive arms are told the costs at the near context and the head's held-out acceptance;
what ours learns it keeps for the load. Each round is kept in a folder, and a command that was killed goes on after it.
A race on another machine, or with another head, goes on with the rounds of the published file. All rounds of a load are
judged together, each adjusted by the step costs of its own race.
"""

import json
import random
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.control.drains import (
    ADAPTIVE,
    ARMS,
    FEWEST,
    LONGEST,
    NONE,
    OURS,
    RULE,
    VLLM,
    Drain,
    Round,
    over_ours,
    predict,
    verdict,
)
from benchmarks.control.engine import BLOCK, Engine, Models
from benchmarks.gpu.parts import machine
from benchmarks.real_policy.collatz import chat, draw
from verl_cpu.dtype import find_dtype
from verl_tlt.drafter import DrafterError, PolicyShape, files_digest, policy_shape, provenance
from verl_tlt.files.disk import replacing
from verl_tlt.speculation.costs import LatencyTable

CALIBRATION_S = 900.0
NEAR, FAR = 32, 800
"""Tokens of context at which step costs are measured: at every batch, and at the batches of a tail."""
NEAR_BATCHES = (256, 128, 64, 32, 16, 8, 4, 2)
"""Batches besides 1 and the largest that are measured at the near context."""
FAR_BATCHES = (1, 4, 2)
Prompts = Sequence[list[int]]
"""Token ids."""
Ask = Callable[[Drain, int], Prompts]
"""The prompts of a drain in the round of that number."""
Found = dict[str, Any]
Say = Callable[[str], None]


def real_models(folder: Path) -> tuple[Models, Ask]:
    """The real policy and its head below `folder`, and what their drains ask."""
    policy, drafter = folder / "policy", folder / "drafter"
    for made, command in (
        (policy, "python -m benchmarks.real_policy"),
        (drafter, "python -m benchmarks.real_policy.head"),
    ):
        if not made.exists():
            raise DrafterError(f"{made} is missing: `{command}` makes it.")
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def ask(drain: Drain, turn: int) -> Prompts:
        rng = random.Random(f"{drain} {turn}")
        kinds = [drain.equal] * drain.short + [True] * drain.long  # equal responses are cut off before a chain's end
        asked = [chat(draw(rng, many, "run")[0]) for many in kinds]
        template = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        return [list(tokenizer.apply_chat_template(one, **template)) for one in asked]

    acceptance = list(provenance(drafter)["acceptance"])
    return Models(policy, drafter, acceptance, tokenizer.eos_token_id), ask


def against_fixed(
    models: Models, ask: Ask, drains: Sequence[Drain], rounds: int, work: Path, earlier: Sequence[Found], say: Say
) -> list[Found]:
    """Race every arm in all drains, until each load has so many rounds, those of `earlier` races included.

    `work` is the folder that keeps the rounds; `say` is called with a line for each. Returns all races, this one last.
    """
    batch = max(drain.requests for drain in drains)
    file, record = open_record(work, models, batch)
    others = [race for race in earlier if race["race"] != record["race"]]
    say(f"Rule: {RULE}")
    if missing([*others, record], drains, rounds) or not record["prompt_tokens"]:
        engine = Engine(models, batch, context_of(ask, drains))
        measure_costs(engine, record)
        _keep(file, record)
        for drain in drains:
            foresee(engine, record, drain, ask, say)
            _keep(file, record)
        for turn, drain in missing([*others, record], drains, rounds):
            found = _round(engine, drain, ask(drain, turn), random.Random(f"order {drain} {turn}"))
            record["loads"][str(drain)]["rounds"].append(found)
            _keep(file, record)
            shown = ", ".join(f"{arm} {one['seconds']:.1f} ({max(one['lengths'])})" for arm, one in found.items())
            say(f"{drain}, {turn + 1}: seconds (longest response): {shown}")
    return [race for race in (*others, record) if any(rounds_of(race, load) for load in race["loads"])]


def context_of(ask: Ask, drains: Sequence[Drain]) -> int:
    """Tokens of a prompt with its response that these drains and the far calibration need."""
    prompt = max(len(tokens) for drain in drains for tokens in ask(drain, 0))
    return max(prompt + max(drain.longest for drain in drains), FAR) + 16 + 4 * LONGEST


def open_record(work: Path, models: Models, batch: int) -> tuple[Path, Found]:
    """The file of a race of these models, and what it holds: an earlier, unfinished race, or nothing yet."""
    file = work / f"{_digest(models)}-{batch}.json"
    if file.exists():
        return file, dict(json.loads(file.read_text()))
    shape = policy_shape(models.policy)
    policy = {"parameters": _parameters(shape), "layers": shape.num_layers, "vocabulary": shape.vocab_size}
    told = {"policy": policy, "acceptance": models.acceptance, "dtype": find_dtype()}
    return file, {
        "race": f"{file.stem} {secrets.token_hex(4)}",
        "machine": machine(),
        **told,
        "prompt_tokens": 0,
        "near": [],
        "far": [],
        "loads": {},
    }


def _parameters(shape: PolicyShape) -> int:
    """Numbers in a policy's matrices."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * (shape.num_experts * shape.expert_width or shape.intermediate_size)
    ends = shape.hidden_size * shape.vocab_size * (1 if shape.tied else 2)
    return shape.num_layers * (attention + mlp) + ends


def _digest(models: Models) -> str:
    weights = [file for folder in (models.policy, models.drafter) for file in sorted(folder.glob("*.safetensors"))]
    return files_digest([models.policy / "config.json", *weights])


def recorded_costs(work: Path, models: Models) -> tuple[LatencyTable, int]:
    """Step costs, and the tokens of a prompt, of the widest race of these models that `work` has."""
    digest = _digest(models)
    files = sorted(work.glob(f"{digest}-*.json"), key=lambda file: int(file.stem.rpartition("-")[2]))
    if not files:
        raise DrafterError(f"{work} has no race of these models: run `python -m benchmarks.control --fixed` first.")
    record = json.loads(files[-1].read_text())
    return _costs(record), int(record["prompt_tokens"])


def missing(races: Sequence[Found], drains: Sequence[Drain], rounds: int) -> list[tuple[int, Drain]]:
    """(turn, load) of the rounds that no race has, the loads in turn."""
    done = {drain: sum(len(rounds_of(race, str(drain))) for race in races) for drain in drains}
    return [(turn, drain) for turn in range(rounds) for drain in drains if turn >= done[drain]]


def rounds_of(race: Found, load: str) -> Sequence[Round]:
    """The rounds that a race has of a load."""
    return race["loads"][load]["rounds"] if load in race["loads"] else ()


def published(races: Sequence[Found]) -> Found:
    """The races, and what all their rounds say of each load: ratios and verdict."""
    loads = {}
    for load in dict.fromkeys(load for race in races for load in race["loads"]):
        rounds = [(one, partial(_expected, race)) for race in races for one in rounds_of(race, load)]
        if rounds:
            over = over_ours(rounds)
            loads[load] = {"rounds": len(rounds), "over": over, "verdict": verdict(over["adjusted"], len(rounds))}
    return {"rule": RULE, "fewest_rounds": FEWEST, "loads": loads, "races": list(races)}


def _keep(file: Path, record: Found) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:
        whole.write(json.dumps(record, indent=1).encode())


def measure_costs(engine: Engine, record: Found) -> None:
    """Measure step costs at both contexts, unless an earlier call did."""
    most = engine.batch
    batches = {"near": [1, most, *(b for b in NEAR_BATCHES if b < most)], "far": [b for b in FAR_BATCHES if b <= most]}
    for where, context in (("near", NEAR), ("far", FAR)):
        if not record[where]:
            record[where] = engine.calibrate(CALIBRATION_S, batches[where], context).to_list()


def foresee(engine: Engine, record: Found, drain: Drain, ask: Ask, say: Say) -> None:
    """Say how long each arm is expected to take for a drain, unless an earlier call did, and make its adaptive arms.

    The lengths are those of one drain without drafts, on prompts that no round has.
    """
    near = LatencyTable.from_list(record["near"])
    engine.add_arm(NONE, near)
    if str(drain) not in record["loads"]:
        prompts = ask(drain, -1)
        record["prompt_tokens"] = record["prompt_tokens"] or max(map(len, prompts))
        engine.use(NONE)
        lengths = engine.decode(prompts, drain.longest, ends=not drain.equal).lengths
        predicted = {arm: _expected(record, lengths, arm) for arm in ARMS}
        record["loads"][str(drain)] = {"predicted": predicted, "predicted_from": list(lengths), "rounds": []}
    predicted = record["loads"][str(drain)]["predicted"]
    shown = ", ".join(f"{arm} {s:.1f} ({s / predicted[OURS]:.2f}x)" for arm, s in predicted.items())
    say(f"{drain}: predicted seconds, and over {OURS}: {shown}")
    for arm in ADAPTIVE:
        engine.add_arm(f"{arm}/{drain}", near)


def _expected(race: Found, lengths: Sequence[int], arm: str) -> float:
    """Seconds that an arm is expected to take for responses of these lengths, by the step costs of the race."""
    return predict(_costs(race), race["acceptance"], lengths, _read_again(race), arm)


def _costs(record: Found) -> LatencyTable:
    return LatencyTable.from_list([*record["near"], *record["far"]])


def _read_again(record: Found) -> int:
    """Tokens of a prompt that are computed though the prefix cache has it, about."""
    return min(int(record["prompt_tokens"]), BLOCK * 3 // 2)


def _round(engine: Engine, drain: Drain, prompts: Prompts, rng: random.Random) -> Found:
    """By arm, in another order each round: seconds, the responses' lengths, and what the adaptive ones chose."""
    found: Found = {}
    engine.remember(prompts)  # to read them takes all arms equally long, and would hide what is compared
    for arm in rng.sample(ARMS, len(ARMS)):
        name = f"{arm}/{drain}" if arm in ADAPTIVE else arm
        engine.use(name)
        if not arm.startswith(VLLM):
            engine.stats()  # of this drain alone
        done = engine.decode(prompts, drain.longest, ends=not drain.equal)
        found[arm] = {"seconds": round(done.seconds, 3), "lengths": list(done.lengths)}
        if not arm.startswith(VLLM):
            stats = engine.stats()
            found[arm] |= {"steps_by_draft_length": {str(k): n for k, n in stats.steps_by_draft_length.items()}}
    return {arm: found[arm] for arm in ARMS}
