"""Rows of NaN become rows of zeros, once told and once cleared; sound ones stay as they are."""

from types import SimpleNamespace

import pytest
import torch

from verl_tlt.messages.rollout import BROKEN_MARK
from verl_tlt.vllm_worker.draft_probabilities import BrokenDrafts

NAN = float("nan")


def cache(value=1.0):
    return torch.full((2, 3), value)


class Runner:
    """What of a model runner is looked at."""

    device = torch.device("cpu")

    def __init__(self, probs):
        self.probs, self.drafter = probs, SimpleNamespace(_draft_attn_layer_names={"drafter.0"})
        layers = {"policy.0": SimpleNamespace(kv_cache=cache()), "drafter.0": SimpleNamespace(kv_cache=[cache(NAN)])}
        layers["moe"] = SimpleNamespace()
        self.layers = layers
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))

    def _get_spec_decode_draft_probs(self, metadata):
        return None if self.probs is None else self.probs.clone()

    def sample_tokens(self, grammar):
        self._get_spec_decode_draft_probs(None)
        return SimpleNamespace()


SOUND = torch.tensor([[0.25, 0.75], [0.0, 1.0]])


def guarded(probs):
    runner, off = Runner(probs), []
    return runner, BrokenDrafts(runner, lambda: off.append(1)), off


@pytest.mark.parametrize("probs", [None, SOUND])
def test_what_is_sound_passes_and_nothing_is_said(probs):
    runner, guard, off = guarded(probs)
    found = runner._get_spec_decode_draft_probs(None)
    assert found is None if probs is None else torch.equal(found, probs)
    assert not vars(runner.sample_tokens(None)) and not off
    guard.drafter_loaded()
    runner.sample_tokens(None)
    assert runner.layers["drafter.0"].kv_cache[0].isnan().all(), "not cleared for nothing"


def test_a_broken_row_is_emptied_and_told_once():
    runner, _, off = guarded(torch.stack([SOUND[0], torch.full((2,), NAN), SOUND[1]]))
    assert runner._get_spec_decode_draft_probs(None).tolist() == [[0.25, 0.75], [0.0, 0.0], [0.0, 1.0]]
    assert vars(runner.sample_tokens(None)) == {BROKEN_MARK: 2} and off == [1]
    runner.probs = SOUND
    assert not vars(runner.sample_tokens(None)) and off == [1]


def test_under_async_scheduling_the_news_are_inside_of_what_is_returned():
    runner = Runner(torch.full((1, 2), NAN))
    inner = SimpleNamespace()
    runner.sample_tokens = lambda _: (
        runner._get_spec_decode_draft_probs(None),
        SimpleNamespace(_model_runner_output=inner),
    )[1]
    BrokenDrafts(runner, lambda: None)
    runner.sample_tokens(None)
    assert vars(inner) == {BROKEN_MARK: 1}


@pytest.mark.parametrize("shared", [False, True])
def test_the_drafters_cache_is_cleared_once_and_never_the_policys(shared):
    runner, guard, _ = guarded(torch.full((1, 2), NAN))
    policys, (drafters,) = runner.layers["policy.0"].kv_cache, runner.layers["drafter.0"].kv_cache
    if shared:
        runner.layers["drafter.0"].kv_cache = [policys.view(3, 2)]
    runner.sample_tokens(None)
    guard.drafter_loaded()
    assert policys.all() and drafters.all(), "verl loads while the KV cache is not mapped"
    runner.probs = SOUND
    runner.sample_tokens(None)
    assert policys.all() and drafters.any() == shared
    drafters.fill_(5.0)
    guard.drafter_loaded()
    runner.sample_tokens(None)
    assert drafters.all(), "once is enough"
