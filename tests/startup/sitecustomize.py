"""Python imports this in every process whose PYTHONPATH names this folder: the tests' own and those they start.

A test starts processes that import for seconds each. Looking for garbage after every 700 new objects, as Python does,
takes a fifth of that; the CPU platform does the same (verl_tlt/compat/cpu/entry.py) from where verl is imported.
"""

import gc

gc.set_threshold(50_000, 20, 20)
