"""A learner on a device that it may use in sessions only: counted memory, scores that take long, and no waiting.

The device is other memory of the host, and counts what is on it.
"""

import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from tiny_learner import CONFIG, make_learner, same, texts, train_and_merge, verifier_arrays

from verl_tlt.drafter import session_bytes, train
from verl_tlt.drafter.memory import FEWEST_ROWS, MARGIN, TrainingDevice, check_room
from verl_tlt.errors import TLTError
from verl_tlt.spot_worker import buffer
from verl_tlt.spot_worker import learner as spot_learner
from verl_tlt.spot_worker.buffer import PORTION

GIB = 2**30


class CountedDevice(TrainingDevice):
    """A device of so many bytes."""

    def __init__(self, total):
        super().__init__("cpu")
        self.is_accelerator, self.total = True, total
        self.used = self.most = self.visits = self.back = 0

    def memory(self):
        return self.total - self.used, self.total

    @contextmanager
    def resident(self, *arguments, **options):
        stay = super().resident(*arguments, **options)
        self.visits += 1
        arriving = True

        def copy(target, source):
            target.copy_(source)
            if arriving:
                self.used += target.nbytes
                self.most = max(self.most, self.used)
            else:
                self.back += target.nbytes

        try:
            with patch("verl_tlt.drafter.memory._copy", copy), stay:
                arriving = False
                yield
        finally:
            self.used = 0


def needs(learner, rows):
    return session_bytes(learner.model, rows, 3, max(PORTION, CONFIG.buffer.window))


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Its device has room for a session and no more; matrix products are in 16 bits, as there."""
    monkeypatch.setattr(train, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    made = make_learner(tmp_path / "policy", 40)
    made.training_device = CountedDevice(int(1.1 * needs(made, 64)))
    return made


def test_the_next_session_scores_what_was_merged(learner):
    assert train_and_merge(learner).scores is None, "the first drafter is the served one"
    agreed = learner.versions.candidate
    judged = learner.train(lambda: False)
    assert judged.steps > 0 and judged.scores.positions.sum() > 0
    assert (judged.scores.candidate != judged.scores.served).any()
    assert same(agreed, learner.versions.candidate) and not same(learner.trainer.parameters_numpy(), agreed)
    assert learner.train(lambda: False).scores is None, "once is enough"
    assert learner.training_device.used == 0 < learner.training_device.most < learner.training_device.total


def test_a_stop_ends_scoring_and_the_version_is_scored_later(learner):
    train_and_merge(learner)
    before = learner.trainer.parameters_numpy()
    result = learner.train(lambda: True)
    assert (result.outcome, result.steps, result.scores) == ("stopped", 0, None)
    assert learner.training_device.used == 0 and same(learner.trainer.parameters_numpy(), before)
    assert learner.train(lambda: False).scores is not None


def test_states_arrive_during_scoring(learner, monkeypatch):
    train_and_merge(learner)
    held, arrived = learner.buffer.stats().sequences, verifier_arrays(seed=1)
    old = learner.model.verifier_lm_head.weight[0, 0].item()
    real, adds = buffer.acceptance, threading.Thread(target=learner.add, args=(2, texts(4, seed=1), arrived))

    def while_states_arrive(*args, **settings):
        if adds.ident is None:
            adds.start()
            adds.join(60)
            assert not adds.is_alive(), "it waited for the scores"
        return real(*args, **settings)

    monkeypatch.setattr(buffer, "acceptance", while_states_arrive)
    learner.train(lambda: False)
    assert learner.buffer.stats().sequences == held + 4
    assert learner.model.verifier_lm_head.weight[0, 0].item() == old
    learner.hand_in(1)  # the next turn takes them in
    assert learner.model.verifier_lm_head.weight[0, 0].item() == arrived.lm_head[0, 0] != old


def test_a_device_that_others_fill_is_not_touched(learner):
    learner.training_device.used = learner.training_device.total // 2  # the actor keeps its optimizer there
    with pytest.raises(TLTError, match=r"lower tlt\.drafter\.batch_tokens"):
        learner.train(lambda: False)
    assert learner.training_device.visits == 0 and learner.unmerged_steps == 0
    with pytest.raises(TLTError):
        learner.warm_up()
    learner.training_device.used = 0
    assert learner.train(lambda: False).steps > 0


def test_micro_batches_are_as_large_as_the_free_memory_allows(learner, monkeypatch, said):
    drawn, sample = [], learner.buffer.sample_batch
    monkeypatch.setattr(learner.buffer, "sample_batch", lambda rng, rows: drawn.append(rows) or sample(rng, rows))
    learner.config = replace(learner.config, drafter=replace(learner.config.drafter, batch_tokens=8192))
    for free, rows in ((8192, 8192), (4096, 4096), (2100, 2048)):
        learner.training_device.total = int(needs(learner, free) / (1 - MARGIN)) + 4096
        drawn.clear()
        assert learner.train(lambda: False).steps > 0
        assert set(drawn) == {rows}
    assert "batches have 2048 rows, not 8192" in said.text
    learner.training_device.total = needs(learner, FEWEST_ROWS) // 2
    with pytest.raises(TLTError, match="a session needs"):
        learner.train(lambda: False)


@pytest.mark.parametrize(("needed", "free", "fits"), [(10, 13, True), (10, 12, False), (0, 2, False), (77, 80, True)])
def test_some_memory_is_left_to_the_devices_owners(needed, free, fits):
    with nullcontext() if fits else pytest.raises(TLTError, match=f"{free}.0 of 80.0 GiB"):
        check_room(needed * GIB, free * GIB, 80 * GIB)


def test_a_warm_up_visits_the_device_and_brings_nothing_back(learner):
    before = learner.trainer.parameters_numpy()
    learner.warm_up()
    assert learner.training_device.visits == 1 and learner.training_device.back == learner.training_device.used == 0
    assert same(learner.trainer.parameters_numpy(), before) and learner.trainer.steps == 0


def test_no_session_waits_for_memory_to_be_locked(learner, tmp_path, monkeypatch):
    room = learner.training_device.total
    lock = Mock(side_effect=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr("verl_tlt.drafter.memory.page_locked", lock)
    monkeypatch.setattr(spot_learner, "TrainingDevice", lambda name: CountedDevice(room))
    fresh = make_learner(tmp_path / "policy", 40)
    assert lock.call_count == 1, "it is one block, made as the learner is"
    fresh.warm_up()
    assert fresh.train(lambda: False).steps > 0 and fresh.train(lambda: False).steps > 0
    assert lock.call_count == 1


def test_on_an_accelerator_the_policys_weights_are_kept_in_16_bits(tmp_path):
    learner = make_learner(tmp_path / "policy", device="cuda")
    frozen = [p for p in learner.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in learner.trainer.parameters.values()} == {torch.float32}
    assert learner.model.lm_head.weight is learner.model.verifier_lm_head.weight
    learner.add(1, [], verifier_arrays())
    assert learner.model.embed_tokens.weight[0, 0].item() == pytest.approx(verifier_arrays().embed[0, 0], rel=2**-8)
