"""PURE. How many tokens to draft now: acceptance estimate, latency model and the policies that weigh them."""
