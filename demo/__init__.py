"""The demo: real GRPO through stock verl on this machine, watched while it runs, summed up when it is done."""
