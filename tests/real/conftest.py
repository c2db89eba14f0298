"""The real policy and a head for it; without the policy nothing here runs."""

import pytest

from benchmarks.real_policy.head import head_facts, measured, warm_up
from benchmarks.real_policy.job import PLACE, real_assets
from verl_cpu.environment import CPU_ENGINE


@pytest.fixture(scope="session", autouse=True)
def cpu_engines():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENGINE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def assets():
    if not (PLACE / "policy").exists():
        pytest.skip("`python -m benchmarks.real_policy` makes the policy, which is not here.")
    return real_assets(PLACE)


WARM_UP_STEPS = 24
"""Optimizer steps of the tests' own head: enough that some of its drafts are accepted."""


@pytest.fixture(scope="session")
def warmed(assets, tmp_path_factory):
    """A head of few optimizer steps, made by the command in a folder of its own."""
    folder = tmp_path_factory.mktemp("warmed")
    for name in ("policy", ".policy.recipe"):
        (folder / name).symlink_to(PLACE / name)
    took = warm_up(folder, folder / "drafter", 48, ("--max-steps", str(WARM_UP_STEPS)))
    return folder / "drafter", {**took, **measured(folder)}


@pytest.fixture(scope="session")
def drafter(request):
    """The head worth serving, where there is one, else the one of few steps, which takes minutes."""
    return PLACE / "drafter" if head_facts(PLACE) else request.getfixturevalue("warmed")[0]
