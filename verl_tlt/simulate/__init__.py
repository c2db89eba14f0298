"""An RL run on a computed clock: replicas, requests, costs, a learning drafter, and our own control code."""
