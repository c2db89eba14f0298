"""Sums over an engine's steps since they were last asked for, which the server does once per RL step."""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from verl_tlt.messages.rollout import EngineStats, StepTime
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF, Step

LATENCY_SAMPLES = 64
"""Latest clean steps kept per draft length and batch, for their median."""
KEPT_UNDRAFTED = 16
"""Latest clean steps without drafts that are kept per octave of the batch, also from earlier rollouts."""
FEWEST_UNDRAFTED = 4
"""Fewest steps without drafts that give a pace. With so many, steps with drafts give none: drafts that cost more than
calibrated would look like a slower machine."""


@dataclass(slots=True)
class Decoded:
    """Decode-only steps of one draft length and batch, summed."""

    draft_length: int  # verified, or OFF
    batch: int
    seconds: float = 0.0
    tokens: int = 0
    kv_tokens: int = 0
    steps: int = 0
    clean_seconds: float = 0.0
    clean_steps: int = 0

    @property
    def context(self) -> float:
        """Tokens of context of a request."""
        return self.kv_tokens / (self.steps * self.batch)

    def add(self, step: Step) -> None:
        self.seconds += step.latency_s
        self.tokens += step.num_decode_tokens
        self.kv_tokens += step.kv_tokens
        self.steps += 1
        if step.clean:
            self.clean_seconds += step.latency_s
            self.clean_steps += 1


class Undrafted(NamedTuple):
    """A clean step without drafts."""

    draft_length: int  # 0 or OFF
    batch: int
    context: float  # tokens of context of a request
    seconds: float


def undrafted_s(decoded: Iterable[Decoded], costs: LatencyTable, undrafted: Iterable[Undrafted] = ()) -> float:
    """Estimated seconds that the same tokens take without drafts: calibrated seconds of OFF, times the machine's pace.

    The pace of a batch is the median of measured over calibrated seconds. The steps that give it are

    1. the clean steps without drafts in the batch's octave, if there are `FEWEST_UNDRAFTED`;
    2. otherwise all clean steps without drafts, if there are so many;
    3. otherwise all clean steps.

    If the calibration says that a step with the drafter is faster than one without, its seconds count for both: that
    was noise. Steps that were OFF count with their measured seconds; so do all steps where OFF was not calibrated.
    """
    cells = list(decoded)
    if OFF not in costs.lengths():
        return sum(cell.seconds for cell in cells)
    paces: defaultdict[int, list[float]] = defaultdict(list)  # by octave
    for step in undrafted:
        if step.draft_length in costs.lengths():
            calibrated = float(costs.seconds(step.draft_length, step.batch, step.context))
            paces[step.batch.bit_length()].append(step.seconds / calibrated)
    all_paces = [pace for of_octave in paces.values() for pace in of_octave]
    if len(all_paces) < FEWEST_UNDRAFTED:
        clean = [cell for cell in cells if cell.clean_steps and cell.draft_length in costs.lengths()]
        expected = sum(c.clean_steps * float(costs.seconds(c.draft_length, c.batch, c.context)) for c in clean)
        all_paces = [sum(cell.clean_seconds for cell in clean) / expected if expected else 1.0]

    def pace_at(octave: int) -> float:
        own = paces[octave]
        return statistics.median(own if len(own) >= FEWEST_UNDRAFTED else all_paces)

    total = 0.0
    for cell in cells:
        if cell.draft_length == OFF:
            total += cell.seconds
            continue
        off_s = min(float(costs.seconds(k, cell.batch, cell.context)) for k in costs.usable(cell.batch))
        total += cell.tokens / cell.batch * pace_at(cell.batch.bit_length()) * off_s
    return total


class StepSums:
    """Sums over engine steps since they were last reset; `EngineStats` says what each of them is."""

    def __init__(self) -> None:
        self._costs = LatencyTable()
        self._undrafted: dict[int, deque[Undrafted]] = defaultdict(lambda: deque(maxlen=KEPT_UNDRAFTED))  # by octave
        self._begin()

    def calibrated(self, costs: LatencyTable) -> None:
        self._costs = costs
        self._undrafted.clear()

    def _begin(self) -> None:
        self._sums = EngineStats()
        self._offered: Counter[int] = Counter()  # by draft position, ascending
        self._accepted: Counter[int] = Counter()
        self._steps_by_draft_length: Counter[int] = Counter()
        self._decoded: dict[tuple[int, int], Decoded] = {}  # by draft length and batch
        self._step_times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=LATENCY_SAMPLES))

    def add(self, step: Step) -> None:
        sums = self._sums
        sums.num_steps += 1
        sums.num_decode_tokens += step.num_decode_tokens
        sums.num_drafts += step.num_drafts
        sums.control_s += step.control_s
        for i, count in enumerate(step.num_accepted_tokens_per_pos):
            self._offered[i] += step.num_drafts
            self._accepted[i] += count
        draft_length = OFF if step.drafted == OFF else step.verified
        key = (draft_length, step.batch)
        self._steps_by_draft_length[draft_length] += 1
        if step.clean:
            self._step_times[key].append(step.latency_s)
            if draft_length <= 0 and step.batch:
                context = step.kv_tokens / step.batch
                octave = step.batch.bit_length()
                self._undrafted[octave].append(Undrafted(draft_length, step.batch, context, step.latency_s))
        if step.decode_only and step.batch:
            if key not in self._decoded:
                self._decoded[key] = Decoded(draft_length, step.batch)
            self._decoded[key].add(step)

    def stats(self, reset: bool = False) -> EngineStats:
        """The sums so far."""
        decoded = list(self._decoded.values())
        tokens_by_batch: Counter[int] = Counter()
        for cell in decoded:
            tokens_by_batch[cell.batch] += cell.tokens
        contexts = sum(cell.steps * cell.batch for cell in decoded)  # one per request and step
        stats = replace(
            self._sums,
            num_draft_tokens_per_pos=tuple(self._offered.values()),
            num_accepted_tokens_per_pos=tuple(self._accepted.values()),
            steps_by_draft_length=dict(sorted(self._steps_by_draft_length.items())),
            tokens_by_batch=dict(sorted(tokens_by_batch.items())),
            mean_context=sum(cell.kv_tokens for cell in decoded) / contexts if contexts else 0.0,
            decode_s=sum(cell.seconds for cell in decoded),
            undrafted_s=undrafted_s(decoded, self._costs, chain(*self._undrafted.values())),
            step_times=tuple(StepTime(k, b, statistics.median(v)) for (k, b), v in sorted(self._step_times.items())),
        )
        if reset:
            self._begin()
        return stats
