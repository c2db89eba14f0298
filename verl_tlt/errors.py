"""The base class of errors that a user can act on.

Their message is one sentence that names the key or the file: commands print it and exit, the flag prints it before Ray
starts.
"""

from typing import Any


def printable(text: str) -> str:
    """The text for a terminal, a log or a page: characters that are not printed, as a terminal's codes, are escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def needs(error: ModuleNotFoundError) -> str:
    """What to install where a package is missing that verl-tlt or verl depends on, as after `pip install --no-deps`."""
    name = (error.name or "").partition(".")[0]
    return f"{name} is not installed here, and verl-tlt or verl needs it: pip install {name}."


def wrong_field(error: Any) -> tuple[str, str]:
    """(dotted name of the first field that pydantic refuses, what is wrong with it as the end of a sentence)."""
    first = error.errors()[0]
    plain = {"missing": "must be set", "none_required": "must not be set", "model_type": "must be an object"}
    wrong = plain.get(first["type"]) or first["msg"].replace("Input should", "must").replace("valid tuple", "list")
    value = repr(first["input"])
    return ".".join(map(str, first["loc"])), f"{wrong}, not {value[:80]}{'…' if len(value) > 80 else ''}."


class TLTError(Exception):
    """Something the user can mend; the message says what and where, and quotes whatever it names."""


class DrafterError(TLTError, ValueError):
    """A drafter, a policy or a file does not fit; the message says which, what it holds and what is needed."""
