"""Methods that verl-tlt adds to vLLM's worker: load a drafter into the running engine, fingerprint it, skip its pass.

vLLM mixes this class into its worker, so each method can be called with `collective_rpc`, which runs between two engine
steps: a drafter is replaced without draining the engine. Draft KV computed before a swap goes stale, which costs
acceptance, never a token. Methods return what went wrong instead of raising: an exception would end the engine.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_tlt.errors import DrafterError
from verl_tlt.messages.rollout import LoadReply
from verl_tlt.upstream.changes import upstream_change
from verl_tlt.vllm_worker import drafter_pass
from verl_tlt.vllm_worker.cuda_graphs import captured_lengths, prepare_capture
from verl_tlt.vllm_worker.draft_probabilities import BrokenDrafts, verify_as_certain
from verl_tlt.vllm_worker.hybrid_states import keep_states_right
from verl_tlt.vllm_worker.live_drafter import LiveDrafter, find_drafter

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = logging.getLogger(__name__)


class TLTWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with four methods of ours. vLLM refuses name clashes with its worker, hence the prefix."""

    tlt_drafter: LiveDrafter | None = None
    tlt_broken: BrokenDrafts | None = None
    tlt_lengths: tuple[int, ...] = ()

    @upstream_change(
        "a vLLM worker is prepared between model load and graph capture",
        replaces=("vllm.v1.worker.gpu_worker:Worker.load_model",),
        symptom="Graphs are captured before a worker extension's methods can be called.",
        cause="`vllm/v1/worker/gpu_worker.py:450` `def load_model` is followed by profiling and capture; an "
        "extension has no method that is called in between.",
        releases="vllm 0.24 to 0.33",
        removed_by="A hook of worker extensions after model load.",
    )
    def __new__(cls, **kwargs: object) -> Self:
        """As verl's; the model runner is prepared as soon as the models are loaded."""
        worker = super().__new__(cls, **kwargs)
        load_model = worker.load_model

        def load(*args: object, **options: object) -> None:
            load_model(*args, **options)
            worker.tlt_prepare(kwargs["vllm_config"])

        worker.load_model = load
        return worker

    def tlt_prepare(self, vllm_config: VllmConfig) -> None:
        """Put into the model runner what the settings in `additional_config["tlt"]` need there."""
        runner, tlt = self.model_runner, (vllm_config.additional_config or {}).get("tlt", {})
        if tlt.get("speculation", {}).get("source") == "both":
            verify_as_certain(runner)
        keep_states_right(runner, vllm_config)
        if find_drafter(runner) is not None:
            self.tlt_drafter = LiveDrafter(runner, vllm_config)
            self.tlt_broken = BrokenDrafts(runner, partial(self.tlt_set_drafting, False))
        if "arms" in tlt:
            self.tlt_lengths = tuple(tlt["arms"])
            prepare_capture(runner, vllm_config, self.tlt_lengths)

    def tlt_load_drafter(self, path: str | None = None) -> dict[str, Any]:
        """Load a file into the live drafter; None: what this server staged. Returns a `LoadReply` as a dict."""
        start = time.perf_counter()
        if self.tlt_drafter is None:  # a pipeline stage without the drafter
            return asdict(LoadReply(ok=True))
        try:
            sums = self.tlt_drafter.load(Path(path) if path else None)
            if self.tlt_broken is not None:
                self.tlt_broken.drafter_loaded()
        except Exception as error:
            logger.error("The drafter %s was not loaded.", path or "of this node", exc_info=error)
            text = str(error) if isinstance(error, DrafterError) else f"{type(error).__name__}: {error}"
            return asdict(LoadReply(ok=False, error=text))
        seconds = time.perf_counter() - start
        graphs = captured_lengths(self.model_runner, self.tlt_lengths)
        return asdict(LoadReply(ok=True, sums=sums, seconds=seconds, full_graphs=graphs))

    def tlt_fingerprint(self) -> str:
        return "" if self.tlt_drafter is None else self.tlt_drafter.fingerprint()

    def tlt_set_drafting(self, enabled: bool) -> str | None:
        return drafter_pass.set_drafting(self.model_runner, enabled)
