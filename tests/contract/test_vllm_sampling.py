"""What of vLLM's scheduling and sampling our precautions are for, and what they rely on.

`min_tokens`: vLLM hides stop tokens while it verifies drafts, and miscounts at the boundary. Tests here fail once it
counts along the whole draft: then `engine_core.scheduler.verified_inexactly` need not ask for it.
"""

from inspect import getsource

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler

STOP, VOCAB = 2, 4


@pytest.fixture
def processor():
    made = MinTokensLogitsProcessor(None, torch.device("cpu"), False)

    def of(least, has):
        made.min_toks = {0: (least, [1] * has, {STOP})}
        made.logits_slice = (torch.tensor([0]), torch.tensor([STOP]))
        return made

    return of


def hidden(logits):
    return [bool(row[STOP].isinf()) for row in logits]


@pytest.mark.parametrize(("has", "expected"), [(0, [True] * 3), (3, [True, True, False]), (4, [True, False, False])])
def test_it_counts_along_the_draft(processor, has, expected):
    logits = processor(5, has).apply_with_spec_decode(torch.zeros(3, VOCAB), [3])
    assert hidden(logits) == expected


@pytest.mark.parametrize("has", [1, 2, 3, 4])
def test_it_judges_the_token_behind_the_draft_by_the_tokens_before_it(processor, has):
    """With `has` + 3 drafts before it, it is at least the fifth: stock without drafts may stop there."""
    assert hidden(processor(5, has).apply(torch.zeros(1, VOCAB))) == [True]


def test_the_rejection_sampler_asks_for_that_token_without_saying_how_long_the_draft_is():
    """`min_tokens` 3, one token and two drafts behind it: the fourth token may be a stop token, and is not."""
    source = getsource(Sampler.apply_logits_processors)
    assert "logits = processor.apply(logits)" in source, "does vLLM count the draft now? Then draft there"


def test_the_draft_length_is_looked_up_once_per_step_and_admitted_requests_stand_at_the_end():
    source = getsource(Scheduler.schedule)
    assert source.count("self.dynamic_sd_lookup[") == 1
    assert source.count("self.running.append(request)") == 1 and "self.running.insert" not in source
