"""Runs in the rollout server process (the client: in agent loop workers): verl's vLLM server, with a drafter."""
