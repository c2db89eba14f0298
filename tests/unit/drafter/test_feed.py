"""What feeds a training device: batches prepared by a thread while it computes; a step hardly waits, nor compiles."""

import collections
import threading
import weakref

import pytest
import torch
from tiny_policy import Watched, drafter_of, same_state
from torch._dynamo.utils import counters

from verl_tlt.drafter.build import default_attention
from verl_tlt.drafter.data import Batch, ahead, batches, pack
from verl_tlt.drafter.evaluate import acceptance
from verl_tlt.drafter.train import DrafterTrainer, train_until

PATIENCE_S = 30.0
WAITS = ("_local_scalar_dense", "masked_select", "nonzero", "equal", "is_nonzero", "unique")
"""Operations for which the host waits for a device."""


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
        assert prepared.wait(PATIENCE_S) and feeders()
        raise RuntimeError("out of memory")
    assert len(made) == 2 and not any(ref() is not None for ref in made) and not feeders()


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


def test_a_session_that_is_fed_learns_what_steps_one_by_one_do(policy, sequences, monkeypatch):
    """Its batches are packed and copied by the other thread."""
    one, other = (DrafterTrainer(drafter_of(policy, seed=2), ttt_steps=2) for _ in range(2))
    threads, copy = [], Batch.to

    def noted(value):
        threads.append(threading.current_thread().name.partition("_")[0])
        return value

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "to", lambda batch, *where: noted(copy(batch, *where)))
        done = train_until(one, map(noted, batches(sequences, 24)), lambda: False)
    results = [other.step(batch) for batch in batches(sequences, 24)]
    assert same_state(one.state(), other.state()) and threads == ["tlt-feed"] * 2 * len(results)
    assert (done.steps, done.tokens) == (len(results), sum(r.tokens for r in results))


def test_a_batch_is_packed_into_the_memory_that_a_device_reads(sequences, monkeypatch):
    plain, locked, empty = pack(sequences), set(), torch.empty

    def page_locked(*shape, pin_memory=False, **options):
        made = empty(*shape, **options)
        if pin_memory:
            locked.add(made.data_ptr())
        return made

    monkeypatch.setattr(torch, "empty", page_locked)
    for name, column in vars(pack(sequences, pinned=True)).items():
        assert column.data_ptr() in locked and torch.equal(column, getattr(plain, name)), name


def waits(found):
    """Counts in `found` what the host waits for: numbers read from a device, constants copied to it one by one."""

    def note(name, args, tensor):
        if name in WAITS or (name == "lift_fresh" and args[0].numel()):
            found[name] += 1

    return Watched(note)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_reads_its_figures_once_and_waits_for_nothing_else(policy, sequences, passes):
    trainer, found = DrafterTrainer(drafter_of(policy, attention="sdpa"), ttt_steps=passes), collections.Counter()
    trainer.passes = passes
    trainer.step(pack(sequences))
    fed = trainer.feed()(pack(sequences))
    with waits(found):
        result = trainer.step_on(fed)
    assert not found and not result.skipped and len(result.acc_by_position) == passes


def test_scores_wait_once_for_all_they_read(policy, sequences):
    drafter, found = drafter_of(policy, attention="sdpa"), collections.Counter()
    acceptance(drafter, sequences)
    with waits(found):
        scores = acceptance(drafter, sequences, temperature=1.0, top_p=0.9, max_draft=3)
    assert found.keys() <= {"lift_fresh"}, "constants of packing, which are the host's"
    assert sum(score.drafts for score in scores) > 0


@pytest.fixture
def compiled(monkeypatch):
    """The library's forward as it is where CUDA is, but for the backend: compiled."""
    from speculators.models.eagle3 import Eagle3DraftModel

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(Eagle3DraftModel, "forward", torch.compile(Eagle3DraftModel.forward, backend="eager"))
    with torch._dynamo.config.patch(disable=False):  # the tests' environment disables it
        yield Eagle3DraftModel.forward
    torch._dynamo.reset()


def test_no_row_count_and_no_scoring_traces_a_graph(compiled, policy, sequences):
    """A stop would wait for every one."""
    model = drafter_of(policy, seed=3, attention=default_attention("cuda"))
    trainer = DrafterTrainer(model, ttt_steps=3)
    trainer.rehearse()
    for some in (sequences, sequences[:1], sequences[1:3]):
        trainer.step(pack(some))
        trainer.step(pack(some).padded(16))
        acceptance(model, some, max_draft=3)
    assert counters["stats"]["unique_graphs"] == 0
    batch = trainer.feed()(pack(sequences)).arrived()
    with torch.no_grad():
        compiled(model, batch.hidden_states, batch.input_ids, batch.document_ids, ttt_steps=1)
    assert counters["stats"]["unique_graphs"] > 0, "the library's own forward would have been compiled"
