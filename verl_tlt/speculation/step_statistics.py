"""What an engine did since it was last asked: sums over engine steps, and one trace line per step.

Pure Python, no vLLM, so that the account can be tested by itself. The scheduler feeds it (`engine_core/scheduler.py`),
the server asks for it over the control channel once per RL step.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from typing import Any

from verl_tlt.speculation.types import OFF, StepRecord

LATENCY_SAMPLES = 64  # per (arm, batch): enough for a median, bounded however long the rollout is


class Aggregates:
    """Sums over engine steps since construction."""

    def __init__(self) -> None:
        self.steps = 0
        self.clean_steps = 0
        self.blocked_steps = 0
        self.busy_s = 0.0
        self.emitted = 0
        self.produced = 0
        self.rows = 0
        self.drafts = 0
        self.draft_tokens = 0
        self.offered: list[int] = []
        self.accepted: list[int] = []
        self.k_steps: Counter[int] = Counter()
        self.k_tokens: Counter[int] = Counter()
        self.saved_s = 0.0
        self.compared_s = 0.0
        self.control_s = 0.0
        self._work: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._latency: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=LATENCY_SAMPLES))

    def add(
        self,
        step: StepRecord,
        *,
        emitted: int,
        draft_tokens: int,
        blocked: bool = False,
        decode_only: bool = True,
        stock_s: float | None = None,
        control_s: float = 0.0,
    ) -> None:
        """Account for one finished step.

        Args:
            step: what the policy sees of it.
            emitted: tokens handed to requests, first tokens after a prefill included.
            draft_tokens: tokens verified over all requests.
            blocked: vLLM could not draft in this step.
            decode_only: no prefill in the step and no pause before it, so that its time is that of decoding.
            stock_s: seconds stock would have needed for the step's tokens, where that is known.
            control_s: seconds that the step waited for the controller.
        """
        arm = OFF if step.drafted == OFF else step.verified
        self.steps += 1
        self.blocked_steps += blocked
        self.busy_s += step.latency_s
        self.control_s += control_s
        self.emitted += emitted
        self.produced += step.produced
        self.rows += step.batch
        self.drafts += step.drafts
        self.draft_tokens += draft_tokens
        while len(self.accepted) < len(step.accepted):
            self.accepted.append(0)
            self.offered.append(0)
        for i, count in enumerate(step.accepted):
            self.offered[i] += step.drafts
            self.accepted[i] += count
        self.k_steps[arm] += 1
        self.k_tokens[arm] += step.produced
        if step.clean:
            self.clean_steps += 1
            self._latency[arm, step.batch].append(step.latency_s)
        if decode_only and step.batch:
            work = self._work[step.batch]
            work[0] += step.latency_s
            work[1] += step.produced
        if stock_s is not None:
            self.saved_s += stock_s - step.latency_s
            self.compared_s += step.latency_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready sums.

        Returns:
            steps, clean_steps, blocked_steps (vLLM could not draft); busy_s; emitted (all tokens), produced and rows
            (tokens and request-steps of decode-phase requests); drafts, draft_tokens; offered and accepted per position
            (drafts of at least i+1 tokens, and those of them whose first i+1 tokens were accepted: K varies, so a rate
            needs both); k_steps and k_tokens by verified K as strings, "-1" for OFF; saved_s against stock, over the
            compared_s seconds of decode-only steps for which the OFF latency is known; control_s that steps waited for
            the controller; work as [batch, seconds, tokens] of decode-only steps; latency as [arm, batch, samples,
            median seconds] of clean steps.
        """
        return {
            "steps": self.steps,
            "clean_steps": self.clean_steps,
            "blocked_steps": self.blocked_steps,
            "busy_s": self.busy_s,
            "emitted": self.emitted,
            "produced": self.produced,
            "rows": self.rows,
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "offered": list(self.offered),
            "accepted": list(self.accepted),
            "k_steps": {str(k): n for k, n in sorted(self.k_steps.items())},
            "k_tokens": {str(k): n for k, n in sorted(self.k_tokens.items())},
            "saved_s": self.saved_s,
            "compared_s": self.compared_s,
            "control_s": self.control_s,
            "work": [[batch, *sums] for batch, sums in sorted(self._work.items())],
            "latency": [[k, b, len(v), statistics.median(v)] for (k, b), v in sorted(self._latency.items())],
        }
