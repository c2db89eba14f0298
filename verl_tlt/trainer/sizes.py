"""Sizes of a drafter's training that are not set: they follow the policy, the device and the node.

A micro-batch is what a stop waits for, and its logits are most of what a session needs of a device. Buffers lie in the
memory of the node, beside what the actor offloads there. How many tokens fill them is decided while the run goes on
(`idle.tap_budget`).
"""

from __future__ import annotations

from dataclasses import replace

from verl_tlt.config import BATCH_TOKENS, BUFFER_MB, TLTConfig

MOST_BATCH_TOKENS = 4096
"""As long as `tlt.buffer.window`: longer micro-batches would lengthen stops for nothing."""
LOGIT_BYTES, MOST_LOGIT_BYTES = 20, 6 << 30
"""Device bytes of one logit while a session trains or scores (`drafter.session_bytes`), and of all of them."""
MEMORY_SHARE = 0.1
"""Part of a node's memory that its buffers take together."""


def with_sizes(tlt: TLTConfig, vocabulary: int, accelerator: bool, node_bytes: float, workers: int) -> TLTConfig:
    """The settings with `tlt.drafter.batch_tokens` and `tlt.buffer.max_mb` filled in.

    Args:
        tlt: all settings; what the user has set stays.
        vocabulary: tokens of the policy's vocabulary.
        accelerator: whether drafters train on one; else on the host's processor.
        node_bytes: memory of the smallest node; 0: unknown.
        workers: spot workers on a node.
    """
    rows, mb = BATCH_TOKENS, BUFFER_MB
    if accelerator:
        while rows < MOST_BATCH_TOKENS and 2 * rows * vocabulary * LOGIT_BYTES <= MOST_LOGIT_BYTES:
            rows *= 2
        mb = max(mb, int(MEMORY_SHARE * node_bytes / max(1, workers)) >> 20)
    return replace(
        tlt,
        drafter=replace(tlt.drafter, batch_tokens=tlt.drafter.batch_tokens or rows),
        buffer=replace(tlt.buffer, max_mb=tlt.buffer.max_mb or mb),
    )
