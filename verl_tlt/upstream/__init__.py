"""The releases of verl and vLLM that verl-tlt supports."""
