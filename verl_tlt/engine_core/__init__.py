"""Runs in vLLM's EngineCore process: the scheduler that chooses a draft length for every step."""
