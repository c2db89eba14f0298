"""What feeds a training device: batches prepared by a thread while it computes, and steps that hardly wait for it."""

import collections
import threading
import time
import weakref

import pytest
import torch
from tiny_policy import drafter_of, same_state
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from verl_tlt.drafter import DrafterTrainer, TrainingSequence, acceptance, batches, pack, train_until
from verl_tlt.drafter.data import ahead

PATIENCE_S = 30.0


def feeders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("tlt-feed")]


def test_one_is_prepared_while_the_one_before_is_used_and_no_more():
    prepared = [threading.Event() for _ in range(5)]

    def prepare(item):
        prepared[item].set()
        return item

    with ahead(range(5), prepare) as source:
        for item in source:
            assert all(event.wait(PATIENCE_S) for event in prepared[: item + 2]), "it was not prepared meanwhile"
            assert not any(event.is_set() for event in prepared[item + 2 :]), "it was drawn too early"
    assert item == 4


def test_a_user_that_stops_early_leaves_no_thread():
    with ahead(iter(int, 1), str) as source:
        assert [next(source), next(source)] == ["0", "0"] and feeders()
    assert not feeders()


def test_what_was_prepared_and_is_not_used_is_let_go(sequences):
    made, prepared = [], threading.Event()

    def prepare(batch):
        moved = batch.to("cpu", torch.float64)
        made.append(weakref.ref(moved.hidden_states))
        if len(made) == 2:
            prepared.set()
        return moved

    with pytest.raises(RuntimeError), ahead([pack(sequences)] * 9, prepare) as source:
        next(source)
        assert prepared.wait(PATIENCE_S)
        raise RuntimeError("out of memory")
    assert len(made) == 2 and not any(ref() is not None for ref in made)


@pytest.mark.parametrize("where", ["drawing", "preparing"])
def test_what_fails_is_raised_where_it_would_have_come(where):
    def draw():
        yield from (1, 2)
        if where == "drawing":
            raise OSError("gone")
        yield 3

    def prepare(item):
        if item == 3:
            raise OSError("gone")
        return item

    got = []
    with pytest.raises(OSError, match="gone"), ahead(draw(), prepare) as source:
        got.extend(source)
    assert got == [1, 2] and not feeders()


def test_a_session_that_is_fed_learns_what_steps_one_by_one_do(policy, sequences):
    one, other = (DrafterTrainer(drafter_of(policy, seed=2), ttt_steps=2) for _ in range(2))
    done = train_until(one, batches(sequences, 24), lambda: False)
    results = [other.step(batch) for batch in batches(sequences, 24)]
    assert same_state(one.state(), other.state())
    assert (done.steps, done.batches, done.tokens) == (len(results), len(results), sum(r.tokens for r in results))


class PageLocked(TorchFunctionMode):
    """Ordinary memory in the place of page-locked; notes where it is."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        if pinned:
            self.places.add(made.untyped_storage().data_ptr())
        return made


class Written(TorchDispatchMode):
    """Bytes of all storages that operators have made."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.made[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made


def test_states_are_copied_once_into_the_memory_that_a_device_reads(sequences):
    plain = pack(sequences)
    with PageLocked() as locked, Written() as written:
        batch = pack(sequences, pinned=True)
    for name, column in vars(plain).items():
        there = getattr(batch, name)
        assert there.dtype == column.dtype and torch.equal(there, column)
        assert there.untyped_storage().data_ptr() in locked.places
    held = {t.untyped_storage().data_ptr() for s in sequences for t in (s.tokens, s.aux, s.last)}
    elsewhere = sum(n for place, n in written.made.items() if place not in locked.places | held)
    assert elsewhere < batch.hidden_states.nbytes / 4, "states were copied on the way"


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers read from it, and constants copied to it one by one."""

    NAMES = ("_local_scalar_dense", "masked_select", "nonzero", "equal", "is_nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.NAMES or (name == "lift_fresh" and args[0].numel()):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_reads_its_figures_once_and_waits_for_nothing_else(policy, sequences, passes):
    trainer = DrafterTrainer(drafter_of(policy, attention="sdpa"), ttt_steps=passes)  # as on CUDA
    trainer.passes = passes
    trainer.step(pack(sequences))
    fed = trainer.feed()(pack(sequences))
    with Waits() as waits:
        result = trainer.step_on(fed)
    assert not waits.found
    assert not result.skipped and len(result.acc_by_position) == passes


def test_scores_wait_once_for_all_they_read(policy, sequences):
    drafter = drafter_of(policy, attention="sdpa")
    acceptance(drafter, sequences)
    with Waits() as waits:
        scores = acceptance(drafter, sequences, temperature=1.0, top_p=0.9, max_draft=3)
    assert waits.found.keys() <= {"lift_fresh"}, "constants of packing, which are the host's"
    assert sum(score.drafts for score in scores) > 0


def test_the_thread_that_trains_neither_packs_nor_copies(policy, monkeypatch):
    """Processor seconds of the thread that trains, but for the steps: batches of 1024 rows."""
    hidden, count = policy.config.hidden_size, 30
    wide = [
        TrainingSequence(torch.zeros(129, dtype=torch.int64), 1, torch.randn(129, 3 * hidden), torch.randn(129, hidden))
        for _ in range(8)
    ]
    trainer = DrafterTrainer(drafter_of(policy), ttt_steps=1)
    step = trainer.step(pack(wide))
    monkeypatch.setattr(trainer, "step_on", lambda fed: step)
    feed = trainer.feed()

    def seconds(work):
        start = time.thread_time()
        work()
        return time.thread_time() - start

    alone = seconds(lambda: [feed(pack(wide)) for _ in range(count)])
    fed = seconds(lambda: train_until(trainer, (pack(wide) for _ in range(count)), lambda: False))
    assert fed < alone / 2, (fed, alone)
