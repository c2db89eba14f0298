"""Python imports this in every process whose PYTHONPATH names this folder: the tests' own and those they start.

A test starts processes that import for seconds each. Ray's and multiprocessing's become forks of one that has imported
already (`fork_server`). Looking for garbage after every 700 new objects, as Python does, takes a fifth of the rest; the
CPU platform does the same (verl_cpu/entry.py) from where verl is imported.
"""

import gc
import runpy
import sys
from pathlib import Path

import fork_server

gc.set_threshold(50_000, 20, 20)
fork_server.hand_over()
# Python looks for one; that of a run with faults (benchmarks/faults/inject) is another.
others = (Path(folder) / "sitecustomize.py" for folder in sys.path if folder and Path(folder) != Path(__file__).parent)
if (other := next((file for file in others if file.exists()), None)) is not None:
    runpy.run_path(str(other))
