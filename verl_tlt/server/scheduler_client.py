"""Calls from a rollout server into vLLM's scheduler, which runs in another process (EngineCore).

vLLM's client can call any method of `EngineCore` by name, between two engine steps. `engine_core.scheduler` adds the
method `tlt_call`, which is called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_tlt.errors import TLTError
from verl_tlt.server.engine_calls import EngineGone, answered

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ANSWER_S = 30.0
"""Seconds for an answer: an engine step, or a weight sync, may have to end first."""


class SchedulerCallError(TLTError, RuntimeError):
    """The engine refused an operation or did not answer; the message says which and why."""


class SchedulerClient:
    """Calls the scheduler of one engine (`TLTScheduler.tlt_call` lists the operations)."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one operation; arguments are plain values.

        Raises:
            EngineGone: the engine died.
            SchedulerCallError: it did not answer in time, or refused.
        """
        asked = self._engine.engine_core.call_utility_async("tlt_call", operation, arguments)
        try:
            return dict(await answered(self._engine, f"answer {operation!r}", asked, ANSWER_S))
        except EngineGone as error:
            if self._engine.errored:
                raise
            raise SchedulerCallError(str(error)) from error
        except Exception as error:  # vLLM raises `Exception` with what the engine said
            raise SchedulerCallError(f"The engine refused {operation!r}: {error}") from error
