"""The one exception a user of the drafter sees: a sentence that names the file and the field."""

from __future__ import annotations


class DrafterError(ValueError):
    """A drafter, a policy or a file does not fit; the message says which, what it holds and what is needed."""
