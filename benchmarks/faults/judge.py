"""What a run says about one fault: did it survive, were its updates stock verl's, who counted it, what recovered.

Pure: numbers and lines in, a verdict out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.faults.plan import FAULTS, Fault
from verl_tlt.commands.report.reader import RunTrace

Steps = Mapping[int, Mapping[str, float]]

UPDATE = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean")
"""verl's metrics that would differ in some bit if two runs' updates did."""


@dataclass(frozen=True)
class Evidence:
    """What is known of the run that the fault struck, and of the same without TLT."""

    ended: bool
    """By itself, with exit status 0, after all steps."""
    steps: Steps
    stock: Steps
    trace: RunTrace
    log: str
    fired: Mapping[str, int]
    """By file name: the step in which it struck."""
    same_weights: bool
    """The last checkpoints hold the same actor, to the bit."""
    late_request: str = ""
    """What became of the one that met a leaving replica."""
    saved: Sequence[int] = ()
    """Steps whose checkpoint holds a whole drafter."""


def row(fault: Fault, seen: Evidence) -> dict[str, Any]:
    """A line of `faults.json`."""
    fault = replace(fault, step=struck_in(fault, seen))
    return {
        "fault": fault.name,
        "survived": seen.ended and struck(fault, seen),
        "policy_updates_equal": same_updates(seen),
        "recovered": falls_back(fault, seen) and RECOVERIES[fault.recovers](fault, seen),
        "counter": counter(fault, seen),
    }


def wrong(fault: Fault, line: Mapping[str, Any], seen: Evidence) -> list[str]:
    """What of a row is not as it should be, in words."""
    found = []
    if not struck(fault, seen):
        found.append("it never struck")
    found += [key for key in ("survived", "policy_updates_equal", "recovered") if not line[key]]
    if fault.counter and not line["counter"]:
        found.append(f"{fault.counter} did not count it")
    if fault.log not in seen.log:
        found.append(f"no line of the log says {fault.log!r}")
    return found


def struck(fault: Fault, seen: Evidence) -> bool:
    """Whether each of its functions has failed."""
    return all(fault.note(target) in seen.fired for target in fault.targets)


def same_updates(seen: Evidence) -> bool:
    """As many updates as without TLT, each with the same numbers to the bit, and the same weights at the end."""
    if seen.steps.keys() != seen.stock.keys():
        return False
    same = all(seen.steps[step].get(key) == seen.stock[step].get(key) for step in seen.steps for key in UPDATE)
    return same and seen.same_weights


def struck_in(fault: Fault, seen: Evidence) -> int:
    """The step in which the last of its functions failed."""
    return max(seen.fired.get(fault.note(target), fault.step) for target in fault.targets)


def counter(fault: Fault, seen: Evidence) -> str | None:
    """The metric that counted the fault, if it did before another fault struck that it counts, too."""
    if not fault.counter:
        return None
    before = _value(seen.steps, fault.step - 1, fault.counter) if fault.counter.startswith("tlt/errors") else 0.0
    others = [struck_in(other, seen) for other in FAULTS if other.counter == fault.counter and struck(other, seen)]
    end = min([step for step in others if step > fault.step], default=max(seen.steps) + 1)
    steps = range(max(1, fault.step), end)
    return fault.counter if any(_value(seen.steps, step, fault.counter) > before for step in steps) else None


def falls_back(fault: Fault, seen: Evidence) -> bool:
    """Engines whose drafter is not to be trusted drafted nothing in the next rollout."""
    return not fault.fallback or _value(seen.steps, fault.step + 1, fault.fallback) > 0


def _value(steps: Steps, step: int, key: str) -> float:
    return float(steps.get(step, {}).get(key, 0.0))


def _later(fault: Fault, seen: Evidence) -> list[Mapping[str, float]]:
    return [metrics for step, metrics in sorted(seen.steps.items()) if step > fault.step]


def trains(fault: Fault, seen: Evidence) -> bool:
    """Every replica had a good session later."""
    good = {s.replica for s in seen.trace.sessions if s.step > fault.step and s.steps > 0 and s.error is None}
    return good >= {s.replica for s in seen.trace.sessions} and bool(good)


def serves(fault: Fault, seen: Evidence) -> bool:
    """Later all engines held what was published (else it counts as a failed reload), and drafted."""
    later = _later(fault, seen)[1:]
    return any(m.get("tlt/reload_failures") == 0.0 and m.get("tlt/drafter_off_frac", 0.0) == 0.0 for m in later)


def drafts(fault: Fault, seen: Evidence) -> bool:
    """Later rollouts drafted."""
    return any(m.get("tlt/accept_length", 0.0) > 1.0 for m in _later(fault, seen))


def publishes(fault: Fault, seen: Evidence) -> bool:
    """Later a drafter was published, and loaded by everybody."""
    return serves(fault, seen) and any(p.step > fault.step and p.decision == "published" for p in seen.trace.publishes)


def joins(fault: Fault, seen: Evidence) -> bool:
    """One was missing, and both were there again in the same rollout and in the next."""
    here, then = ([x.inflight for x in seen.trace.loads if x.step == step] for step in (fault.step, fault.step + 1))
    everybody = {name for x in seen.trace.loads for name in x.inflight}
    missing = next((i for i, x in enumerate(here) if everybody - set(x)), len(here))
    return all(any(everybody == set(x) for x in loads) for loads in (here[missing:], then))


def saves(fault: Fault, seen: Evidence) -> bool:
    """The next checkpoint holds a drafter, and the one that failed not half of one."""
    return fault.step not in seen.saved and any(step > fault.step for step in seen.saved)


def served_late(fault: Fault, seen: Evidence) -> bool:
    """The late request was answered in full."""
    return seen.late_request.split()[-1:] == ["8"]


def as_stock(fault: Fault, seen: Evidence) -> bool:
    """Nothing recovers: neither does stock verl."""
    return False


RECOVERIES = {f.__name__: f for f in (trains, serves, drafts, publishes, joins, saves, served_late, as_stock)}
