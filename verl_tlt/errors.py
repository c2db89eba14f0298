"""What every error that a user can act on has in common.

One sentence that names the key or the file: commands print it and exit, the flag prints it before Ray starts.
"""


class TLTError(Exception):
    """Something the user can mend; the message says what and where."""
