"""What all turns of a comparison say together: ratios against stock with intervals, and sentences. Numbers only.

A step of an arm is compared with stock's step of the same turn and number, which had the same prompts. Ratios are of
sums: all of stock's seconds over all of the arm's. Lengths are sampled, so an arm may have had more to write; the ratio
per token divides each side by the tokens that it wrote. Jobs differ by more than their steps do, so the interval is of
the turns' ratios, by Student's t.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from verl_tlt.bootstrap import Floats, student
from verl_tlt.commands.compare.plan import STOCK, TLT, Arm
from verl_tlt.commands.compare.record import Record, Step, Turn

RATIOS = {"rollout_per_token": "rollout", "e2e_per_token": "step"}
"""Ratios that are shown, by their name in the result."""
COVERED = 0.95
FEWEST = 5
"""Fewest measurements for a verdict: with fewer, intervals hold the true value too seldom."""
FEWEST_TURNS = 3
"""Fewest turns for an interval and a verdict: of two, chance alone decides how much they differ."""
Pairs = Sequence[tuple[Step, Step]]


def found_of(arms: Sequence[Arm], record: Record) -> dict[str, Any]:
    """Everything that is concluded from the turns of those arms that have any, as JSON has it."""
    taken = {arm.name: record.of(arm.name) for arm in arms if record.steps(arm.name)}
    stock = record.steps(STOCK)
    compared = [name for name in taken if name != STOCK and pairs(stock, record.steps(name))]
    compared.sort(key=lambda name: not name.startswith(TLT))  # TLT's arms first
    against = {name: ratios(stock, record.steps(name)) for name in compared}
    return {
        "arms": {arm.name: _arm(arm, taken[arm.name]) for arm in arms if arm.name in taken},
        "ratios": against,
        "sentences": _sentences(record, compared, against),
        "left_out": {name: left_out(turns) for name, turns in taken.items()},
        "turns": record.rows(),
    }


def _sentences(record: Record, compared: Sequence[str], against: Mapping[str, Any]) -> list[str]:
    """The verdicts on the compared arms, by their ratios `against` stock, and what else a reader must know of them."""
    stock = record.steps(STOCK)
    turns_of = {name: turns(pairs(stock, record.steps(name))) for name in compared}
    sentences = [verdict(name, STOCK, against[name]["e2e_per_token"], turns_of[name]) for name in compared]
    sentences += _against_best(record, compared, against)
    sentences += [paid_back(name, STOCK, against[name]["lead"]) for name in compared if turns_of[name] >= FEWEST_TURNS]
    sentences += [undrafted(name, record.steps(name)) for name in compared if name.startswith(TLT)]
    for name in compared:
        if others := other_prompts(stock, record.steps(name)):
            sentences.append(f"In {others} of its steps {name} had other prompts than {STOCK}.")
    return [sentence for sentence in sentences if sentence]


def _arm(arm: Arm, turns: Sequence[Turn]) -> dict[str, object]:
    """What an arm is, and what its steps measured.

    Its accept length is the median of its steps; stock's vLLM logs one for a whole turn.
    """
    steps = [step for turn in turns for step in turn.steps]
    logged = [turn.accept_length for turn in turns if turn.accept_length]
    differences = [step.probs_diff_max for step in steps if step.probs_diff_max is not None]

    def usual(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(median(known), 4) if known else None

    accept_length = usual(step.accept_length for step in steps)
    if not accept_length and logged:
        accept_length = round(mean(logged), 4)
    return {
        "label": arm.label,
        "overrides": list(arm.overrides),
        "environment": dict(arm.environment),
        "accept_length": accept_length,
        "reward": [round(step.reward, 4) for step in steps if step.reward is not None],
        "probs_diff_max": max(differences, default=None),
    }


def _against_best(record: Record, compared: Sequence[str], against: Mapping[str, Any]) -> list[str]:
    """TLT against the fastest of the other arms, where there are any."""
    others = [name for name in compared if not name.startswith(TLT)]
    if TLT not in compared or not others:
        return []
    best = max(others, key=lambda name: float(against[name]["e2e_per_token"]["pooled"]))
    both = pairs(record.steps(best), record.steps(TLT))
    if not both:
        return []
    per_token = ratio(both, lambda step: step.step_s)
    return [verdict(TLT, f"{best}, the fastest of the others", per_token, turns(both))]


# ---------------------------------------------------------------------- numbers


def pairs(stock: Sequence[Step], arm: Sequence[Step]) -> list[tuple[Step, Step]]:
    """(stock's step, the arm's) for every turn and number that both have."""
    of_stock = {(step.turn, step.step): step for step in stock}
    return [(of_stock[step.turn, step.step], step) for step in arm if (step.turn, step.step) in of_stock]


def turns(both: Pairs) -> int:
    """In how many turns these pairs were measured."""
    return len({ours.turn for _, ours in both})


def ratio(both: Pairs, seconds: Callable[[Step], float]) -> dict[str, Any]:
    """How many times as fast the arm is: stock's `seconds` of a token over the arm's.

    `pooled` is of all pairs, with an interval from `low` to `high` (95 %); these are None where there are too few turns
    to tell how much jobs differ. `each` are the ratios of single pairs.
    """
    rows = np.array([(seconds(theirs), theirs.tokens, seconds(ours), ours.tokens) for theirs, ours in both])
    of_turns: defaultdict[int, Floats] = defaultdict(lambda: np.zeros(4))
    for row, (_, ours) in zip(rows, both, strict=True):
        of_turns[ours.turn] += row
    of_all = float(_speedup(rows.sum(axis=0, keepdims=True))[0])
    low = high = None
    if len(of_turns) >= FEWEST_TURNS:
        logs = np.log(_speedup(np.array(list(of_turns.values()))))
        error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
        width = math.exp(student(1 - (1 - COVERED) / 2, len(logs) - 1) * error)
        low, high = round(of_all / width, 4), round(of_all * width, 4)
    each = [round(float(value), 4) for value in _speedup(rows)]
    return {"pooled": round(of_all, 4), "low": low, "high": high, "each": each}


def _speedup(sums: Floats) -> Floats:
    """Ratios of rows [n, 4]: stock's seconds and tokens, then the arm's."""
    return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])


def ratios(stock: Sequence[Step], arm: Sequence[Step]) -> dict[str, Any]:
    """An arm's rollout and step against stock's, by token, and its lead."""
    both = pairs(stock, arm)
    return {
        "lead": lead(both),
        "rollout_per_token": ratio(both, lambda s: s.rollout_s),
        "e2e_per_token": ratio(both, lambda s: s.step_s),
    }


def lead(both: Pairs) -> dict[str, object]:
    """How far an arm would be ahead of stock, had stock written as many tokens at its pace over all steps.

    `seconds` are (step, seconds ahead after it and all before it that count), negative while behind; `from_step` is the
    first from which it stays ahead, None: it is behind at the end.
    """
    ahead: list[tuple[int, float]] = []
    total = 0.0
    ahead_since: int | None = None
    token_s = sum(theirs.step_s for theirs, _ in both) / sum(theirs.tokens for theirs, _ in both)
    for _, ours in sorted(both, key=lambda pair: pair[1].step):
        total += token_s * ours.tokens - ours.step_s
        ahead.append((ours.step, round(total, 2)))
        if total <= 0.0:
            ahead_since = None
        elif ahead_since is None:
            ahead_since = ours.step
    return {"seconds": ahead, "from_step": ahead_since}


def other_prompts(stock: Sequence[Step], arm: Sequence[Step]) -> int:
    return sum(theirs.prompt != ours.prompt for theirs, ours in pairs(stock, arm))


# ---------------------------------------------------------------------- sentences


def verdict(name: str, other: str, ratio: Mapping[str, Any], turns: int) -> str:
    """A sentence on whether arm `name` was faster than `other`, by a pooled ratio of so many turns."""
    low, high = ratio["low"], ratio["high"]
    count = len(ratio["each"])
    so_far = f"so far {name} against {other}: {ratio['pooled']:.2f}x"
    if count < FEWEST:
        return f"Too few steps to tell: {count} of each arm count, {FEWEST} are needed ({so_far}). Take more rounds."
    if turns < FEWEST_TURNS:
        return f"Too few jobs to tell: {turns} of each arm, {FEWEST_TURNS} are needed ({so_far}). Take more rounds."
    measured = f"{ratio['pooled']:.2f}x per token in a step (95 % interval {low:.2f} to {high:.2f})"
    if low > 1:
        return f"{name} was faster than {other}: {measured}."
    if high < 1:
        return f"{name} was slower than {other}: {measured}."
    return f"No measurable difference between {name} and {other}: {measured}. More rounds narrow the interval."


def paid_back(name: str, other: str, lead: Mapping[str, Any]) -> str:
    """A sentence on when an arm that had fallen behind `other` caught up, by its `lead`; empty: it was never behind."""
    worst_step, worst_s = min(lead["seconds"], key=lambda row: row[1])
    last_step, last_s = lead["seconds"][-1]
    if worst_s >= -0.5:
        return ""
    now = f"since step {lead['from_step']} it is ahead" if lead["from_step"] else "it is not ahead yet"
    behind = f"{name} was {-worst_s:.0f} s behind {other} after step {worst_step}"
    return f"{behind}; {now} ({last_s:+.0f} s after step {last_step}, for as many tokens)."


def undrafted(name: str, steps: Sequence[Step]) -> str:
    """A sentence on the steps in which an arm with TLT drafted nothing; empty if there are none."""
    none = sum(step.draft_length == 0 for step in steps)
    return f"In {none} of {len(steps)} steps {name} drafted nothing." if none else ""


def left_out(turns: Sequence[Turn]) -> dict[str, float]:
    """Mean seconds of a turn that the ratios leave out: a long run pays them once, a turn every time."""
    return {
        "start_s": round(mean(turn.start_s for turn in turns), 1),
        "first_step_s": round(mean(turn.first_s for turn in turns), 1),
        "checkpoint_s": round(mean(turn.checkpoint_s for turn in turns), 1),
    }


def left_out_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A row for each arm: its name, and seconds of a turn that are left out."""
    return [[name, *(f"{seconds:.0f}" for seconds in of.values())] for name, of in result["left_out"].items()]


def arm_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A row for each arm: its name, ratios with their intervals, accept length, reward, and probability difference.

    The reward is the mean of the steps with their deviation, the difference the largest of all steps.
    """
    rows = []
    for name, arm in result["arms"].items():
        shown = [result["ratios"][name][key] for key in RATIOS] if name in result["ratios"] else []
        absent = "1" if name == STOCK else "-"
        ratios = [faster(ratio) for ratio in shown] or [absent] * len(RATIOS)
        length = "-" if arm["accept_length"] is None else f"{arm['accept_length']:.2f}"
        reward = f"{mean(arm['reward']):.3f}" if arm["reward"] else "-"
        if len(arm["reward"]) > 1:
            reward += f" ± {np.std(arm['reward'], ddof=1):.3f}"
        difference = "-" if arm["probs_diff_max"] is None else f"{arm['probs_diff_max']:.1e}"
        rows.append([name, *ratios, length, reward, difference])
    return rows


def faster(ratio: Mapping[str, Any]) -> str:
    """How many times as fast, with the interval where there is one."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['pooled']:.2f}x{interval}"
