"""Drafts of requests with structured output: verified whole, so that sampling stays exact.

vLLM cuts a draft before the first token that the grammar forbids (`Scheduler.update_draft_token_ids`), and draws the
token in that place as if none had been drafted there, so tokens that the drafter holds likely come too often. Here a
forbidden token is verified like any other: its probability is 0 under the grammar, so it is rejected and replaced as
every rejected draft is. vLLM's own asynchronous scheduling does the same with its V1 model runner. V2 from 0.32 on is
told how many drafts are allowed, and draws as above behind them, so it is told one more where the next is forbidden.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

NOT_TO_ADVANCE = -1
"""A draft behind which `grammar_bitmask` follows the grammar no further."""


class GrammarDrafts:
    """Remembers how far the grammar allows each draft that is about to be verified."""

    def __init__(self) -> None:
        self._allowed: dict[str, int] = {}
        self._forbidden: set[str] = set()  # requests whose first forbidden draft is known, until the step is handed on
        self._structured = False  # a request of any step so far; with pipelines the latest step may be another one

    def keep_whole(self, requests: Mapping[str, Request], drafts: DraftTokenIds) -> None:
        """Give requests the whole drafts again that vLLM has just cut."""
        if not self._structured:
            return
        for name, row in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self._allowed.pop(name, None)
            request = requests.get(name)
            if request is None or request.structured_output_request is None or request.is_prefill_chunk:
                continue
            if len(request.spec_token_ids) < len(row):
                self._allowed[name] = len(request.spec_token_ids)
                request.spec_token_ids = list(row)
            self._note(name, row, self._allowed.get(name, len(row)))
        for name in self._allowed.keys() - requests.keys():
            del self._allowed[name]
        self._forbidden &= requests.keys()

    def note_marks(self, output: SchedulerOutput, names: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
        """Asynchronous scheduling: which of the drafts (`rows`) vLLM has just marked in the step that verifies them."""
        for name, row in zip(names, rows, strict=True):
            marked = output.scheduled_spec_decode_tokens.get(name, [])
            self._note(name, row, marked.index(NOT_TO_ADVANCE) if NOT_TO_ADVANCE in marked else len(row))

    def _note(self, name: str, row: Sequence[int], allowed: int) -> None:
        known = allowed < len(row) and row[allowed] >= 0  # a draft that did not come from the device is -1
        (self._forbidden.add if known else self._forbidden.discard)(name)

    def with_first_forbidden(self, output: GrammarOutput | None) -> GrammarOutput | None:
        """Have the V2 model runner verify the first forbidden draft too: nothing behind it can be reached."""
        if output is None:
            return None
        names = output.structured_output_request_ids
        if (allowed := getattr(output, "num_acceptable_drafts", None)) is not None:
            output.num_acceptable_drafts = [n + (x in self._forbidden) for n, x in zip(allowed, names, strict=True)]
        self._forbidden.difference_update(names)
        return output

    def marked(self, output: SchedulerOutput) -> SchedulerOutput:
        """A scheduled step as vLLM's `get_grammar_bitmask` has to see it: forbidden drafts are `NOT_TO_ADVANCE`."""
        self._structured |= output.has_structured_output_requests
        if not self._allowed:
            return output
        marked = copy.copy(output)
        marked.scheduled_spec_decode_tokens = {
            name: [token if i < self._allowed.get(name, len(row)) else NOT_TO_ADVANCE for i, token in enumerate(row)]
            for name, row in output.scheduled_spec_decode_tokens.items()
        }
        return marked
