"""A machine without an accelerator as a verl platform: for development, tests and the demo.

Active only when `VERL_PLATFORM=cpu` asks for it; nothing here is imported otherwise.
"""
