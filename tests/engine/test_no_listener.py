"""What can be reached of an engine of ours from the network: what can be of stock vLLM's, and nothing else."""

import asyncio
import os
import stat
from pathlib import Path

import psutil
import pytest

from verl_tlt.channel import ChannelClient

pytestmark = pytest.mark.engine


def listening():
    """TCP and UDP addresses on which this process or one below it waits to be spoken to."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [c for process in family for c in process.net_connections(kind="inet")]
    return [c.laddr for c in found if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]


def test_an_engine_of_ours_listens_where_stock_vllm_does_and_on_a_private_socket(engine_of, tmp_path, monkeypatch):
    with engine_of(None) as engine:
        engine.generate(2, 8)
        stock = len(listening())
    path = tmp_path / "c" / "s.sock"
    monkeypatch.setenv("TLT_CHANNEL", f"ipc://{path}")
    with engine_of("good") as engine:
        engine.generate(2, 8)
        client = ChannelClient(f"ipc://{path}")
        assert asyncio.run(client.call("stats"))["num_steps"] > 0
        client.close()
        assert len(listening()) == stock
    assert stat.S_ISSOCK(os.stat(path).st_mode) and Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_the_test_sees_a_listener():
    import socket

    before = len(listening())
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening()) == before + 1
