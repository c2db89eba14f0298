"""Policies by their shape alone, drafters of them, and texts: what costs time has random weights here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.parts import Bench
from verl_tlt.drafter import TrainingSequence, VerifierWeights, build_drafter, halve_frozen, refresh_verifier_weights

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import Qwen2Config


@dataclass(frozen=True)
class Shape:
    """A dense policy of the Qwen2 family."""

    hidden: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    layers: int

    def config(self) -> Qwen2Config:
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.mlp, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=32768,
            tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"], dtype="bfloat16",
        )  # fmt: skip

    def write(self, directory: Path) -> Path:
        """A policy directory without weights, for engines that make them up (`load_format=dummy`)."""
        directory.mkdir(parents=True, exist_ok=True)
        self.config().save_pretrained(directory)
        return directory


SHAPES = {
    "tiny": Shape(128, 256, 512, 4, 2, 4),
    "small": Shape(512, 1408, 32000, 4, 2, 8),
    "7b": Shape(3584, 18944, 152064, 28, 4, 28),
}


def shape_of(bench: Bench, name: str) -> Shape:
    """The named one, or the toy."""
    return SHAPES["tiny" if bench.tiny else name]


def rows_of(bench: Bench) -> int:
    """Rows of a micro-batch, by default with a policy of 7B."""
    return 64 if bench.tiny else 4096


def draft_vocab_of(bench: Bench) -> int:
    """Tokens that a drafter can draft, by default with a policy of 7B."""
    return 128 if bench.tiny else 32_768


def verifier_weights(shape: Shape, seed: int = 0) -> VerifierWeights:
    """Random ones in 16 bits; head and embedding are one tensor, which is enough."""
    draws = torch.Generator().manual_seed(seed)
    matrix = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=draws)
    return VerifierWeights(matrix, matrix, torch.ones(shape.hidden))


def drafter(
    shape: Shape, device: str, attention: str | None = None, draft_vocab: int | None = None
) -> Eagle3DraftModel:
    """On the host, as a learner that trains on `device` holds it; it drafts the first `draft_vocab` tokens, or all."""
    from verl_tlt.drafter import default_attention

    ids = None if draft_vocab is None else torch.arange(draft_vocab)
    model = build_drafter(shape.config(), attention=attention or default_attention(device), draft_ids=ids)
    refresh_verifier_weights(model, verifier_weights(shape))
    if device != "cpu":
        halve_frozen(model)
    return model


def texts(shape: Shape, lengths: Any, seed: int = 0) -> list[TrainingSequence]:
    """Random tokens under random states, all of them response but the first."""
    draws = torch.Generator().manual_seed(seed)

    def states(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).normal_(generator=draws)

    return [
        TrainingSequence(torch.randint(shape.vocab, (n,), generator=draws), 1, states(n, 3 * shape.hidden),
                 states(n, shape.hidden))
        for n in lengths
    ]  # fmt: skip
