"""A machine without an accelerator as a verl platform: for development, tests and the demo of verl-tlt.

Active only where `VERL_PLATFORM=cpu` is set; nothing here is imported otherwise. A distribution of its own, which
is not part of verl-tlt's wheel.
"""
