"""The drafter written out once more, slowly, the way vLLM runs it: one draft at a time, one token at a time.

Follows vLLM 0.28 `llama_eagle3.py` (layer, residuals, what is fed back) and `llm_base_proposer.py` (`propose`: the
shifted first pass over everything verified, then one token at a time, each position one further).
"""

import torch


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x, positions, theta):
    """RoPE on x [heads, n, d]."""
    d = x.shape[-1]
    frequency = theta ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = positions[:, None].float() * frequency  # [n, d/2]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def passes(model, batch, ttt_steps=3):
    """Drafter and policy logits of every pass, as the training loss receives them."""
    seen = []

    def note(logits, targets):
        seen.append((logits[0].detach(), targets[0].detach()))
        return logits.new_zeros(logits.shape[:2])

    with torch.no_grad():
        model(
            hidden_states=batch.hidden_states.float(),
            input_ids=batch.input_ids,
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            loss_mask=batch.loss_mask,
            verifier_last_hidden_states=batch.last_hidden.float(),
            ttt_steps=ttt_steps,
            loss_config={"note": (note, 1.0)},
        )
    return seen


class Reference:
    """Drafts from position t of one sequence with teacher-forced tokens."""

    def __init__(self, model):
        self.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        layer = model.config.transformer_layer_config
        self.heads, self.kv_heads, self.dim = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        self.norm_first, self.norm_output = model.config.norm_before_residual, model.config.norm_output
        self.eps, self.theta = layer.rms_norm_eps, layer.rope_parameters["rope_theta"]

    def __getitem__(self, name):
        return self.weights.get(f"layers.0.{name}.weight", self.weights.get(f"{name}.weight"))

    def run(self, ids, hidden, positions, cache):
        """The layer over n tokens behind `cache`; returns (normed for the head, what is fed back), both [n, H]."""
        n = len(ids)
        residual = hidden
        hidden = rms_norm(hidden, self["hidden_norm"], self.eps)
        residual = hidden if self.norm_first else residual
        embeds = rms_norm(self["embed_tokens"][ids], self["input_layernorm"], self.eps)
        x = torch.cat([embeds, hidden], -1)  # [n, 2H]
        q, k, v = (
            (x @ self[f"self_attn.{name}_proj"].T).view(n, heads, self.dim).transpose(0, 1)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        cache.append((k, v))
        k, v = (
            torch.cat(part, 1).repeat_interleave(self.heads // self.kv_heads, 0) for part in zip(*cache, strict=True)
        )
        score = q @ k.transpose(1, 2) / self.dim**0.5  # [heads, n, m]
        m = k.shape[1]
        future = torch.arange(m)[None] > torch.arange(m - n, m)[:, None]
        out = score.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = residual + out.transpose(0, 1).reshape(n, -1) @ self["self_attn.o_proj"].T
        y = rms_norm(x, self["post_attention_layernorm"], self.eps)
        gate = torch.nn.functional.silu(y @ self["mlp.gate_proj"].T) * (y @ self["mlp.up_proj"].T)
        x = x + gate @ self["mlp.down_proj"].T
        normed = rms_norm(x, self["norm"], self.eps)
        return normed, normed if self.norm_output else x

    def combined(self, aux):
        """What the head reads of the policy's three states, [n, 3H] to [n, H] (`combine_hidden_states`)."""
        if (norm := self["input_norm"]) is not None:
            aux = rms_norm(aux, norm, self.eps)
        if self["fc_norm.0"] is not None:
            aux = torch.cat([rms_norm(x, self[f"fc_norm.{i}"], self.eps) for i, x in enumerate(aux.chunk(3, -1))], -1)
        return aux @ self["fc"].T

    def draft(self, sequence, t, length):
        """Logits [length, DV] of the draft that starts once token t+1 is known."""
        tokens, cache, logits = sequence.tokens, [], []
        hidden = self.combined(sequence.aux[: t + 1].float())
        out, back = self.run(tokens[1 : t + 2], hidden, torch.arange(t + 1), cache)
        logits.append(out[-1] @ self["lm_head"].T)
        for k in range(1, length):
            out, back = self.run(tokens[t + k + 1 : t + k + 2], back[-1:], torch.tensor([t + k]), cache)
            logits.append(out[-1] @ self["lm_head"].T)
        return torch.stack(logits)

    def policy(self, sequence, t):
        """The policy's logits [DV] for the token after t."""
        last = sequence.last[t].float()
        return rms_norm(last, self.weights["verifier_norm.weight"], self.eps) @ self["verifier_lm_head"].T
