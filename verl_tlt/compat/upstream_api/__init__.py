"""Every symbol of verl and vLLM that verl-tlt touches, with the signature it relies on.

A release number says little about a function that begins with an underscore. So what is used is listed here, and a
test compares the list with our imports.
"""

from verl_tlt.compat.upstream_api.symbol import Symbol
from verl_tlt.compat.upstream_api.verl import VERL
from verl_tlt.compat.upstream_api.vllm import VLLM

SYMBOLS = (*VERL, *VLLM)
"""Everything outside the documented interfaces."""

__all__ = ["SYMBOLS", "Symbol"]
