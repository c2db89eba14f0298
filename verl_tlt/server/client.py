"""verl's LLM client, made to survive a replica that leaves the balancer while a request is on its way to it.

The balancer may hand out a server in the same instant in which that server decides to leave. The server then
rejects the request before its engine sees it (an "aborted" reply without tokens), and stock verl's synchronous
client would keep that as an empty sample. This client asks the balancer again. verl's asynchronous client asks again
by itself, a second later; below it, ours asks at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # the balancer learns of the departure within one round trip; do not spin until it does
RETRIES = 200  # ten seconds of rejections is not a race any more: give verl the aborted reply and let it decide


class TLTLLMServerClient(LLMServerClient):
    """Re-routes rejected requests; see `vLLMHttpServer._park_until_admitted` for where a rejection comes from."""

    async def generate(self, request_id: Any, **kwargs: Any) -> Any:
        """As `LLMServerClient.generate`; a request that no engine has seen is sent again."""
        params = kwargs.pop("sampling_params")
        for attempt in range(RETRIES + 1):
            # The server pops keys from the dict it is given; each attempt needs its own.
            output = await super().generate(request_id, sampling_params=dict(params), **kwargs)
            rejected = output.stop_reason == "aborted" and not output.token_ids
            if not rejected:
                return output
            if attempt < RETRIES:
                logger.debug("request %s rejected by a leaving replica, trying another", request_id)
                await asyncio.sleep(RETRY_PAUSE_S)
        logger.warning(
            "request %s was rejected %d times in a row; passing the aborted reply on", request_id, RETRIES + 1
        )
        return output


class TLTFullyAsyncLLMServerClient(FullyAsyncLLMServerClient, TLTLLMServerClient):
    """verl's client for partial rollouts, which resumes what a weight sync aborts, on top of ours."""
