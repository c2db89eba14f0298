import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

from verl_tlt.channel import ChannelClient, ChannelError, ChannelServer


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/private/engine.sock"


@pytest.fixture
def serve(address):
    servers = []

    def start(**handlers):
        servers.append(ChannelServer(address, handlers))
        return ChannelClient(address)

    yield start
    for server in servers:
        server.close()


async def test_an_operation_gets_its_arguments_and_the_caller_its_answer(serve):
    client = serve(add=lambda a, b: {"sum": a + b})
    assert await client.call("add", a=2, b=3) == {"sum": 5}
    assert await client.call("add", a=20, b=30) == {"sum": 50}
    client.close()


async def test_concurrent_calls_wait_for_their_turn(serve):
    client = serve(echo=lambda i: {"i": i})
    replies = await asyncio.gather(*(client.call("echo", i=i) for i in range(20)))
    assert [r["i"] for r in replies] == list(range(20))
    client.close()


async def test_a_failing_operation_is_an_error_with_its_reason_and_the_next_one_works(serve):
    def refuse():
        raise ValueError("no table for K=9")

    client = serve(refuse=refuse, ping=lambda: {"ok": True})
    with pytest.raises(ChannelError, match=r"refuse.*no table for K=9"):
        await client.call("refuse")
    with pytest.raises(ChannelError, match="unknown operation 'reboot'; known: ping, refuse"):
        await client.call("reboot")
    with pytest.raises(ChannelError, match="unexpected keyword"):
        await client.call("ping", volume=11)
    assert await client.call("ping") == {"ok": True}
    client.close()


async def test_a_late_answer_is_a_timeout_and_not_the_answer_to_the_next_question(serve):
    release = threading.Event()

    def slow(name):
        release.wait(5)
        return {"name": name}

    client = serve(slow=slow, ping=lambda: {"ok": True})
    with pytest.raises(ChannelError, match=r"did not answer 'slow' within 0\.1 s"):
        await client.call("slow", timeout_s=0.1, name="first")
    release.set()
    assert await client.call("ping") == {"ok": True}
    client.close()


async def test_a_cancelled_question_leaves_the_channel_usable(serve):
    release = threading.Event()
    client = serve(slow=lambda: {"late": release.wait(5)}, ping=lambda: {"ok": True})
    question = asyncio.create_task(client.call("slow"))
    await asyncio.sleep(0.05)
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    release.set()
    assert await client.call("ping") == {"ok": True}
    client.close()


async def test_a_question_waits_for_an_engine_that_is_still_starting(address):
    client = ChannelClient(address)
    question = asyncio.create_task(client.call("ping"))
    await asyncio.sleep(0.1)
    server = ChannelServer(address, {"ping": lambda: {"ok": True}})
    assert await question == {"ok": True}
    client.close()
    server.close()


async def test_an_engine_in_another_process_answers(address):
    ready = multiprocessing.get_context("spawn").Event()
    child = multiprocessing.get_context("spawn").Process(target=_serve_pid, args=(address, ready))
    child.start()
    client = ChannelClient(address)
    assert (await client.call("pid", timeout_s=20))["pid"] != os.getpid()
    client.close()
    child.terminate()
    child.join()


async def test_a_closed_client_asks_nothing(serve):
    client = serve(ping=lambda: {"ok": True})
    client.close()
    with pytest.raises(ChannelError, match="closed: 'ping' cannot be asked"):
        await client.call("ping")


ABANDONED = """
import asyncio, gc, sys
from verl_tlt.channel import ChannelClient, ChannelServer
async def ask():
    client = ChannelClient(sys.argv[1])
    client.itself = client
    return await client.call("ping")
server = ChannelServer(sys.argv[1], {"ping": lambda: {"ok": True}})
print(asyncio.run(ask()))
gc.collect()
server.close()
"""


def test_a_client_that_nobody_closed_is_collected_like_any_object(address):
    """A context that waits for its sockets' end would have the process wait for ever."""
    done = subprocess.run([sys.executable, "-c", ABANDONED, address], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "{'ok': True}\n"), done.stderr


def _serve_pid(address, ready):
    server = ChannelServer(address, {"pid": lambda: {"pid": os.getpid()}})
    ready.wait(30)
    server.close()


def test_the_socket_lives_in_a_directory_nobody_else_can_enter(address, tmp_path):
    server = ChannelServer(address, {})
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    server.close()
    (tmp_path / "private").chmod(0o755)
    with pytest.raises(ChannelError, match="private is open to other users; chmod 700"):
        ChannelServer(address, {})


@pytest.mark.parametrize(
    ("address", "sentence"),
    [("tcp://0.0.0.0:5", "needs an address ipc:///absolute/path"), ("ipc:///" + "x" * 120, "longer than 107 bytes")],
)
def test_an_address_that_cannot_be_is_refused(address, sentence):
    with pytest.raises(ChannelError, match=sentence):
        ChannelClient(address)
    with pytest.raises(ChannelError, match=sentence):
        ChannelServer(address, {})


def test_close_ends_the_thread(address):
    before = threading.active_count()
    server = ChannelServer(address, {})
    assert threading.active_count() == before + 1
    server.close()
    assert threading.active_count() == before
