"""The merge is the weighted average, to 16 bits and in any order; nothing broken gets into it, and no worker reads more
than its share. Versions: what follows each event."""

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from verl_tlt.spot_worker import merge as merge_module
from verl_tlt.spot_worker.merge import (
    BLOCK,
    FAN_IN,
    DrafterVersions,
    added,
    average_slice,
    hand_in,
    session_facts,
    start_merge,
)

SHAPES = {"fc": (300, 700), "norm": (33,), "down": (BLOCK + 5,), "up": (4, BLOCK)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


def parameters(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {name: size * rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


BASE = parameters(seed=99)


def session(i, tokens=None, steps=10):
    """(facts, parameters after it) of a worker whose changes are as small as a learning rate makes them."""
    change = parameters(seed=i, size=1e-3)
    now = {name: BASE[name] + change[name] for name in BASE}
    return session_facts(f"w{i:02}", tokens or 100 * (i + 1), steps, min_steps=8), now


def at_once(call):
    """`handle.method.options(...).remote(...)`, which runs at once."""
    return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=call))


class Worker:
    """A spot worker's part in a merge; counts the bytes that it reads of others, by level."""

    def __init__(self, facts, now):
        self.made, self.reads = [], []
        self.hand_in = at_once(lambda slices: self._keep(hand_in(facts, now, BASE, slices)))
        self.average = at_once(self._average)

    def _keep(self, slices):
        self.made += slices
        return slices

    def _average(self, *parts, last):
        self.reads.append(sum(p.values.nbytes + p.scales.nbytes for p in parts if not any(p is m for m in self.made)))
        (average,) = self._keep([average_slice(parts, last=last)])
        return average.facts, average


def merged_by(workers):
    facts, slices = start_merge(workers)
    assert all(f == facts[0] for f in facts), "the slices' facts differ"
    new = added(BASE, slices)
    return facts[0], {name: value - BASE[name] for name, value in new.items()}


def weighted(sessions):
    """The merged change in float64: the average by tokens, as far as the longest session goes."""
    tokens = [facts.tokens for facts, _ in sessions]
    further = max(tokens) * sum(tokens) / sum(t * t for t in tokens)
    return {
        name: further * np.average([(now[name] - BASE[name]).astype(float) for _, now in sessions], 0, tokens)
        for name in BASE
    }


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 20])
def test_it_is_the_average_by_tokens_and_goes_as_far_as_the_longest_session(count):
    sessions = [session(i) for i in range(count)]
    facts, found = merged_by([Worker(*s) for s in sessions])
    tokens = [f.tokens for f, _ in sessions]
    assert (facts.tokens, facts.longest, facts.excluded) == (sum(tokens), max(tokens), {})
    assert facts.included == tuple(f.included[0] for f, _ in sessions)
    top = max(np.abs(now[name] - BASE[name]).max() for _, now in sessions for name in BASE)
    for name, value in weighted(sessions).items():
        assert found[name].shape == SHAPES[name] and found[name].dtype == np.float32
        # A rounding when handed in and one on each level, half a unit each; the whole is stretched by at most two here.
        # Adding to the base rounds, too.
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=3 * 2 * top / 65534 + 1e-6)


@pytest.mark.parametrize(
    ("tokens", "steps", "reason"), [(100, 7, "7 optimizer steps, fewer than 8"), (0, 8, "no tokens")]
)
def test_a_session_that_would_spoil_the_average_is_named_and_left_out(tokens, steps, reason):
    facts = session_facts("w", tokens, steps, min_steps=8)
    assert facts.included == () and reason in facts.excluded["w"]


def test_no_worker_reads_more_than_one_delta_on_any_level_however_many_there_are(monkeypatch):
    monkeypatch.setattr(merge_module, "BLOCK", 512)  # many to a slice, as in a drafter of real size
    count = FAN_IN**2
    workers = [Worker(*session(i, tokens=100)) for i in range(count)]
    merged_by(workers)
    one = sum(part.values.nbytes for part in workers[0].made[:FAN_IN])
    assert one == 2 * SIZE, "16 bits a number"
    assert max(read for worker in workers for read in worker.reads) < one * (1 + 1 / FAN_IN)
    assert max(len(worker.reads) for worker in workers) <= 2, "nobody averages more than a slice of each level"
    assert sum(len(worker.reads) == 2 for worker in workers) == FAN_IN, "the second level is dealt out, too"


def test_the_order_of_arrival_changes_no_bit():
    parts = [hand_in(*session(i), BASE, 1)[0] for i in range(4)]
    first = average_slice(parts, last=True)
    for order in itertools.permutations(parts):
        again = average_slice(order, last=True)
        assert again.facts == first.facts and (again.values == first.values).all()
        assert (again.scales == first.scales).all()


@pytest.mark.parametrize("where", [("fc", 0), ("up", -1)])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_broken_number_anywhere_leaves_its_worker_out_of_every_slice(where, number):
    sessions = [session(i) for i in range(9)]
    sessions[4][1][where[0]].reshape(-1)[where[1]] = number
    facts, found = merged_by([Worker(*s) for s in sessions])
    assert facts.excluded == {"w04": f"{where[0]} is not finite"}
    others, without = merged_by([Worker(*s) for i, s in enumerate(sessions) if i != 4])
    assert facts.included == others.included and facts.tokens == others.tokens
    for name, value in without.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)


def test_what_is_left_out_or_did_not_change_changes_nothing():
    left_out, found = merged_by([Worker(*session(0, steps=3)), Worker(*session(1, steps=7))])
    assert (left_out.included, set(left_out.excluded)) == ((), {"w00", "w01"})
    facts, _ = session(0)
    _, same = merged_by([Worker(facts, {name: value.copy() for name, value in BASE.items()})])
    assert not any(value.any() for value in (*found.values(), *same.values()))
    zero = {name: np.zeros_like(value) for name, value in BASE.items()}
    (part,) = hand_in(facts, {name: value + np.float32(1e-42) for name, value in zero.items()}, zero, 1)
    assert not part.values.any() and np.isfinite(part.scales).all()


def test_slices_that_do_not_belong_together_are_refused():
    one, other = hand_in(*session(0), BASE, 1)[0], hand_in(*session(1), BASE, 2)[0]
    with pytest.raises(ValueError, match="w00, w01 differ in length"):
        average_slice([one, other], last=True)
    with pytest.raises(ValueError, match="once per merge"):
        average_slice([one, one], last=True)


FIRST, SERVED, NEW, NEWER = ({"w": np.full(2, n, np.float32)} for n in range(4))
HELD = DrafterVersions(NEW, SERVED, FIRST)
"""Of a run that has published once, and has a candidate that was judged and not published."""
MERGED = HELD.merged(NEWER)


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        (MERGED, DrafterVersions(NEWER, SERVED, FIRST, to_judge=True)),
        (MERGED.judged(), DrafterVersions(NEWER, SERVED, FIRST)),
        (HELD.export(), DrafterVersions(NEW, SERVED, FIRST, exported=NEW)),
        (HELD.export().merged(NEWER), DrafterVersions(NEWER, SERVED, FIRST, exported=NEW, to_judge=True)),
        (HELD.export().merged(NEWER).published(), DrafterVersions(NEWER, NEW, FIRST, to_judge=True)),
        (MERGED.export().published(), DrafterVersions(NEWER, NEWER, FIRST)),  # nothing else to judge
        (MERGED.published(), DrafterVersions(NEWER, NEWER, FIRST)),  # without an export
        (MERGED.export().reverted("served"), DrafterVersions(SERVED, SERVED, FIRST)),
        (MERGED.export().reverted("initial"), DrafterVersions(FIRST, SERVED, FIRST)),
    ],
)
def test_what_follows_an_event(after, wanted):
    assert after == wanted


def test_who_joins_gets_every_version_on_memory_of_its_own():
    sent = pickle.loads(pickle.dumps(DrafterVersions(FIRST, FIRST, FIRST).merged(NEW).export()))
    copy = sent.copied()
    assert copy.served is copy.initial and copy.exported is copy.candidate and copy.to_judge
    assert not np.shares_memory(copy.candidate["w"], sent.candidate["w"])
    assert all((copy.of(which)["w"] == sent.of(which)["w"]).all() for which in ("candidate", "served", "initial"))
