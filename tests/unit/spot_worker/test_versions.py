"""Every transition of the drafter's versions."""

import pickle

import numpy as np
import pytest

from verl_tlt.spot_worker.versions import DrafterVersions

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
