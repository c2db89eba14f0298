"""A tiny random policy and what it computes, captured as the tap does."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl_tlt.drafter import TrainingSequence, VerifierWeights, aux_layers_for, build_drafter, refresh_verifier_weights

VOCAB = 48
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
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


def observe(policy, tokens, prompt_len, layers=None):
    """The tokens [L] with the policy's hidden states, captured by hooks as the tap does."""
    layers = layers or aux_layers_for(policy.config.num_hidden_layers)
    seen = {}

    def keep(name):
        def hook(_module, args, kwargs):
            seen[name] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    hooks = [policy.model.layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in layers]
    hooks.append(policy.model.norm.register_forward_pre_hook(keep("last"), with_kwargs=True))
    policy(tokens[None])
    for hook in hooks:
        hook.remove()
    return TrainingSequence(tokens, prompt_len, torch.cat([seen[i] for i in layers], dim=-1), seen["last"])


def verifier_weights(policy):
    return VerifierWeights(policy.model.embed_tokens.weight, policy.lm_head.weight, policy.model.norm.weight)


def drafter_of(policy, **arguments):
    """A new drafter with the policy's embedding, head and norm."""
    model = build_drafter(policy.config, **arguments)
    refresh_verifier_weights(model, verifier_weights(policy))
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
