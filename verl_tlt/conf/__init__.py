"""Hydra config groups of verl-tlt, found through `hydra_plugins/verl_tlt_search.py`."""
