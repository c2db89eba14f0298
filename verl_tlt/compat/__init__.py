"""What verl-tlt relies on in verl and vLLM, by release, and what a machine without an accelerator needs."""
