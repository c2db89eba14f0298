"""One simulated rollout replica: requests advance at computed costs, and the control code of a real run chooses K.

Between two changes of its batch an engine does the same in every step, so a rollout is simulated in segments. At the
start of each, engine steps are taken one by one as in a real engine (the policy chooses K, verification is drawn, a
noisy latency is learned), until the draft length has settled. The rest of the segment is one computation: it ends where
the batch has changed by `GRAIN` or the contexts have grown by `GROWTH`, and in each of its steps a request gains the
accept length expected at its own acceptance. Left out are probes inside a segment (at most `probe_share` of the time),
and the luck of single tokens, which evens out over a response.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from verl_tlt.advise.response_lengths import Lengths
from verl_tlt.advise.step_costs import CostModel
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.decision import Limits, RolloutDecision
from verl_tlt.speculation.policies.factory import make_policy
from verl_tlt.speculation.step_control import StepControl
from verl_tlt.speculation.types import OFF, Load, StepRecord

GRAIN = 1.0 / 32.0
"""Relative change of the batch at which a segment ends: the policy treats less as the same load."""
GROWTH = 0.25
"""Relative growth of the mean context at which a segment ends."""
SETTLE = 8
"""Engine steps taken one by one at a segment's start; half as many where all choose the K of the last segment."""
CALIBRATION = (1, 2, 4, 8, 16, 32)
"""Batches at which a run measures step costs at its start."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EngineSpec:
    """What all replicas have in common."""

    cost: CostModel
    arms: tuple[int, ...] = (0, 1, 3)
    """Draft lengths that the policy may choose."""
    policy: str = "goodput"
    """`tlt.speculation.policy`."""
    max_batch: int = 256
    """`max_num_seqs`: requests decoding at once; the others wait."""
    token_limit: int = 0
    """Tokens of the largest step with a CUDA graph; 0: no limit."""
    prefill_token_s: float = 0.0
    """Seconds per prompt token."""
    spread: float = 0.0
    """Relative standard deviation of acceptance between requests."""
    jitter: float = 0.03
    """Log-normal noise of the latencies that the policy sees; time itself passes without it."""

    def acceptances(self, rng: np.random.Generator, requests: int) -> Floats:
        """Acceptance of each request relative to the drafter's mean, [requests]."""
        drawn = 1.0 + self.spread * rng.standard_normal(requests) if self.spread else np.ones(requests)
        return np.asarray(np.clip(drawn, 0.0, None))


@dataclass
class Decoded:
    """What one replica did in one rollout."""

    seconds: float = 0.0
    """Until its last response; 0 where it had none."""
    tokens: float = 0.0
    seconds_by_batch: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of decoding by batch, rounded down to a power of two."""
    off_s: float = 0.0
    """Seconds of decoding that the same tokens would have taken without the drafter."""
    drafting: bool = False
    """Whether the drafter ran."""

    def gain(self) -> float | None:
        """Share of the decoding time without drafts that was saved; None: the drafter did not run."""
        return 1.0 - sum(self.seconds_by_batch.values()) / self.off_s if self.drafting and self.off_s else None


class Replica:
    """A replica under its own `StepControl` and `RolloutDecision`, which remember from rollout to rollout.

    Args:
        spec: of the engine.
        seed: of the random numbers for verification and noise.
    """

    def __init__(self, spec: EngineSpec, seed: int) -> None:
        self.spec = spec
        self.rng = np.random.default_rng([seed, 7])
        self.control = StepControl(make_policy(spec.policy, spec.arms), Limits(spec.arms, spec.token_limit))
        self.decision = RolloutDecision(spec.policy)
        table = self._calibration()
        self.control.control(points=table.to_list())
        self.decision.calibrated(table)

    def rollout(self, lengths: Lengths, prompt: int, believed: Floats, true: Floats) -> Decoded:
        """Decode all responses under control.

        Args:
            lengths: tokens of each response, [requests].
            prompt: tokens of each prompt.
            believed: conditional acceptance by position that the drafter was published with.
            true: what it really is on these responses.
        """
        self.control.drafting = self.decision.drafts(believed.tolist())
        self.control.control(acceptance=believed.tolist())
        found = _Rollout(self.spec, lengths, prompt, true, self).run()
        self.decision.learn([self.control.stats(reset=True)], found.gain())
        return found

    def _calibration(self) -> LatencyTable:
        """The step costs that a run measures at its start: OFF and every arm, at small batches and short contexts."""
        points = []
        for batch in (b for b in CALIBRATION if b <= self.spec.max_batch):
            for k in (OFF, *self.spec.arms):
                true = self.spec.cost.seconds(batch, 32 * batch, max(k, 0), k)
                noisy = true * float(self.rng.lognormal(0.0, 0.5 * self.spec.jitter))
                points.append(LatencyPoint(batch, 32 * batch, k, noisy, samples=4, calibrated=True))
        return LatencyTable(tuple(points))


def decode_as_stock(spec: EngineSpec, lengths: Lengths, prompt: int) -> Decoded:
    """The same responses in an engine without a drafter."""
    return _Rollout(spec, lengths, prompt, np.zeros(0)).run()


class _Rollout:
    """One rollout in progress; without a replica it decodes as stock."""

    def __init__(
        self, spec: EngineSpec, lengths: Lengths, prompt: int, true: Floats, replica: Replica | None = None
    ) -> None:
        self.spec, self.replica, self.prompt, self.true = spec, replica, prompt, true
        first = min(spec.max_batch, lengths.size)
        self.left = lengths[:first].astype(np.float64)  # tokens to go, [batch]
        self.whole = self.left.copy()  # of each, [batch]
        self.waiting = lengths[first:].astype(np.float64)
        scales = spec.acceptances(replica.rng, lengths.size) if replica is not None else np.ones(lengths.size)
        self.scale, self.waiting_scale = scales[:first], scales[first:]
        self.verified = 0
        self.last_k: int | None = None  # of the last segment
        self.found = Decoded(drafting=replica is not None and replica.control.drafting)
        self._rates: dict[int, Floats] = {}
        self._prefill(first)

    def run(self) -> Decoded:
        """To the last response."""
        while self.left.size:
            k = self._settle()
            self._retire()
            if self.left.size:
                self._finish_segment(k)
                self._retire()
        return self.found

    def _settle(self) -> int:
        """Take steps one by one, until it is clear which draft length the segment has."""
        if self.replica is None or not self.replica.control.drafting:
            return OFF
        chosen: list[int] = []
        while len(chosen) < SETTLE and self.left.max() > 0:
            chosen.append(self._step())
            if len(chosen) == SETTLE // 2 and set(chosen) == {self.last_k}:
                break
        self.last_k = Counter(reversed(chosen)).most_common(1)[0][0]
        return self.last_k

    def _step(self) -> int:
        """One engine step as the scheduler would see it; returns the K that was drafted."""
        assert self.replica is not None
        control, rng, batch, verified = self.replica.control, self.replica.rng, self.left.size, self.verified
        kv = self._kv()
        k = control.choose(Load(batch, kv))
        accepted, hits = [], batch
        for a in self.true[:verified]:
            hits = int(rng.binomial(hits, min(float(a), 1.0)))
            accepted.append(hits)
        seconds = self.spec.cost.seconds(batch, kv, verified, k)
        produced = self._advance(self._rate(verified))
        record = StepRecord(
            batch=batch, kv_tokens=kv, drafted=k, verified=verified, num_drafts=batch if verified else 0,
            num_accepted_tokens_per_pos=tuple(accepted), produced=max(1, round(produced)),
            latency_s=seconds * float(rng.lognormal(0.0, self.spec.jitter)), clean=verified == max(k, 0),
        )  # fmt: skip
        control.record(record, num_generation_tokens=record.produced, num_draft_tokens=batch * verified, unix_s=0.0)
        off_s = self.spec.cost.seconds(batch, kv, 0, OFF) * produced / batch
        self._account(batch, produced, seconds, off_s)
        self.verified = max(k, 0)
        return k

    def _finish_segment(self, k: int) -> None:
        """As many equal steps as it takes until the batch or the contexts have changed by one grain."""
        batch, kv, draft = self.left.size, self._kv(), max(k, 0)
        rate = self._rate(draft)
        needed = self.left / rate  # steps each request still takes, [batch]
        ending = min(batch, max(1, round(batch * GRAIN)))
        until = float(np.partition(needed, ending - 1)[ending - 1])
        if self.waiting.size == 0 or ending < batch:
            until = min(until, max(1.0, GROWTH * (kv / batch + 64.0) / float(rate.mean())))
        busy = np.clip(needed / until, 0.0, 1.0).sum()  # requests that decode, on average over the segment
        middle = max(1, round(float(busy)))
        produced = self._advance(rate * until)
        there = round(kv * middle / batch + 0.5 * produced)
        seconds = until * self.spec.cost.seconds(middle, there, draft, k)
        off_s = produced / middle * self.spec.cost.seconds(middle, there, 0, OFF)
        if self.replica is not None and seconds > 0:
            record = StepRecord(
                batch=middle, kv_tokens=kv, drafted=k, verified=draft, num_drafts=0, num_accepted_tokens_per_pos=(),
                produced=max(1, round(produced)), latency_s=seconds, clean=False,
            )  # fmt: skip
            self.replica.control.record(record, num_generation_tokens=record.produced, num_draft_tokens=0, unix_s=0.0)
        self._account(middle, produced, seconds, off_s)
        self.verified = draft

    def _retire(self) -> None:
        """Responses that ended make room for those that wait."""
        going = self.left > 1e-9
        self.left, self.whole, self.scale = self.left[going], self.whole[going], self.scale[going]
        room = min(self.spec.max_batch - self.left.size, self.waiting.size)
        if room > 0:
            self.left = np.concatenate((self.left, self.waiting[:room]))
            self.whole = np.concatenate((self.whole, self.waiting[:room]))
            self.scale = np.concatenate((self.scale, self.waiting_scale[:room]))
            self.waiting, self.waiting_scale = self.waiting[room:], self.waiting_scale[room:]
            self._prefill(room)
        self._rates.clear()

    def _advance(self, gain: Floats) -> float:
        """Let every request gain tokens, no more than it has to go; returns their sum."""
        gained = np.minimum(gain, self.left)
        self.left = self.left - gained
        return float(gained.sum())

    def _rate(self, k: int) -> Floats:
        """Tokens each request gains in a step that verifies k, [batch]."""
        if k not in self._rates:
            chain = np.clip(self.true[:k] * self.scale[:, None], 0.0, 1.0).cumprod(axis=1)  # [batch, k]
            self._rates[k] = 1.0 + chain.sum(axis=1)
        return self._rates[k]

    def _kv(self) -> int:
        return round(float((self.whole - self.left).sum())) + self.left.size * self.prompt

    def _prefill(self, requests: int) -> None:
        self.found.seconds += requests * self.prompt * self.spec.prefill_token_s

    def _account(self, batch: int, produced: float, seconds: float, off_s: float) -> None:
        found = self.found
        found.seconds += seconds
        found.off_s += off_s
        found.tokens += produced
        found.seconds_by_batch[1 << (batch.bit_length() - 1)] += seconds
