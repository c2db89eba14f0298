"""Rows of NaN become rows that are verified exactly, once told and once cleared; sound ones stay as they are."""

from types import SimpleNamespace

import pytest
import torch

from verl_tlt.messages.rollout import BROKEN_MARK
from verl_tlt.vllm_worker import draft_probabilities
from verl_tlt.vllm_worker.draft_probabilities import BrokenDrafts

NAN = float("nan")


def cache(value=1.0):
    return torch.full((2, 3), value)


class Runner:
    """What of a model runner is looked at."""

    device = torch.device("cpu")

    def __init__(self, probs, ranks=1):
        self.probs, self.drafter = probs, SimpleNamespace(_draft_attn_layer_names={"drafter.0"})
        layers = {"policy.0": SimpleNamespace(kv_cache=cache()), "drafter.0": SimpleNamespace(kv_cache=[cache(NAN)])}
        layers["moe"] = SimpleNamespace()
        self.layers = layers
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        )

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


def test_one_of_several_ranks_tells_it_and_switches_nothing_off_by_itself():
    """Under async scheduling each hears of it at its own time, and the drafter's pass has collectives."""
    runner, off = Runner(torch.full((1, 2), NAN), ranks=2), []
    BrokenDrafts(runner, lambda: off.append(1))
    assert vars(runner.sample_tokens(None)) == {BROKEN_MARK: 1} and not off


def test_under_async_scheduling_the_news_are_inside_of_what_is_returned():
    runner, inner = Runner(torch.full((1, 2), NAN)), SimpleNamespace()

    def sample_tokens(_):
        runner._get_spec_decode_draft_probs(None)
        return SimpleNamespace(_model_runner_output=inner)

    runner.sample_tokens = sample_tokens
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


class Speculator:
    """Writes `drafted` [2, 2, V] as its drafter's logits, and drafts [[3, 1], [2, 2]]."""

    def __init__(self, drafted):
        self.drafted, self.draft_logits = drafted, torch.zeros(3, 2, drafted.shape[-1])
        self.draft_attn_layer_names = {"drafter.0"}

    def propose(self, input_batch, *_args, num_speculative_tokens=2, dummy_run=False):
        self.draft_logits[input_batch.idx_mapping, :num_speculative_tokens] = self.drafted[:, :num_speculative_tokens]
        return torch.tensor([[3, 1], [2, 2]])


class V2Runner(Runner):
    """What of vLLM's V2 model runner is looked at; its two requests are in slots 2 and 0."""

    def __init__(self, drafted):
        super().__init__(None)
        self.speculator = Speculator(drafted)
        del self.drafter

    def sample_tokens(self, draft_length, **how):
        batch = SimpleNamespace(idx_mapping=torch.tensor([2, 0]), num_reqs=2)
        self.speculator.propose(input_batch=batch, num_speculative_tokens=draft_length, **how)
        return SimpleNamespace(model_runner_output=SimpleNamespace())


@pytest.fixture
def v2(monkeypatch, draft_rows):
    """A guarded V2 runner whose drafter computes these logits, its guard, and a list that tells of switching off."""

    def of(drafted):
        monkeypatch.setattr(draft_probabilities, "unknown_v2", lambda *_: None)  # the two classes are stand-ins
        runner, off = V2Runner(drafted), []
        return runner, BrokenDrafts(runner, lambda: off.append(1)), off

    return of


LOGITS = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))


def test_v2_sound_logits_pass_and_nothing_is_said(v2):
    runner, _, off = v2(LOGITS)
    assert not vars(runner.sample_tokens(2).model_runner_output) and not off
    assert torch.equal(runner.speculator.draft_logits[[2, 0]], LOGITS)


def test_v2_a_broken_draft_becomes_certain_and_is_told_once(v2):
    broken = LOGITS.clone()
    broken[0, 0, 2] = NAN
    broken[1] = NAN
    runner, guard, off = v2(broken)
    assert vars(runner.sample_tokens(2).model_runner_output) == {BROKEN_MARK: 3} and off == [1]
    assert runner.speculator.draft_logits.softmax(-1)[[2, 0, 0], [0, 0, 1], [3, 2, 2]].tolist() == [1.0] * 3
    assert torch.equal(runner.speculator.draft_logits[2, 1], LOGITS[0, 1]), "of a sound draft"
    runner.sample_tokens(2, dummy_run=True)
    runner.sample_tokens(0)
    assert off == [1], "nothing was drafted"
    runner.speculator.drafted = LOGITS
    guard.drafter_loaded()
    runner.sample_tokens(2)
    assert not runner.layers["drafter.0"].kv_cache[0].any() and runner.layers["policy.0"].kv_cache.all() and off == [1]


@pytest.mark.parametrize("why", ["unknown", "no logits"])
def test_v2_another_runner_is_refused_with_one_sentence(v2, why):
    runner, _, _ = v2(LOGITS)
    if why == "unknown":
        draft_probabilities.unknown_v2 = lambda *_: "It is another one"
    else:
        runner.speculator.draft_logits = None
    with pytest.raises(RuntimeError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        BrokenDrafts(runner, lambda: None)
