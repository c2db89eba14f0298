"""Runs in vLLM's worker processes: loads drafters in place, skips and contains their pass."""
