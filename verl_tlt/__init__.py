"""TLT for stock verl: adaptive speculative decoding in rollout, drafter training in idle time.

Importing this package loads nothing but the standard library, because verl imports it (through the
`verl.plugins` entry point) in every process while verl itself is half imported.
"""

__version__ = "0.1.0"
