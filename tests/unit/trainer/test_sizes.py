"""Sizes that follow the policy and the node."""

import pytest

from verl_tlt.config import BATCH_TOKENS, BUFFER_MB, TLTConfig
from verl_tlt.trainer.run_setup import with_sizes

GIB = 2**30


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(32_000, 4096), (128_256, 2048), (151_936, 2048), (256_000, 1024), (64, 4096)]
)
def test_micro_batches_on_an_accelerator_are_as_large_as_their_logits_allow(vocabulary, rows):
    assert with_sizes(TLTConfig(), vocabulary, True, 0, 8).drafter.batch_tokens == rows


def test_on_a_processor_sizes_are_the_toys():
    sized = with_sizes(TLTConfig(), 64, False, 2048 * GIB, 1)
    assert (sized.drafter.batch_tokens, sized.buffer.max_mb) == (BATCH_TOKENS, BUFFER_MB)


def test_buffers_share_a_tenth_of_the_nodes_memory():
    for node_gib, mb in ((1024, 13_107), (64, BUFFER_MB), (0, BUFFER_MB)):
        assert with_sizes(TLTConfig(), 151_936, True, node_gib * GIB, 8).buffer.max_mb == mb


def test_what_is_set_stays():
    settings = {"drafter": {"batch_tokens": 300}, "buffer": {"max_mb": 10}}
    sized = with_sizes(TLTConfig.from_dict(settings), 64, True, 1024 * GIB, 1)
    assert (sized.drafter.batch_tokens, sized.buffer.max_mb) == (300, 10)
