"""A rollout server of ours without verl's own part, which would need Ray and a whole config, and an engine for it."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterStatus
from verl_tlt.server.server import TLTvLLMHttpServer


class Engine:
    """vLLM's client without requests. `answers`: of workers and scheduler by name; values, errors or functions."""

    def __init__(self, **answers):
        self.answers, self.asked, self.engine_core, self.errored = answers, [], self, False
        self.output_processor = SimpleNamespace(request_states={})

    async def call_utility_async(self, method, operation, arguments):
        assert method == "tlt_call"
        if operation not in self.answers:
            raise Exception(f"Call to tlt_call method failed: {operation!r}")  # as vLLM raises what the engine said
        return await self._answer(operation, arguments)

    async def collective_rpc(self, method, args):
        return await self._answer(method, *args)

    async def _answer(self, name, *arguments):
        self.asked.append((name, *arguments))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        answer = answer(*arguments) if callable(answer) else answer
        return await answer if asyncio.iscoroutine(answer) else answer

    def told(self):
        """What the scheduler was told."""
        return [asked[1] for asked in self.asked if asked[0] == "control"]


def make_server(engine=None, settings=None, **attributes):
    server = object.__new__(TLTvLLMHttpServer)
    server.tlt, server.engine = TLTConfig.from_dict(settings or {}), engine or Engine()
    server.node_rank = server.replica_rank = server._admitting = 0
    server._resume_event, server._tlt_moves, server._tlt_file = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
    server._tlt_staged, server._tlt_served = None, DrafterStatus()
    server._tlt_asked, server._tlt_writes = 0, threading.Lock()
    server._tlt_dir, server._tlt_drafting_disabled = Path("nowhere"), False
    vars(server).update(attributes)
    return server
