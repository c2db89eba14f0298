"""The base class of errors that a user can act on.

Their message is one sentence that names the key or the file: commands print it and exit, the flag prints it before Ray
starts.
"""

from __future__ import annotations

import importlib.util


class TLTError(Exception):
    """Something the user can mend; the message says what and where."""


class DrafterError(TLTError, ValueError):
    """A drafter, a policy or a file does not fit; the message says which, what it holds and what is needed."""


def require(package: str, extra: str, what: str) -> None:
    """Refuse where an optional package is missing, before the import that would fail.

    Args:
        package: as it is imported.
        extra: verl-tlt's extra that brings it.
        what: needs it; the sentence's subject.

    Raises:
        TLTError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise TLTError(f"{what} needs {package}, which is not installed: pip install 'verl-tlt[{extra}]'.")
