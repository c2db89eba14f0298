"""verl's LLM client, which sends a request again that a replica rejected because it was leaving the rollout.

The load balancer may hand out a server in the instant in which that server decides to leave. The server then rejects
the request before its engine gets it (an "aborted" reply without tokens), and stock verl's synchronous client would
keep that as an empty sample. verl's asynchronous client asks again a second later; below it, this one asks at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

if TYPE_CHECKING:
    from verl.workers.rollout.replica import TokenOutput

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05
"""Seconds until a request is sent again: the balancer learns of the departure within one round trip."""
RETRIES = 200
"""Times a request is sent again; ten seconds of rejections is no race, and verl gets the aborted reply."""


class TLTLLMServerClient(LLMServerClient):
    """Sends rejected requests again; see `vLLMHttpServer._park_until_admitted` for where a rejection comes from."""

    async def generate(self, request_id: str, *, sampling_params: dict[str, object], **kwargs: object) -> TokenOutput:
        """As `LLMServerClient.generate`; a request that no engine got is sent again."""
        for attempt in range(RETRIES + 1):
            # The server pops keys from the dict it is given; each attempt needs its own.
            output = await super().generate(request_id, sampling_params=dict(sampling_params), **kwargs)
            if output.stop_reason != "aborted" or output.token_ids:
                return output
            if attempt < RETRIES:
                logger.debug("request %s rejected by a leaving replica, trying another", request_id)
                await asyncio.sleep(RETRY_PAUSE_S)
        logger.warning("request %s was rejected %d times in a row; the aborted reply stands", request_id, RETRIES + 1)
        return output


class TLTFullyAsyncLLMServerClient(FullyAsyncLLMServerClient, TLTLLMServerClient):
    """verl's client for partial rollouts, which resumes what a weight sync aborts, on top of ours."""
