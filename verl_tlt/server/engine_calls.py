"""Calls to a vLLM engine, whose core is a process of its own: none waits for an engine that has died or hangs.

vLLM's client can call any method of `EngineCore` by name, between two engine steps. `engine_core.scheduler` adds the
method `tlt_call`, by which `ask_scheduler` reaches the scheduler there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 300.0
"""Bound in seconds of falling asleep, waking up or loading a drafter, each of which takes a few seconds."""
SCHEDULER_S = 30.0
"""Bound in seconds of an answer of the scheduler: an engine step, or a weight sync, may have to end first."""
LOOK_S = 0.5
"""Seconds between two looks whether an engine's process lives."""


class EngineGone(TLTError, RuntimeError):
    """The engine died before it answered, or did not answer in time; the message says which, and what it was asked."""


async def answered(engine: AsyncLLM, what: str, call: Awaitable[T], bound_s: float | None = None) -> T:
    """The answer to a call to an engine that `fail_calls_when_dead` watches; `EngineGone` where there will be none.

    What the engine answers with an error is raised as vLLM raises it. `what` names what the engine was asked to do;
    `bound_s`: seconds (None: `ANSWER_S`).
    """
    bound_s = ANSWER_S if bound_s is None else bound_s
    try:
        return await asyncio.wait_for(call, bound_s)
    except TimeoutError as error:
        raise EngineGone(f"The engine did not {what} within {bound_s:g} s.") from error
    except Exception as error:
        if engine.errored:
            raise EngineGone(f"The engine died when it was to {what}; its own log may say of what.") from error
        raise


# Changes vllm: patches/README.md#a-call-that-waits-for-an-engine-ends-when-the-engine-dies
async def fail_calls_when_dead(engine: AsyncLLM) -> None:
    """Have calls that wait for an engine's core raise `EngineDeadError` when the core has died; returns after that.

    vLLM refuses calls to a core that is known to be dead, and leaves those that wait for it waiting. To be run as a
    task beside the engine.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    client = engine.engine_core
    resources, waiting = client.resources, getattr(client, "utility_results", {})
    del engine, client  # they end with their last user, not with this task
    while not resources.engine_dead:
        await asyncio.sleep(LOOK_S)
    # A call enters `waiting` before it asks whether the core is dead, so none comes after this.
    failed = [call for call in waiting.values() if not call.done()]
    for call in failed:
        call.set_exception(EngineDeadError())
    if failed:
        logger.error("The engine's process died with %d calls waiting for it.", len(failed))


class SchedulerCallError(TLTError, RuntimeError):
    """The engine refused an operation or did not answer; the message says which and why."""


async def ask_scheduler(engine: AsyncLLM, operation: str, **arguments: Any) -> dict[str, Any]:
    """The scheduler's answer to an operation of `TLTScheduler.tlt_call`; arguments are plain values.

    `SchedulerCallError`: refused, or none in time.
    """
    asked = engine.engine_core.call_utility_async("tlt_call", operation, arguments)
    try:
        return dict(await answered(engine, f"answer {operation!r}", asked, SCHEDULER_S))
    except EngineGone as error:
        if engine.errored:
            raise
        raise SchedulerCallError(str(error)) from error
    except Exception as error:  # vLLM raises `Exception` with what the engine said
        raise SchedulerCallError(f"The engine refused {operation!r}: {error}") from error
