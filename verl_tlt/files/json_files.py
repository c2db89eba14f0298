"""JSON objects in files, with one sentence for a file that holds none."""

import json
from pathlib import Path
from typing import Any

from verl_tlt.errors import TLTError


class JSONFileError(TLTError, ValueError):
    """A file that does not hold what is looked for; the message is a sentence that names it."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a `JSONFileError` where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise JSONFileError(f"{path} does not exist.") from None
    except OSError as error:
        raise JSONFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise JSONFileError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise JSONFileError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
