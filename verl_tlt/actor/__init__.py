"""Runs in verl's actor workers: taps hidden states, captures the policy's verifier weights."""
