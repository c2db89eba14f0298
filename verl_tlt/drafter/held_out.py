"""Which prompts judge a drafter and are never trained on: a warm-up and a run agree about it.

All responses to a prompt go together, for they resemble each other. So a hash of the prompt decides. What a warm-up
held out, a run with at least its share holds out, too.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

SAMPLED = 4096
"""Numbers of an image's tensor that are hashed, evenly spread: enough to tell images apart."""


def digest_of(tokens: Iterable[int], images: Iterable[torch.Tensor] = ()) -> int:
    """A number of 64 bits for a prompt's tokens and images: the same for all its responses."""
    digest = hashlib.blake2b(np.fromiter(tokens, dtype=np.int64).tobytes(), digest_size=8)
    for image in images:
        values = image.detach().flatten()
        digest.update(values[:: max(1, len(values) // SAMPLED)].float().cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def mark_of(prompt: int) -> float:
    """Where a prompt, by its digest, lies in [0, 1): it is held out where that is below the share to hold out."""
    return int.from_bytes(hashlib.blake2b(f"{prompt}".encode(), digest_size=8).digest(), "big") / 2.0**64
