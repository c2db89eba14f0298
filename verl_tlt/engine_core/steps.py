"""One engine step from its scheduling until its numbers are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from verl_tlt.speculation.types import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

PAUSE_FLOOR_S = 0.002
"""Seconds between two steps up to which a gap is vLLM's own work."""
PAUSE_SHARE = 0.5
"""Share of a step's own time beyond which a gap before it means that the engine was held up."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineStep(Step):
    """A `Step` with vLLM's objects; until `count` ran, `verified` is what the step before drafted, K or OFF."""

    output: SchedulerOutput
    started_s: float
    paused_s: float
    """Seconds between the end of the step before and the start of this one, if none was in flight."""
    blocked: bool  # a context is too long for the drafter, so that nothing was drafted
    prefilling: Collection[str]  # requests that still compute their prompt
    may_lack_drafts: bool
    """There is no drafter, so a request may go without a draft (`tlt.speculation.source=ngram`)."""
    sampled: Sequence[int] = ()
    """Tokens that the step sampled, by row, the target's own included, before vLLM cuts rows at a request's end."""
    row_of: Mapping[str, int] = field(default_factory=dict)  # request → row
    gone: Collection[str] = ()  # requests that ended while the step ran; their drafts do not count
    outputs: Mapping[int, EngineCoreOutputs] = field(default_factory=dict)
    """What the requests got from the step, by client."""
    finished_s: float = 0.0
    previous_finished_s: float = 0.0

    def count(self) -> None:
        """Fill in the numbers, as vLLM counts them; the next step does not wait for this."""
        paused = self.paused_s > max(PAUSE_FLOOR_S, PAUSE_SHARE * (self.finished_s - self.started_s))
        self.latency_s = self.finished_s - (self.started_s if paused else self.previous_finished_s)
        self.decode_only = not self.prefilling and not paused
        for client in self.outputs.values():
            for output in client.outputs:
                tokens = len(output.new_token_ids)
                self.num_generation_tokens += tokens
                self.num_decode_tokens += 0 if output.request_id in self.prefilling else tokens
        drafts = self.output.scheduled_spec_decode_tokens if self.sampled else {}
        lengths = {name: self.sampled[self.row_of[name]] for name in drafts if name not in self.gone}
        self.accepted = [(name, tokens - 1) for name, tokens in lengths.items() if tokens]
        self.num_draft_tokens = sum(len(drafts[name]) for name, _ in self.accepted)
        previous = self.verified
        # Where requests may lack a draft, a missing one counts as one of which nothing was accepted: what K costs and
        # brings is then that of the whole batch, as with a drafter.
        self.num_drafts = self.batch if self.may_lack_drafts and previous > 0 else len(self.accepted)
        self.verified = previous if self.num_drafts else 0
        exactly = Counter(tokens for _, tokens in self.accepted)
        reached = accumulate(exactly[k] for k in range(self.verified, 0, -1))  # K, K-1, ... 1 tokens accepted
        self.num_accepted_tokens_per_pos = tuple(reached)[::-1]
        # From 0.33 on vLLM's V2 runner drafts nothing where every request ends with the step or has prompt left.
        skipped = bool(getattr(self.output, "skip_drafts", False)) and self.drafted > 0
        whole = self.num_drafts == self.batch and self.num_draft_tokens == self.verified * self.batch
        steady = self.drafted == previous and (self.drafted <= 0 or self.may_lack_drafts or whole)
        self.clean = self.decode_only and steady and not (self.blocked or skipped)
