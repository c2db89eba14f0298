"""vLLM's engine as verl's rollout server starts it, but without Ray, trainer and HTTP: for the commands."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from verl.workers.rollout.utils import get_vision_placeholder_token_ids
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


class Launch(vLLMHttpServer):
    """verl's server up to the moment at which it starts its engine: its own code makes the engine's arguments.

    `further` makes more arguments of vLLM's from the user's (`rollout.engine_kwargs.vllm`), which they overrule.
    `extension` is the class that vLLM mixes into its workers; None: verl's.
    """

    def __init__(
        self,
        rollout: DictConfig,
        model: DictConfig,
        further: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        extension: str | None = None,
    ) -> None:
        self.config, self.model_config = self._init_config(rollout), self._init_model_config(model)
        self._validate_configs()
        self.nnodes, self.node_rank, self.replica_rank = 1, 0, 0
        self._disaggregation_role, self._further, self._extension = "null", further, extension

    def _should_profile(self) -> bool:
        return False

    def _preprocess_engine_kwargs(self, kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(kwargs)
        kwargs.update(self._further(kwargs))

    def _get_worker_extension_cls(self) -> str:
        return self._extension or super()._get_worker_extension_cls()

    async def run_server(self, args: argparse.Namespace) -> None:
        """Keep what `launch_server` would start the engine with."""
        self.arguments = AsyncEngineArgs.from_cli_args(args)

    async def launched(self) -> AsyncLLM:
        await self.launch_server()
        engine = AsyncLLM.from_engine_args(self.arguments)
        if (tokenizer := self.model_config.tokenizer) is not None:  # verl's, too: what may not be sampled
            banned = get_vision_placeholder_token_ids(self.model_config.processor)
            limits = {"vocab_size": len(tokenizer), "banned_token_ids": banned}
            await engine.collective_rpc("monkey_patch_model", kwargs=limits)
        return engine
