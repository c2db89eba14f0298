"""Fixtures of the engine tests: tiny models, and vLLM engines that run in this process on the CPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # policies.py, named in additional_config

from tiny_engine import SMALL, Engine, V, build_drafter_dir, build_target

K_MAX = 3
LOST = "Missing cached draft probabilities"


def part_of(family: str, part: str) -> str:
    """Directory name of a family's `target`, `good` or `bad`; without a prefix it is the Qwen3's."""
    return part if family == "qwen3" else f"{family}-{part}"


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


class _Messages(logging.Handler):
    """Keeps what is logged. pytest's own handler sits on the root logger, whose handlers' levels libraries change."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lost: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if LOST in record.getMessage():
            self.lost.append(record.getMessage())


@pytest.fixture(autouse=True)
def lost_probabilities() -> Iterator[list[str]]:
    """Fails a test in whose log vLLM admits that a draft lost its probabilities, unless the test clears the list."""
    handler, runner_log = _Messages(), logging.getLogger("vllm.v1.worker.gpu_model_runner")
    runner_log.addHandler(handler)
    yield handler.lost
    runner_log.removeHandler(handler)
    assert not handler.lost


@pytest.fixture(scope="session")
def engine_of(models) -> Callable[..., Any]:
    """Context manager: `with engine_of("good", policy="module:function", ...) as engine`; drafter None: stock vLLM."""
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout import utils

    utils.set_death_signal = lambda: None  # it would end pytest itself when pytest's parent is the container's init

    @contextmanager
    def start(
        drafter: str | None = "good",
        family: str = "qwen3",
        policy: str | None = None,
        speculation: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Engine]:
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.server.engine_arguments import engine_kwargs

        arguments: dict[str, Any] = dict(
            model=str(models[part_of(family, "target")]), skip_tokenizer_init=True, dtype="float32", seed=0,
            enforce_eager=True, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False,
            distributed_executor_backend="uni", disable_log_stats=False,
        )  # fmt: skip
        if drafter is not None:
            settings = {"max_draft_length": K_MAX, "policy": "fixed", **(speculation or {})}
            tlt = TLTConfig.from_dict({"speculation": settings})
            own = str(models[part_of(family, drafter)])
            ours = engine_kwargs(tlt, own, SimpleNamespace(enforce_eager=True), {})
            if policy:
                ours["additional_config"]["tlt"]["policy_factory"] = policy
            arguments |= {**ours, "worker_extension_cls": "verl_tlt.vllm_worker.extension.TLTWorkerExtension"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            engine = Engine(LLM(**(arguments | kwargs)))
            try:
                yield engine
            finally:
                engine.close()

    return start


@pytest.fixture(scope="session")
def stock_tokens(engine_of) -> dict[str, list[list[int]]]:
    """What stock vLLM decodes greedily for `Engine.generate(8, 96)`, by family."""
    found = {}
    for family in ("qwen3", "llama"):
        with engine_of(drafter=None, family=family) as engine:
            found[family] = engine.generate(8, 96)
    return found
