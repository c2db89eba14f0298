"""A drafter reaches every server on every node: two Ray nodes, each with a temporary directory of its own."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded import ENVIRONMENT, end_ray

from verl_tlt.drafter.checkpoint import stage
from verl_tlt.files.disk import make_private_dir
from verl_tlt.messages.rollout import DrafterFile

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

ray = pytest.importorskip("ray")

FIRST = DrafterFile(0, '{"version": 0}', b"first" * 1000)
NODES = ("one", "two")


class NodeServer:
    """A rollout server as far as publication goes: what it starts with, and where it stages."""

    def __init__(self, store):
        self.folder = make_private_dir("verl-tlt-")
        self.tlt_stage(ray.get(store.latest.remote(), timeout=60))

    def tlt_stage(self, drafter):
        stage(drafter.config, drafter.weights, self.folder / "drafter")
        self.drafter = drafter

    def staged(self):
        """(node, folder, permissions, version, config and weights as they are on disk)."""
        weights = self.folder / "drafter" / "model.safetensors"
        config = (self.folder / "drafter" / "config.json").read_text()
        node = ray.get_runtime_context().get_node_id()
        return (
            node,
            str(self.folder),
            weights.stat().st_mode & 0o777,
            self.drafter.version,
            config,
            weights.read_bytes(),
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(make a server on a node, their store); each node's servers find another temporary directory."""
    from ray.cluster_utils import Cluster

    from verl_tlt.trainer.servers import DrafterStore

    folders = {name: tmp_path_factory.mktemp(f"node-{name}") for name in NODES}
    with pytest.MonkeyPatch.context() as patch:
        end_ray()
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes = Cluster()
        for name in NODES:
            nodes.add_node(num_cpus=4, resources={name: 8}, object_store_memory=100_000_000, include_dashboard=False)
        try:
            ray.init(address=nodes.address, log_to_driver=False)
            store = ray.remote(DrafterStore).options(num_cpus=0).remote(FIRST)

            def serve(node):
                environment = {"env_vars": {"TMPDIR": str(folders[node])}}
                options = {"num_cpus": 0, "resources": {node: 1}, "runtime_env": environment}
                return ray.remote(NodeServer).options(**options).remote(store)

            yield serve, store, folders
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster):
    """Three replicas: one on each node, and one that spans both."""
    from verl_tlt.trainer.servers import Servers

    serve, store, _ = cluster
    servers = {"a": [serve("one")], "b": [serve("two")], "wide": [serve("one"), serve("two")]}
    replicas = [
        SimpleNamespace(_server_address=name, _server_handle=some[0], servers=some) for name, some in servers.items()
    ]
    manager = SimpleNamespace(get_replicas=lambda: replicas, global_load_balancer=None)
    return Servers(manager, None, 3, store)


def everywhere(fleet):
    return ray.get([s.staged.remote() for r in fleet.replicas.values() for s in r.servers], timeout=120)


def test_every_server_on_every_node_stages_what_is_published(fleet, cluster):
    _, _, folders = cluster
    assert {(version, weights) for *_, version, _, weights in everywhere(fleet)} == {(0, FIRST.weights)}
    published = DrafterFile(7, '{"version": 7}', os.urandom(3_000_000))
    fleet.stage(published)
    found = everywhere(fleet)
    assert [row[2:] for row in found] == [(0o600, 7, published.config, published.weights)] * 4
    assert len({folder for _, folder, *_ in found}) == 4, "two servers share a folder"
    by_node = {}
    for node, folder, *_ in found:
        by_node.setdefault(node, set()).add(Path(folder).parent)
    assert len(by_node) == 2 and sorted(map(list, by_node.values())) == sorted([p] for p in folders.values())


def test_a_server_that_starts_later_finds_what_was_published_last(fleet, cluster):
    serve, _, _ = cluster
    fleet.stage(DrafterFile(8, '{"version": 8}', b"late" * 1000))
    *_, version, config, weights = ray.get(serve("two").staged.remote(), timeout=120)
    assert (version, config, weights) == (8, '{"version": 8}', b"late" * 1000)
