"""Every transition of the drafter's versions, one test each."""

import pickle

import numpy as np
import pytest

from verl_tlt.spot_worker.versions import DrafterVersions


def parameters(number):
    return {"w": np.full(2, number, np.float32)}


FIRST, SERVED, NEW, NEWER = (parameters(n) for n in range(4))


@pytest.fixture
def held():
    """A run that has published once, and has a candidate that was judged and not published."""
    return DrafterVersions(NEW, SERVED, FIRST)


def test_what_is_merged_is_the_candidate_and_waits_to_be_judged(held):
    assert held.merged(NEWER) == DrafterVersions(NEWER, SERVED, FIRST, to_judge=True)
    assert held.merged(NEWER).judged() == DrafterVersions(NEWER, SERVED, FIRST)


def test_what_is_exported_is_kept_until_it_is_published(held):
    assert held.export() == DrafterVersions(NEW, SERVED, FIRST, exported=NEW)
    assert held.export().merged(NEWER).exported is NEW


def test_what_was_exported_is_what_is_served_and_a_newer_candidate_still_waits(held):
    assert held.export().merged(NEWER).published() == DrafterVersions(NEWER, NEW, FIRST, to_judge=True)
    assert held.merged(NEWER).export().published() == DrafterVersions(NEWER, NEWER, FIRST), "nothing else to judge"


def test_without_an_export_the_candidate_is_published(held):
    assert held.merged(NEWER).published() == DrafterVersions(NEWER, NEWER, FIRST)


@pytest.mark.parametrize(("which", "candidate"), [("served", SERVED), ("initial", FIRST)])
def test_who_reverts_gives_the_candidate_up(held, which, candidate):
    assert held.merged(NEWER).export().reverted(which) == DrafterVersions(candidate, SERVED, FIRST)


def test_who_joins_gets_every_version_on_memory_of_its_own():
    sent = pickle.loads(pickle.dumps(DrafterVersions(FIRST, FIRST, FIRST).merged(NEW).export()))
    copy = sent.copied()
    assert copy.served is copy.initial and copy.exported is copy.candidate and copy.to_judge
    assert not np.shares_memory(copy.candidate["w"], sent.candidate["w"])
    assert all((copy.of(which)["w"] == sent.of(which)["w"]).all() for which in ("candidate", "served", "initial"))
