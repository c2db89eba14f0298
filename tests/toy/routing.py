"""A router that sends the same requests to the same replicas in every run, so that two runs can be compared.

verl's own picks at random among the replicas with the fewest requests, and which long responses meet on one replica
decides how long a rollout takes: two stock runs of the same tokens differ by more than what is to be measured. This
one goes by a number that the agent loop puts into the request's id (`tests.toy.agent`): every replica gets as many
responses as under verl's, only always the same ones. Used by
`actor_rollout_ref.rollout.router_config_path=<router.yaml>`.
"""

from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


class ByNumber(GlobalRequestLoadBalancer):
    """verl's balancer, where request n belongs to replica n modulo their count; to any while that one is away.

    Args:
        servers: server id → handle, replica by replica.
        config: the router's file, which has no more settings.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(servers=servers)
        self._replicas = list(servers)

    def add_servers(self, servers: dict[str, Any]) -> None:
        """As verl's; a replica that comes back keeps its place."""
        super().add_servers(servers)
        self._replicas += [server for server in servers if server not in self._replicas]

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """As verl's, but for an id that `tests.toy.agent` made."""
        number, _, rest = request_id.partition("-")
        if rest and number.isdigit():
            server = self._replicas[int(number) % len(self._replicas)]
            if server in self._servers:
                self._inflight_requests[server] += 1
                return server, self._servers[server]
        return super().acquire_server(request_id)
