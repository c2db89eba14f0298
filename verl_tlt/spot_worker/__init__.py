"""Runs in the spot workers: buffer, training, merge, scoring and export of the drafter."""
