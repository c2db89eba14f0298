"""The one exception of the control room: a setting or a value that cannot be right."""


class ControlError(ValueError):
    """A policy name, an arm, a threshold or a table is wrong; the message is one sentence that names it."""
