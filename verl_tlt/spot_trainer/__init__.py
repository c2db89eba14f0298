"""The spot trainer: one process per run that trains the drafter on GPUs that are idle for the moment."""
