"""Whether a policy has all that a drafter takes from it, tried before an engine starts or a response is drawn.

Drafter and policy are built on the meta device, which keeps no numbers; of the policy's weights only headers are read.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from verl_tlt.drafter.build import drafter_config, instantiate
from verl_tlt.drafter.capture import find_decoder
from verl_tlt.drafter.policy import (
    MTP,
    DrafterError,
    Model,
    NotHereError,
    first_line,
    folder,
    policy_shape,
    quiet,
    read_model_config,
)
from verl_tlt.drafter.tensor_file import INDEX, WEIGHTS, pickled
from verl_tlt.drafter.verifier import locate_parts


def rehearse(policy: Model, method: str = "eagle3", fetch: bool = True) -> bool:
    """Build what a run builds for a policy; returns whether its weights are here, or on the hub if `fetch`."""
    shape = policy_shape(policy)
    with quiet(), torch.device("meta"):
        try:
            if method == MTP:
                from verl_tlt.drafter.mtp import mtp_config

                instantiate(mtp_config(shape), "eager")
            else:
                instantiate(drafter_config(shape), "eager")
            if shape.model_type in CONFIG_MAPPING:  # verl alone may load others, by code of their own
                kind: Any = AutoModelForImageTextToText if shape.nested else AutoModelForCausalLM
                fields = read_model_config(policy)
                find_decoder(kind.from_config(CONFIG_MAPPING[fields["model_type"]](**fields)), shape.source)
        except DrafterError:
            raise
        except Exception as error:  # whatever transformers or torch raise for sizes that do not fit together
            raise DrafterError(f"{shape.source} describes no model that can be built: {first_line(error)}.") from error
    try:
        place = folder(policy, (WEIGHTS, INDEX), fetch=fetch)
        if not pickled(place) and not any((place / name).is_file() for name in (WEIGHTS, INDEX)):
            return False
        locate_parts(policy, fetch)
    except NotHereError:  # or of several files some
        return False
    return True
