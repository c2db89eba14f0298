"""Fixtures of the engine tests: tiny models, and vLLM engines that run in this process on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # policies.py, named in additional_config

from tiny_engine import Engine, build_drafter_dir, build_target

K_MAX = 3


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Directories: `target`, `good` and `bad` (drafters of it)."""
    root = tmp_path_factory.mktemp("models")
    build_target(root / "target")
    build_drafter_dir(root / "good", root / "target", informed=True)
    build_drafter_dir(root / "bad", root / "target", informed=False)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def engine_of(models) -> Callable[..., Any]:
    """Context manager: `with engine_of("good", policy="module:function", ...) as engine`; drafter None: stock vLLM."""
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout import utils

    utils.set_death_signal = lambda: None  # it would end pytest itself when pytest's parent is the container's init

    @contextmanager
    def start(
        drafter: str | None = "good",
        policy: str | None = None,
        speculation: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Engine]:
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.rollout.settings import engine_kwargs

        arguments: dict[str, Any] = dict(
            model=str(models["target"]), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
            max_model_len=512, max_num_seqs=32, enable_prefix_caching=False, distributed_executor_backend="uni",
            disable_log_stats=False,
        )  # fmt: skip
        if drafter is not None:
            settings = {"max_draft_length": K_MAX, "policy": "fixed", **(speculation or {})}
            tlt = TLTConfig.from_dict({"speculation": settings})
            ours = engine_kwargs(tlt, str(models[drafter]), SimpleNamespace(enforce_eager=True), {})
            if policy:
                ours["additional_config"]["tlt"]["policy_factory"] = policy
            arguments |= {**ours, "worker_extension_cls": "verl_tlt.rollout.extension.TLTWorkerExtension"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            engine = Engine(LLM(**(arguments | kwargs)))
            try:
                yield engine
            finally:
                engine.close()

    return start


@pytest.fixture(scope="session")
def stock_tokens(engine_of) -> dict[int, list[list[int]]]:
    """What stock vLLM decodes greedily, by longest length, for `Engine.generate(8, length)`."""
    with engine_of(drafter=None) as engine:
        return {tokens: engine.generate(8, tokens) for tokens in (96,)}
