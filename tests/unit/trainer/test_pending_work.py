"""The outlook on verl's replay buffer is never that of a buffer which is only half filled again."""

from collections import defaultdict

import pytest

from verl_tlt.trainer.watch import BufferWatch, PendingWork, logger


class Buffer:
    """What is read of verl's buffer, and its way of looking: empty first, then filled."""

    def __init__(self, filtering: bool = False) -> None:
        self.filter_groups_metric = "acc" if filtering else None
        self.sync_refill_failed_groups = False
        self.pending_keys, self.running_keys, self.finished_keys = (defaultdict(set) for _ in range(3))
        self.meanwhile = lambda: None

    def _sync_metadata_from_transfer_queue(self) -> None:
        for keys in (self.pending_keys, self.running_keys, self.finished_keys):
            keys.clear()
        self.meanwhile()
        self.pending_keys["train"] |= {"p"}
        self.running_keys["train"] |= {"r", "s"}
        self.finished_keys["train"] |= {"f"}


@pytest.mark.parametrize(("multi_turn", "loops"), [(True, 2), (False, 0)])
def test_what_is_counted(multi_turn, loops):
    buffer = Buffer()
    outlook = BufferWatch(buffer, multi_turn=multi_turn, wanted=2)
    assert outlook() == PendingWork()
    buffer._sync_metadata_from_transfer_queue()
    assert outlook() == PendingWork(pending=1, open_loops=loops)


def test_in_the_middle_of_a_look_the_last_one_holds():
    buffer = Buffer()
    outlook = BufferWatch(buffer, multi_turn=True, wanted=2)
    buffer._sync_metadata_from_transfer_queue()
    seen = []
    buffer.meanwhile = lambda: seen.append(outlook())
    buffer._sync_metadata_from_transfer_queue()
    assert seen == [PendingWork(pending=1, open_loops=2)]


@pytest.mark.parametrize(("filtering", "wanted", "possible"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_filtering_may_ask_for_more_groups_until_there_are_enough(filtering, wanted, possible):
    buffer = Buffer(filtering)
    outlook = BufferWatch(buffer, multi_turn=False, wanted=wanted)
    buffer._sync_metadata_from_transfer_queue()
    assert outlook().refill_possible is possible


def test_of_a_sampler_that_is_not_verls_the_worst_is_assumed(monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", lambda message, *args: said.append(message % args))
    assert BufferWatch(object(), multi_turn=False, wanted=1)().refill_possible
    assert len(said) == 1 and "no replica leaves early" in said[0]
