"""Runs in vLLM's worker processes: loads drafters in place, skips their pass, captures graphs."""
