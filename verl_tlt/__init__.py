"""TLT for stock verl: adaptive speculative decoding in rollout, drafter training in idle time.

Importing this package loads nothing but the standard library, because verl imports it (through the
`verl.plugins` entry point) in every process while verl itself is half imported.
"""

__version__ = "0.2.0"

MODE_PREFIX = "tlt_"
"""`trainer.v1.trainer_mode` of a TLT run is this before verl's own mode: a name that only this package registers."""

LONGEST_DRAFT = 16
"""Most tokens of a draft that anything can be set to; a drafter needs as many positions beyond the policy's own."""
