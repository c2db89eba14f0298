"""From a policy to a drafter that `vllm serve` loads, without verl: a tiny one, in a few seconds on a CPU.

    python examples/train_drafter.py

It writes `tiny-policy` and `drafter` into the current directory. To train a drafter of your own policy, replace the
part that makes the tiny one by `policy = "..."`, a folder or a name on the hub, and `texts` by your own.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    build_drafter,
    load_policy,
    refresh_verifier_weights,
    save_drafter,
    train_until,
)

policy = "tiny-policy"
tiny = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
Qwen3ForCausalLM(tiny).save_pretrained(policy)
texts = [Text(tokens=tuple(torch.randint(64, (32,)).tolist()), prompt_len=8) for _ in range(16)]

drafter = build_drafter(policy)
refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(policy))  # again after each update of the policy
states = PolicyStates(load_policy(policy, "cpu"), drafter.target_layer_ids)
sequences = states(texts)  # tokens with the policy's hidden states

trainer = DrafterTrainer(drafter, learning_rate=1e-3, ttt_steps=3)
for epoch in range(3):
    summary = train_until(trainer, batches(sequences, budget=512), should_stop=lambda: False)
    print(f"epoch {epoch}: loss {summary.loss:.2f} over {summary.tokens} tokens")

scores = acceptance(drafter, sequences, max_draft=3)
print(f"accept length at K=3: {accept_length(scores):.2f}")
print(save_drafter(drafter, "drafter", {"policy": policy}, policy=policy))
