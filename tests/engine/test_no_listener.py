"""What can be reached of an engine of ours from the network: what can be of stock vLLM's, and nothing else."""

import psutil
import pytest

pytestmark = pytest.mark.engine


def listening():
    """TCP and UDP addresses on which this process or one below it waits to be spoken to."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [c for process in family for c in process.net_connections(kind="inet")]
    return [c.laddr for c in found if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]


def test_an_engine_of_ours_listens_where_stock_vllm_does(engine_of):
    with engine_of(None) as engine:
        engine.generate(2, 8)
        stock = len(listening())
    with engine_of("good") as engine:
        engine.generate(2, 8)
        assert engine.core.tlt_call("stats", {})["num_steps"] > 0
        assert len(listening()) == stock


def test_the_test_sees_a_listener():
    import socket

    before = len(listening())
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening()) == before + 1
