"""The same request goes to the same replica in every run, and to another only while that one is away."""

from demo.toy.agent import numbered
from demo.toy.routing import ByNumber


def route(router, number):
    return router.acquire_server(numbered(number))[0]


def test_requests_go_by_their_number_whatever_else_runs():
    router = ByNumber({"b:1": "first", "a:2": "second"}, {})
    for _ in range(3):
        assert [route(router, n) for n in range(5)] == ["b:1", "a:2", "b:1", "a:2", "b:1"]
    assert router.get_status()["servers"] == {"b:1": 9, "a:2": 6}


def test_a_replica_that_left_is_replaced_and_gets_its_requests_when_it_is_back():
    router = ByNumber({"b:1": "first", "a:2": "second"}, {})
    router.remove_servers(["b:1"])
    assert {route(router, n) for n in range(4)} == {"a:2"}
    router.add_servers({"b:1": "first"})
    assert [route(router, n) for n in range(4)] == ["b:1", "a:2", "b:1", "a:2"]


def test_an_id_without_a_number_is_routed_as_by_verl():
    router = ByNumber({"b:1": "first", "a:2": "second"}, {})
    assert [router.acquire_server(name)[0] for name in ("9a-b", "x", "x")][1:] in (["b:1"] * 2, ["a:2"] * 2)
    assert sum(router.get_status()["servers"].values()) == 3
