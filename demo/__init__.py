"""The demo: GRPO with verl-tlt on a toy task, on this machine's CPU."""
