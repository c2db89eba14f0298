"""The base class of errors that a user can act on.

Their message is one sentence that names the key or the file: commands print it and exit, the flag prints it before Ray
starts.
"""

from __future__ import annotations


class TLTError(Exception):
    """Something the user can mend; the message says what and where."""


class DrafterError(TLTError, ValueError):
    """A drafter, a policy or a file does not fit; the message says which, what it holds and what is needed."""
