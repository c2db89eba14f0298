"""In-process vLLM engines that tests share: asking for the configuration of the last one gives that engine again.

Starting a tiny engine takes longer than most tests run. So an engine is kept until another is asked for (a process
holds one), or until a test follows that needs none. In between it is as after its start: prefix cache, control,
drafter and random numbers begin anew, and what a test changed by `engine.patch` is undone. What only says which policy
chooses, or which of the two drafters is served, is no other configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_engine import Engine

K_MAX = 3
BLOCKS = 256
"""Of the KV cache: enough for all requests at once, where to fill vLLM's gigabyte with zeros takes most of a second."""
OF_THE_POLICY = ("policy", "fixed")
"""Settings of `tlt.speculation` that another policy changes in a running engine."""


def part_of(family: str, part: str) -> str:
    """Directory name of a family's `target`, `good` or `bad`; without a prefix it is the Qwen3's."""
    return part if family == "qwen3" else f"{family}-{part}"


class SharedEngines:
    """`with engines("good", policy="module:function", ...) as engine`; drafter None: stock vLLM.

    Args:
        models: directories of targets and drafters by name.
    """

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = models
        self._kept: tuple[str, Engine] | None = None
        self._lent = False

    @contextmanager
    def __call__(
        self,
        drafter: str | None = "good",
        family: str = "qwen3",
        policy: str | None = None,
        speculation: Mapping[str, Any] | None = None,
        method: str = "eagle3",
        **kwargs: Any,
    ) -> Iterator[Engine]:
        """An engine whose drafter is of this method; `kwargs` go to vLLM."""
        from verl_tlt.drafter.policy import read_model_config
        from verl_tlt.speculation.graph_rules import is_hybrid

        target = self._models[part_of(family, "target")]
        arguments: dict[str, Any] = dict(
            model=str(target), skip_tokenizer_init=not (target / "tokenizer.json").exists(), dtype="float32", seed=0,
            enforce_eager=True, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False,
            distributed_executor_backend="uni", disable_log_stats=False,
        )  # fmt: skip
        hybrid = is_hybrid(read_model_config(target))
        if not hybrid:  # whose states take many more blocks
            arguments["num_gpu_blocks_override"] = BLOCKS
        weights = tlt = None
        if drafter is not None:
            directory = self._models[part_of(family, drafter)]
            weights, ours = directory / "model.safetensors", _ours(directory, speculation, policy, method, hybrid)
            tlt = ours["additional_config"]["tlt"]
            arguments |= ours
        key = _key(family, drafter, speculation, {**kwargs, "method": method})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            if self._lent:  # beside one that is in use: nobody else's
                engine = _start(arguments | kwargs)
                try:
                    yield engine
                finally:
                    engine.close(beside=True)
                return
            begun = self._kept is not None and self._kept[0] == key
            if not begun:
                self.close()
                self._kept = (key, _start(arguments | kwargs))
            engine, self._lent = self._kept[1], True
            sound = False
            try:
                if begun:
                    engine.renew(tlt, weights)
                yield engine
                sound = not engine.llm.llm_engine.has_unfinished_requests()
            finally:
                engine.patch.undo()
                self._lent = False
                if not sound:
                    self.close()

    def close(self) -> None:
        """End the engine that is kept, unless it is in use."""
        if self._kept is not None and not self._lent:
            _, engine = self._kept
            self._kept = None
            engine.close()


def _ours(
    directory: Path, speculation: Mapping[str, Any] | None, policy: str | None, method: str, hybrid: bool
) -> dict[str, Any]:
    """What our server adds to vLLM's arguments for a drafter."""
    from verl_tlt.config import TLTConfig
    from verl_tlt.server.engine_arguments import engine_kwargs
    from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM
    from verl_tlt.upstream.versions import installed, release

    on_v1 = method == "mtp" or (speculation or {}).get("source") == "ngram"
    if on_v1 and (release(installed("vllm") or "") or (0, 0))[:2] >= V2_DRAFTS_FROM:
        pytest.skip("runs with vLLM up to 0.31: MTP heads and n-grams draft on the V1 model runner alone")
    settings = {"max_draft_length": K_MAX, "policy": "fixed", **(speculation or {})}
    tlt = TLTConfig.from_dict({"speculation": settings, "drafter": {"method": method}})
    ours = engine_kwargs(tlt, str(directory), SimpleNamespace(enforce_eager=True), {}, hybrid=hybrid)
    if policy:
        ours["additional_config"]["tlt"]["speculation"]["policy"] = policy
    return {**ours, "worker_extension_cls": "verl_tlt.vllm_worker.extension.TLTWorkerExtension"}


def _key(family: str, drafter: str | None, speculation: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> str:
    """All that a running engine cannot change."""
    own = {k: v for k, v in (speculation or {}).items() if k not in OF_THE_POLICY}
    served = "good or bad" if drafter in ("good", "bad") else drafter
    channels = {k: v for k, v in os.environ.items() if k.startswith("TLT_")}
    return repr((family, served, *(sorted(part.items()) for part in (own, kwargs, channels))))


def _start(arguments: Mapping[str, Any]) -> Engine:
    from vllm import LLM

    return Engine(LLM(**arguments))
