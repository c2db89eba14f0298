"""How many tokens to draft now: acceptance estimate, latency model and the policies that weigh them.

Pure: numpy only, no clock, no vLLM; the one thing that touches the disk is the table store.
"""
