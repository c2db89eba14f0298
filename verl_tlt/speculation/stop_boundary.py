"""Requests that must not stop yet, and how long a draft they bear (`draft_length.room_before_stop`).

`SamplingParams.min_tokens` together with tokens that would stop the request: vLLM hides those until the request is long
enough, and with drafts it miscounts around that point, so that too few or too many outputs stop there. Few requests
have such settings; without them a step costs one comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from verl_tlt.speculation.draft_length import room_before_stop


class StopBoundary:
    """Keeps the requests that are before their boundary (`vllm.v1.request.Request`)."""

    def __init__(self) -> None:
        self._before: list[Any] = []

    def room(self, admitted: Iterable[Any], draft_length: int) -> int:
        """Longest draft that every running request bears; `sys.maxsize`: any.

        Args:
            admitted: requests that began, or went on after a preemption, in this step.
            draft_length: K that the step verifies.
        """
        self._before += [r for r in admitted if _may_not_stop_yet(r) and r not in self._before]
        if not self._before:
            return sys.maxsize
        self._before = [r for r in self._before if _may_not_stop_yet(r)]
        running = (r for r in self._before if r.status.name != "PREEMPTED")
        return min((self._room(r, draft_length) for r in running), default=sys.maxsize)

    @staticmethod
    def _room(request: Any, draft_length: int) -> int:
        has = request.num_output_tokens
        most = has + request.num_output_placeholders + 1 + draft_length  # with every draft accepted
        return room_before_stop(request.sampling_params.min_tokens, has, most)


def _may_not_stop_yet(request: Any) -> bool:
    params = request.sampling_params
    if params is None or not params.min_tokens or not params.all_stop_token_ids:
        return False
    return request.num_output_tokens < params.min_tokens and not request.is_finished()
