"""Runs in commands: a drafter before the run, from the policy's own responses."""
