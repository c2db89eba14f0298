"""A weight sync that reloads a policy layer by layer with vLLM's functions, as verl's open pull request 7987 does.

An EAGLE-3 drafter may share the policy's embedding and LM head, and must see the new ones without a reload of its own.
"""

import pytest
import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


@pytest.mark.parametrize("syncs", [1, 3])
def test_a_drafter_that_shares_the_policys_tensors_sees_what_is_reloaded(syncs):
    policy = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    policy.requires_grad_(False)
    record_metadata_for_reloading(policy)
    module, tensor = policy["head"], policy["embed"].weight  # it shares a module, or holds the tensor itself
    for sync in range(syncs):
        new = {name: torch.full_like(value, 1.0 + sync) for name, value in policy.state_dict().items()}
        initialize_layerwise_reload(policy)
        for name, parameter in list(policy.named_parameters()):
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, new[name])
        finalize_layerwise_reload(policy, None)
        assert policy["head"] is module and torch.equal(module.weight, new["head.weight"])
        assert policy["embed"].weight is tensor and torch.equal(tensor, new["embed.weight"])
