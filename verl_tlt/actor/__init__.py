"""Runs in verl's actor workers: captures hidden states, and copies the weights that the drafter shares."""
