"""`verl-tlt advise` and `verl-tlt simulate`: what TLT would bring to a recipe, in numbers, before and after a run."""
