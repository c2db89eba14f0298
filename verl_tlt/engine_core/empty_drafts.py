"""Spare the engine a round trip after every step that drafted nothing.

With synchronous scheduling vLLM's engine core asks its workers for their drafts after each step, also where K was 0 and
there are none. The model waits meanwhile: a rollout without drafts would be slower than one of an engine that has no
drafter. As a diff: patches/vllm/0005.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

logger = logging.getLogger(__name__)


def spare_empty_drafts(core: Any = None) -> bool:
    """Let `EngineCore.post_step` do nothing where `scheduler.drafts_expected` is False.

    Call it in the engine core's process. A vLLM that looks at the attribute itself, or has no such step, stays as is.

    Args:
        core: `vllm.v1.engine.core.EngineCore`; given in tests.

    Returns:
        Whether the round trip is spared, by us or by vLLM.
    """
    if core is None:
        from vllm.v1.engine.core import EngineCore

        core = EngineCore
    original: Any = getattr(core, "post_step", None)
    if original is None or "take_draft_token_ids" not in (source := inspect.getsource(inspect.unwrap(original))):
        logger.info("This vLLM fetches drafts in another way: a step with K=0 may cost a round trip to the workers.")
        return False
    if "drafts_expected" in source or hasattr(original, "__wrapped__"):
        return True

    @functools.wraps(original)
    def post_step(self: Any, model_executed: bool) -> None:
        if getattr(self.scheduler, "drafts_expected", True):
            original(self, model_executed)

    core.post_step = post_step
    return True
