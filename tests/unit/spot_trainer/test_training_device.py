"""A spot trainer on a device that it may use in sessions only: memory is other memory of the host."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from tiny_trainer import make_trainer, same, session

from verl_tlt.drafter import pack, session_bytes, train
from verl_tlt.drafter.memory import FEWEST_ROWS, MARGIN, NoRoomError, TrainingDevice, check_room
from verl_tlt.errors import TLTError
from verl_tlt.spot_trainer import trainer as module
from verl_tlt.spot_trainer.scoring import PORTION

GIB = 2**30


class SmallDevice(TrainingDevice):
    """A device of so many bytes, of which others use some; counts the visits."""

    def __init__(self, total):
        super().__init__("cpu")
        self.is_accelerator, self.total = True, total
        self.used = self.visits = 0

    @contextmanager
    def at(self, index):
        yield

    def packed(self, sequences):
        return pack(sequences)

    def memory(self):
        return self.total - self.used, self.total

    @contextmanager
    def resident(self, *arguments, **options):
        with super().resident(*arguments, **options):
            self.visits += 1
            yield


def needs(trainer, rows):
    return session_bytes(trainer.model, rows, 3, max(PORTION, trainer.plan.window))


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Its device has room for a session and no more; matrix products are in 16 bits, as there."""
    monkeypatch.setattr(train, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    made = make_trainer(tmp_path / "policy", 40)
    made.place = SmallDevice(int(1.1 * needs(made, 64)))
    return made


@pytest.fixture
def copies(monkeypatch):
    """What is copied to the device and back, each in one piece."""
    copy = Mock(side_effect=lambda target, source: target.copy_(source))
    monkeypatch.setattr("verl_tlt.drafter.memory._copy", copy)
    return copy


def test_a_session_scores_and_trains_on_the_device(trainer, copies):
    assert session(trainer).verdict is None
    before = trainer.trainer.cloned_parameters()
    assert session(trainer, lambda: True).verdict is None, "a stop ends the scoring"
    assert same(trainer.trainer.cloned_parameters(), before)
    assert session(trainer).verdict is not None
    assert (trainer.place.visits, copies.call_count) == (3, 6)


def test_a_device_that_others_fill_is_not_touched(trainer):
    trainer.place.used = trainer.place.total // 2  # the actor keeps its optimizer there
    failed = session(trainer)
    assert failed.outcome == "failed" and "have the actor offload its parameters and optimizer" in failed.error
    trainer.rehearse()
    assert trainer.place.visits == 0 and trainer.trainer.steps == 0
    trainer.place.used = 0
    assert session(trainer).steps > 0


def test_micro_batches_are_as_large_as_the_free_memory_allows(trainer, monkeypatch, said):
    drawn, sample = [], trainer.buffer.sample_batch
    monkeypatch.setattr(trainer.buffer, "sample_batch", lambda rng, rows: drawn.append(rows) or sample(rng, rows))
    trainer.plan = replace(trainer.plan, batch_tokens=8192)
    for free, rows in ((8192, 8192), (4096, 4096), (2100, 2048)):
        trainer.place.total = int(needs(trainer, free) / (1 - MARGIN)) + 4096
        drawn.clear()
        assert session(trainer).steps > 0
        assert set(drawn) == {rows}
    assert "batches have 2048 rows, not 8192" in said.text
    trainer.place.total = needs(trainer, FEWEST_ROWS) // 2
    assert "a session needs" in session(trainer).error


@pytest.mark.parametrize(("needed", "free", "fits"), [(10, 13, True), (10, 12, False), (0, 2, False), (77, 80, True)])
def test_some_memory_is_left_to_the_devices_owners(needed, free, fits):
    with nullcontext() if fits else pytest.raises(TLTError, match=f"{free}.0 of 80.0 GiB"):
        check_room(needed * GIB, free * GIB, 80 * GIB)


def test_a_warm_up_visits_the_device_and_brings_nothing_back(trainer, copies):
    before = trainer.trainer.cloned_parameters()
    trainer.rehearse()
    assert (trainer.place.visits, copies.call_count) == (1, 1)
    assert same(trainer.trainer.cloned_parameters(), before) and trainer.trainer.steps == 0


def test_no_session_waits_for_memory_to_be_locked(trainer, tmp_path, monkeypatch):
    room = trainer.place.total
    lock = Mock(side_effect=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr("verl_tlt.drafter.memory.page_locked", lock)
    monkeypatch.setattr(module, "TrainingDevice", lambda name: SmallDevice(room))
    fresh = make_trainer(tmp_path / "policy", 40)
    assert lock.call_count == 1, "it is one block, made at the start"
    fresh.rehearse()
    assert session(fresh).steps > 0 and session(fresh).steps > 0
    assert lock.call_count == 1


def test_on_an_accelerator_the_policys_weights_are_kept_in_16_bits(tmp_path):
    trainer = make_trainer(tmp_path / "policy", device="cuda")
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in trainer.trainer.parameters.values()} == {torch.float32}


@pytest.mark.parametrize(("said", "kind"), [("CUDA error: out of memory", NoRoomError), ("misaligned", RuntimeError)])
def test_a_device_too_full_for_a_context_has_no_room(monkeypatch, said, kind):
    def mem_get_info(_):
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = "for a CUDA context" if kind is NoRoomError else said
    with pytest.raises(kind, match=found), TrainingDevice("cuda").at(0):
        pytest.fail("a session began")
