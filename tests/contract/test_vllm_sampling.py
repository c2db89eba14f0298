"""What of vLLM's sampling our precautions are for, and what they rely on.

`min_tokens`: vLLM hides stop tokens while it verifies drafts, and miscounts at the boundary. Tests here fail once it
counts along the whole draft: then `speculation.decode_load.room_before_stop` can go.
"""

import pickle

import pytest
import torch

STOP, VOCAB = 2, 4


@pytest.fixture
def processor():
    builtin = pytest.importorskip("vllm.v1.sample.logits_processor.builtin")
    made = builtin.MinTokensLogitsProcessor(None, torch.device("cpu"), False)

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
    pytest.importorskip("vllm")
    from inspect import getsource

    from vllm.v1.sample.sampler import Sampler

    source = getsource(Sampler.apply_logits_processors)
    assert "logits = processor.apply(logits)" in source, "does vLLM count the draft now? Then drop `room_before_stop`"


def test_a_mark_on_a_workers_answer_reaches_the_scheduler():
    """As `BrokenDrafts` makes it, through the pickle that workers answer with."""
    outputs = pytest.importorskip("vllm.v1.outputs")
    from verl_tlt.messages.rollout import BROKEN_MARK

    answer = outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    setattr(answer, BROKEN_MARK, 3)
    assert getattr(pickle.loads(pickle.dumps(answer)), BROKEN_MARK) == 3
