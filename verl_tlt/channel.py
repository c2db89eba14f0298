"""The control channel: calls from verl's server actor into vLLM's scheduler.

vLLM runs its scheduler in a child process (EngineCore) and offers no call into it: `collective_rpc` reaches workers
only. So the scheduler opens a ZeroMQ reply socket on a private Unix socket and answers from a daemon thread; the server
actor asks from its event loop. Requests and replies are JSON; a failed operation is answered with `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from verl_tlt.errors import TLTError
from verl_tlt.ownership import NotPrivateError, check_private

logger = logging.getLogger(__name__)

Handler = Callable[..., dict[str, Any]]
MAX_IPC_PATH = 107  # bytes of a Unix socket path on Linux (sun_path, less its terminating zero)


class ChannelError(TLTError, RuntimeError):
    """The engine refused an operation or did not answer; the message says which and why."""


class ChannelServer:
    """Answers operations from a daemon thread until closed.

    Args:
        address: `ipc://PATH`; the directory of PATH is created (0700), or must be private already.
        handlers: operation name → function of the request's other keys, returning what JSON can carry. They run on the
            channel's thread and must not block: the caller waits with a timeout.

    Raises:
        ChannelError: the address is no `ipc://` path, or it cannot be listened on.
    """

    def __init__(self, address: str, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)
        path = _ipc_path(address)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            check_private(path.parent)
        except NotPrivateError as error:
            raise ChannelError(f"The control channel's directory {error}") from error
        self._context = zmq.Context(io_threads=1)
        socket = self._context.socket(zmq.REP)
        socket.linger = 0
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise ChannelError(f"The control channel cannot listen on {address}: {error}") from error
        self._thread = threading.Thread(target=self._serve, args=(socket,), name="tlt-channel", daemon=True)
        self._thread.start()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while True:
                socket.send(self._answer(socket.recv()))
        except zmq.ContextTerminated:  # close() was called
            socket.close()

    def _answer(self, message: bytes) -> bytes:
        try:
            request = json.loads(message)
            operation = request.pop("op")
            handler = self.handlers.get(operation)
            if handler is None:
                raise ValueError(f"unknown operation {operation!r}; known: {', '.join(sorted(self.handlers))}")
            reply = json.dumps(handler(**request))
        except Exception as error:
            logger.warning("control channel: %s", error, exc_info=error)
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        return reply.encode()

    def close(self) -> None:
        """Stop answering; returns once the thread has ended."""
        self._context.term()
        self._thread.join()


class ChannelClient:
    """Calls a `ChannelServer` in another process, one operation at a time.

    Args:
        address: the server's `ipc://PATH`; the server may come up later, a call waits for it.
    """

    def __init__(self, address: str) -> None:
        _ipc_path(address)
        self.address = address
        # The process's own context. If a client that nobody closed is collected as garbage, a context of the client's
        # would wait forever for its socket, which is garbage too.
        self._context = zmq.asyncio.Context.instance()
        self._socket: zmq.asyncio.Socket | None = None
        self._closed = False
        self._turn = asyncio.Lock()

    async def call(self, op: str, *, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        """The reply to one operation.

        Raises:
            ChannelError: no answer within `timeout_s` seconds, or the operation failed in the engine.
        """
        message = json.dumps({"op": op, **arguments}).encode()
        async with self._turn:
            if self._closed:
                raise ChannelError(f"The control channel is closed: {op!r} cannot be asked.")
            if self._socket is None:
                self._socket = self._context.socket(zmq.REQ)
                self._socket.linger = 0
                self._socket.connect(self.address)
            try:
                reply = json.loads(await asyncio.wait_for(self._exchange(self._socket, message), timeout_s))
            except TimeoutError as error:
                self._drop_socket()
                raise ChannelError(f"The engine did not answer {op!r} within {timeout_s:g} s.") from error
            except BaseException:  # cancelled between question and answer: the socket cannot ask again
                self._drop_socket()
                raise
        if "error" in reply:
            raise ChannelError(f"The engine refused {op!r}: {reply['error']}")
        return dict(reply)

    @staticmethod
    async def _exchange(socket: zmq.asyncio.Socket, message: bytes) -> bytes:
        await socket.send(message)
        return bytes(await socket.recv())

    def _drop_socket(self) -> None:
        """A REQ socket whose reply never came cannot send again; the next call opens a fresh one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Release the socket; later calls fail."""
        self._drop_socket()
        self._closed = True


def _ipc_path(address: str) -> Path:
    scheme, _, path = address.partition("://")
    if scheme != "ipc" or not path.startswith("/"):
        raise ChannelError(f"The control channel needs an address ipc:///absolute/path, not {address!r}.")
    if len(path.encode()) > MAX_IPC_PATH:
        raise ChannelError(f"The control channel's socket path is longer than {MAX_IPC_PATH} bytes: {path}")
    return Path(path)
