"""Fixtures of the engine tests: tiny models, and vLLM engines that run in this process on the CPU."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # policies.py, named in additional_config

from recorded import end_ray
from shared_engines import SharedEngines, part_of

from benchmarks.lossless.tiny_policy import SMALL, V, build_drafter_dir, build_target

LOST = "Missing cached draft probabilities"


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Directories: `target`, `good` and `bad` (drafters of it), and the same of other families by `part_of`."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "llama", "qwen3-small", "llama-small"):
        name, _, small = family.partition("-")
        target = root / part_of(family, "target")
        build_target(target, name, SMALL if small else V)
        for drafter in ("good",) if small else ("good", "bad"):
            build_drafter_dir(root / part_of(family, drafter), target, informed=drafter == "good")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(autouse=True)
def lost_probabilities() -> Iterator[list[str]]:
    """Fails a test in whose log vLLM admits that a draft lost its probabilities, unless the test clears the list."""
    lost: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if LOST in record.getMessage():
            lost.append(record.getMessage())
        return True

    runner_log = logging.getLogger("vllm.v1.worker.gpu_model_runner")
    runner_log.addFilter(keep)
    yield lost
    runner_log.removeFilter(keep)
    assert not lost


ENGINES = pytest.StashKey[SharedEngines]()


def look_for_garbage_of_engines_only() -> None:
    """Freeze what is imported by now, for good.

    vLLM freezes all objects of the process after an engine's start and takes that back at its end, and looks through
    all of them for garbage each time.
    """
    from vllm.v1.engine import core

    core.freeze_gc_heap = gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def engine_of(models, pytestconfig) -> SharedEngines:
    """Context manager: `with engine_of("good", policy="module:function", ...) as engine`; drafter None: stock vLLM."""
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout import utils

    utils.set_death_signal = lambda: None  # it would end pytest itself when pytest's parent is the container's init
    look_for_garbage_of_engines_only()
    pytestconfig.stash[ENGINES] = SharedEngines(models)
    return pytestconfig.stash[ENGINES]


LONG = (
    "test_servers",
    "test_compiled",
    "test_standalone_engine",
    "test_warmup",
    "test_hidden_state_ranks",
)
"""Files of more than half a minute, most of it in one go."""


def in_ray(item) -> bool:
    """Whether a test's file uses the cluster of `recorded`."""
    return hasattr(getattr(item, "module", None), "ray_cluster")


def pytest_collection_modifyitems(items) -> None:
    """The files that share a Ray cluster follow each other, and then come long ones: of two processes that take a file
    each, neither is to wait long for the other at the end. Everything else stays in its place."""
    places = [i for i, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ordered = sorted((items[i] for i in places), key=lambda item: (not in_ray(item), item.path.stem not in LONG))
    for i, item in zip(places, ordered, strict=True):
        items[i] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem) -> None:
    """What tests share ends before one that has no use for it: others start a Ray or process groups of their own."""
    engines = item.config.stash.get(ENGINES, None)
    if engines is not None and "engine_of" not in getattr(nextitem, "fixturenames", ()):
        engines.close()
    if in_ray(item) and not in_ray(nextitem):
        end_ray()


@pytest.fixture(scope="session")
def stock_tokens(engine_of) -> list[list[int]]:
    """What stock vLLM decodes greedily for `Engine.generate(8, 96)`."""
    with engine_of(drafter=None) as engine:
        return engine.generate(8, 96)
