"""A data file with one prompt, for recipes of which nothing is trained."""

from pathlib import Path

import pyarrow
from pyarrow import parquet


def one_row(path: Path) -> Path:
    parquet.write_table(pyarrow.table({"prompt": ["1 + 1 ="]}), path)
    return path
