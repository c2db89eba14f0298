"""Which layers of the policy feed the drafter.

An id i means the residual stream *before* layer i, the layer's input: 0 is the embeddings. vLLM collects it there
(`EagleModelMixin._maybe_add_hidden_state`), ascending; `hidden_states[i]` of transformers is the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_tlt.drafter.errors import DrafterError

NUM_AUX = 3
"""Hidden states of the policy the drafter sees at each position (EAGLE-3 section 3: low, middle, high)."""


def aux_layers_for(num_layers: int) -> tuple[int, int, int]:
    """The default aux layers of a policy with `num_layers` layers.

    vLLM's own default where its three ids are distinct; shallower policies get them spread out, because vLLM keeps ids
    in a set and equal ones would collapse.

    Raises:
        DrafterError: fewer than three layers.
    """
    if num_layers < NUM_AUX:
        raise DrafterError(f"The policy has {num_layers} layers; a drafter needs at least {NUM_AUX} to read from.")
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return (0, 1, 2) if num_layers == 3 else (1, num_layers // 2, num_layers - 1)


def check_aux_layers(layers: Sequence[int], num_layers: int, where: str) -> None:
    """Return when vLLM would hand over these layers, in this order.

    Raises:
        DrafterError: another number than three, an order that is not ascending, or layers the policy does not have;
            the message begins with `where`.
    """
    if len(layers) != NUM_AUX or list(layers) != sorted(set(layers)):
        raise DrafterError(f"{where} must be {NUM_AUX} ascending distinct layers, not {list(layers)}.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise DrafterError(f"{where}={list(layers)} is outside 0..{num_layers - 1}, the layers of the policy.")
