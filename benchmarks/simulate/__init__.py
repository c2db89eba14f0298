"""Replays of rollouts in which the seconds of a step are computed, not measured. Needs no verl, vLLM or Ray.

`engine.py` drives a speculation policy through a draining rollout, `hardware.py` says what a step costs,
`workload.py` what is generated and how well the drafter guesses, `oracles.py` what could have been achieved.
"""
