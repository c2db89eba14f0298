"""A machine without an accelerator as a verl platform: for development, tests and the demo of verl-tlt.

Active only where `VERL_PLATFORM=cpu` is set; nothing here is imported otherwise. A distribution of its own, which
uses verl-tlt's import hooks and is not part of its wheel.
"""
