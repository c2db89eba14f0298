"""verl's actor worker with a tap: hidden states from old-log-prob, verifier weights from the weight sync.

The tap lives in the worker subclass, which the TLT trainer alone installs; an engine registered under a vendor key
would replace the engine in every process, with the flag or without.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_tlt.actor.adapter import Adapter, Untapped
from verl_tlt.actor.tap import ROW, HiddenStateTap, response_lengths
from verl_tlt.actor.windows import choose_window, select_for_tap, split
from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter import VerifierWeights, to_numpy16
from verl_tlt.messages.training import TappedStates, TapReady, VerifierArrays

VERIFIER_PARTS = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "model.norm.weight"}
"""The policy's parts the drafter shares, by the end of their Hugging Face names."""


def adapt(engine: Any) -> Adapter:
    """The adapter for one of verl's engines.

    Raises:
        Untapped: there is none for it, or for how it splits its work.
    """
    strategy = engine.engine_config.strategy
    if strategy in ("fsdp", "fsdp2"):
        from verl_tlt.actor.fsdp_adapter import FSDPAdapter

        return FSDPAdapter(engine)
    if strategy == "megatron":
        from verl_tlt.actor.megatron_adapter import MegatronAdapter

        return MegatronAdapter(engine)
    raise Untapped(f"actor_rollout_ref.actor.strategy={strategy} has no hidden-state tap.")


class TLTTrainingWorker(TrainingWorker):
    """The actor's training worker: chooses sequences before the old-log-prob forward and lets the tap copy them."""

    tap: HiddenStateTap | None = None
    tap_budget = 0
    tap_window = 0
    tap_seen = 0

    def infer_batch(self, data: Any) -> Any:
        """As verl's; `data` is a TensorDict with jagged `input_ids` [B, L_b]."""
        reference = tu.get(data, "no_lora_adapter", False)  # a LoRA actor also answers for the reference policy
        if self.tap is None or reference or "input_ids" not in data:
            return super().infer_batch(data)
        lengths = data["input_ids"].offsets().diff().tolist()
        rng = random.Random(self.tap_seen)  # the same on every rank that computes this batch
        self.tap_seen += 1
        rows = select_for_tap(lengths, self.tap_budget, rng, self.tap_window)
        # The response is what ends a row; verl pads nothing into jagged ids.
        prompts = [n - r for n, r in zip(lengths, response_lengths(data), strict=True)]
        self.tap.arm({row: choose_window(lengths[row], prompts[row], self.tap_window, rng) for row in rows})
        data[ROW] = torch.arange(len(lengths))
        return super().infer_batch(data)


class TLTActorWorker(ActorRolloutRefWorker):
    """Adds `tlt_setup`, `tlt_take` and the capture of verifier weights to verl's hybrid worker."""

    actor_worker_cls = TLTTrainingWorker
    _tlt_verifier_weights: dict[str, torch.Tensor] | None = None
    _tlt_verifier_seen = False
    _tlt_captures = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tlt_setup(self, config: TLTConfig, aux_layers: list[int]) -> TapReady:
        """Install the tap on this rank's engine.

        Args:
            config: all settings.
            aux_layers: layer inputs the drafter wants.
        """
        self._tlt_dtype = torch.float16 if dtype_name(self.config.rollout.dtype) == "float16" else torch.bfloat16
        try:
            adapter = adapt(self.actor.engine)
        except Untapped as why:
            return TapReady(group=0, untapped=str(why))
        self.actor.tap = HiddenStateTap(adapter, aux_layers, self._tlt_dtype)
        self.actor.tap_budget = config.buffer.tokens_per_step
        self.actor.tap_window = config.buffer.window
        self._tlt_captures = True
        return TapReady(self.actor.engine.get_data_parallel_rank())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_take(self, shares: Sequence[int]) -> TappedStates:
        """Hand over what the last old-log-prob forward was tapped for.

        Args:
            shares: for each rank, among how many spot workers its sequences are to be shared.
        """
        tap = self.actor.tap
        assert tap is not None
        taken = tap.take()
        errors, tap.errors = tap.errors, 0
        weights, self._tlt_verifier_weights = self._tlt_verifier_weights, None
        arrays = VerifierArrays(**{part: to_numpy16(tensor) for part, tensor in weights.items()}) if weights else None
        return TappedStates(
            shards=tuple(ray.put(share) for share in split(taken, shares[self.rank])),
            verifier_weights=None if arrays is None else ray.put(arrays),
            seconds=tap.seconds,
            errors=errors,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """As verl's; the parts the drafter shares are copied to the host as they stream past."""
        if not self._tlt_captures:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        engine = self.actor.engine
        kept: dict[str, torch.Tensor] = {}
        adapter_alone = False
        original = engine.get_per_tensor_param

        def captured(*args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
            nonlocal adapter_alone
            params, peft = original(*args, **kwargs)
            adapter_alone = peft is not None
            return self._tlt_capture(params, kept), peft

        engine.get_per_tensor_param = captured
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            del engine.get_per_tensor_param  # the instance attribute; the class's method shows again
            if {"embed", "norm"} <= kept.keys():
                kept.setdefault("lm_head", kept["embed"])  # tied embeddings stream once
                self._tlt_verifier_weights, self._tlt_verifier_seen = kept, True
            elif adapter_alone and not self._tlt_verifier_seen:
                # With LoRA and a rollout that loaded the base itself, none of it ever streams past, nor changes.
                self._tlt_verifier_weights, self._tlt_verifier_seen = self._tlt_base_parts(), True

    def _tlt_base_parts(self) -> dict[str, torch.Tensor]:
        parts = VerifierWeights.from_policy_dir(self.actor.engine.model_config.local_path)
        return {part: getattr(parts, part).to("cpu", self._tlt_dtype) for part in VERIFIER_PARTS}

    def _tlt_capture(
        self, params: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in params:
            for part, suffix in VERIFIER_PARTS.items():
                if name.endswith(suffix) and ".layers." not in name:
                    kept[part] = tensor.detach().to("cpu", self._tlt_dtype, copy=True)
            yield name, tensor


class TLTDetachActorWorker(TLTActorWorker, DetachActorWorker):
    """The same for verl's worker of `separate_async`, which can set the policy aside and take it back."""
