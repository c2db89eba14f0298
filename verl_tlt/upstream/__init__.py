"""What verl-tlt relies on in verl and vLLM, and what it changes there."""
