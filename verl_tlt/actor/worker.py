"""verl's actor worker with a tap: hidden states from old-log-prob, verifier weights from the weight sync.

The tap lives in the worker subclass, which the TLT trainer alone installs; an engine registered under a vendor key
would replace the engine in every process, with the flag or without.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import ray
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_tlt.actor.adapter import Adapter, Untapped
from verl_tlt.actor.tap import ROW, HiddenStateTap, response_lengths
from verl_tlt.actor.verifier_capture import VERIFIER_PARTS, VerifierCapture
from verl_tlt.actor.windows import choose_window, select_for_tap, split
from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter import VerifierWeights, policy_shape
from verl_tlt.messages.training import TappedStates, TapReady


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
    """Adds `tlt_setup`, `tlt_take` and the copying of verifier weights to verl's hybrid worker."""

    actor_worker_cls = TLTTrainingWorker
    _tlt_capture: VerifierCapture | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tlt_setup(self, config: TLTConfig, aux_layers: list[int], captors: Collection[int]) -> TapReady:
        """Install the tap on this rank's engine.

        Args:
            config: all settings.
            aux_layers: layer inputs the drafter wants.
            captors: ranks that copy the verifier weights out of the coming weight sync.
        """
        dtype = torch.float16 if dtype_name(self.config.rollout.dtype) == "float16" else torch.bfloat16
        try:
            adapter = adapt(self.actor.engine)
        except Untapped as why:
            return TapReady(group=0, untapped=str(why))
        self.actor.tap = HiddenStateTap(adapter, aux_layers, dtype)
        self.actor.tap_budget = config.buffer.first_tokens
        self.actor.tap_window = config.buffer.window
        tied = policy_shape(self.actor.engine.model_config.local_path).tied
        self._tlt_capture = VerifierCapture(dtype, ray.put, tied)
        self._tlt_capture.armed = self.rank in captors
        return TapReady(self.actor.engine.get_data_parallel_rank())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_take(self, shares: Sequence[int], captors: Collection[int], tokens: int) -> TappedStates:
        """Hand over what the last old-log-prob forward was tapped for, and what a weight sync before it was copied for.

        Args:
            shares: for each rank, among how many spot workers its sequences are to be shared.
            captors: ranks that copy the verifier weights out of the next weight sync.
            tokens: to capture in the next forward.
        """
        self.actor.tap_budget = tokens
        tap, capture = self.actor.tap, self._tlt_capture
        assert tap is not None and capture is not None
        taken = tap.take()
        errors, tap.errors = tap.errors, 0
        captured = capture.take()
        capture.armed |= self.rank in captors
        return TappedStates(
            shards=tuple(ray.put(share) for share in split(taken, shares[self.rank])),
            verifier_weights=captured.reference,
            seconds=tap.seconds,
            errors=errors + captured.errors,
            sync_seconds=captured.seconds,
            sync_bytes=captured.nbytes,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """As verl's; the parts the drafter shares are copied to the host as they stream past, where that was asked."""
        capture = self._tlt_capture
        if capture is None or not capture.armed:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        engine = self.actor.engine
        adapter_alone = False
        original = engine.get_per_tensor_param

        def captured(*args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
            nonlocal adapter_alone
            params, peft = original(*args, **kwargs)
            adapter_alone = peft is not None
            return capture.tee(params), peft

        engine.get_per_tensor_param = captured
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            del engine.get_per_tensor_param  # the instance attribute; the class's method shows again
            capture.finish(self._tlt_base_parts if adapter_alone else None)

    def _tlt_base_parts(self) -> dict[str, torch.Tensor]:
        parts = VerifierWeights.from_policy_dir(self.actor.engine.model_config.local_path)
        return {part: getattr(parts, part) for part in VERIFIER_PARTS}


class TLTDetachActorWorker(TLTActorWorker, DetachActorWorker):
    """The same for verl's worker of `separate_async`, which can set the policy aside and take it back."""
