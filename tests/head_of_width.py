"""Makes an EAGLE-3 head that is narrower or wider than its policy, in speculators' layout, as others publish it."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl_tlt.drafter import build_drafter, policy_shape, serving_tensors


def write_head(folder: Path, policy: Path, width: int, draft_ids: torch.Tensor | None = None) -> Path:
    """An untrained head, `width` wide, that drafts these tokens; embedding and output head, its own, are random."""
    shape, draws = policy_shape(policy), torch.Generator().manual_seed(0)
    model = build_drafter(replace(shape, hidden_size=width), seed=0, draft_ids=draft_ids)
    reads = 3 * shape.hidden_size
    tensors = serving_tensors(model) | {
        "fc.weight": torch.randn(width, reads, generator=draws) / reads**0.5,
        "embed_tokens.weight": torch.randn(shape.vocab_size, width, generator=draws),
        "lm_head.weight": torch.randn(model.draft_vocab_size, width, generator=draws),
    }
    folder.mkdir()
    config = json.loads(model.config.to_json_string()) | {"target_hidden_size": shape.hidden_size}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
