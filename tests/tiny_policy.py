"""A tiny random policy, what it computes for a text, and a drafter for it; and what torch does meanwhile."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl_tlt.drafter.build import build_drafter
from verl_tlt.drafter.capture import PolicyStates, Text
from verl_tlt.drafter.policy import aux_layers_for
from verl_tlt.drafter.verifier import VerifierWeights, refresh_verifier_weights

VOCAB = 48
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}


def make_policy(family="qwen3", seed=0, **changes):
    config, model, extra = FAMILIES[family]
    torch.manual_seed(seed)
    policy = model(config(**{**SHAPE, **extra, **changes})).eval().requires_grad_(False)
    with torch.no_grad():  # sharper than at initialisation, and a final norm that is not all ones
        policy.lm_head.weight.mul_(20)
        policy.model.norm.weight.uniform_(0.5, 1.5)
    return policy


def random_texts(*sizes, seed=1):
    """(token ids [L], prompt length) for each (L, prompt length)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, VOCAB, (length,), generator=generator), prompt) for length, prompt in sizes]


def observe(policy, texts, layers=None):
    """The sequences of such texts, with the policy's hidden states."""
    states = PolicyStates(policy, layers or aux_layers_for(policy.config.num_hidden_layers))
    return states([Text(tuple(tokens.tolist()), prompt) for tokens, prompt in texts])


def verifier_weights(policy):
    return VerifierWeights(policy.model.embed_tokens.weight, policy.lm_head.weight, policy.model.norm.weight)


def drafter_of(policy, *, larger=1, **arguments):
    """A new drafter with the policy's embedding, head and norm; its own matrices `larger` times as large."""
    model = build_drafter(policy.config, **arguments)
    refresh_verifier_weights(model, verifier_weights(policy))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim == 2:
                parameter.mul_(larger)
    return model


def same_state(one, two):
    """Whether two `DrafterTrainer.state()` are equal to the bit, but for the last step's rate, which each step sets."""
    groups = [[{**group, "lr": 0.0} for group in state["optimizer"]["param_groups"]] for state in (one, two)]
    moments = [state["optimizer"]["state"] for state in (one, two)]
    return (
        groups[0] == groups[1]
        and all(torch.equal(value, two["parameters"][name]) for name, value in one["parameters"].items())
        and moments[0].keys() == moments[1].keys()
        and all(torch.equal(value, moments[1][i][key]) for i in moments[0] for key, value in moments[0][i].items())
    )


class Watched(TorchDispatchMode):
    """Calls `note` with the name, the arguments and the tensor that comes out of every operation with one."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            self.note(func.__name__.split(".")[0], args, tensor)
        return result
