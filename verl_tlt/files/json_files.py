"""JSON objects in files, with one sentence for a file that holds none."""

import json
from pathlib import Path
from typing import Any

from verl_tlt.errors import DrafterError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a `DrafterError` where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DrafterError(f"{path} does not exist.") from None
    except OSError as error:
        raise DrafterError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DrafterError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
