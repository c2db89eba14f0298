"""verl's actor worker with a tap: hidden states from old-log-prob, verifier weights from the weight sync.

The tap is in a subclass of the worker, which the TLT trainer alone installs; an engine registered under a vendor key
would replace the engine in every process, with the flag or without.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import ray
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_tlt.actor.adapters import adapt
from verl_tlt.actor.tap import (
    ROW,
    HiddenStateTap,
    VerifierCapture,
    choose_window,
    response_lengths,
    select_for_tap,
    shards_by_worker,
)
from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter import VerifierWeights, policy_shape
from verl_tlt.errors import DrafterError
from verl_tlt.messages.training import TappedStates, TapReady

if TYPE_CHECKING:
    from tensordict import TensorDict


class TLTTrainingWorker(TrainingWorker):
    """The actor's training worker: chooses sequences before the old-log-prob forward and has the tap copy them."""

    tap: HiddenStateTap | None = None
    tap_budget = 0
    """Tokens to capture of the next batch for each rank that computes it, and so for each spot worker."""
    tap_window = 0
    batches_tapped = 0

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """As verl's; `input_ids` in `data` are jagged [B, L_b]."""
        reference = tu.get(data, "no_lora_adapter", False)  # a LoRA actor also answers for the reference policy
        if self.tap is not None and not reference and "input_ids" in data:
            with self.tap.contained():
                self._choose(data, self.tap)
        return super().infer_batch(data)

    def _choose(self, data: TensorDict, tap: HiddenStateTap) -> None:
        """Have the tap record some rows of this batch, the same on every rank that computes it."""
        lengths = data["input_ids"].offsets().diff().tolist()
        rng = random.Random(self.batches_tapped)
        self.batches_tapped += 1
        budget = self.tap_budget * (self.world_size // self.engine.get_data_parallel_size())
        window = min(self.tap_window, budget)
        rows = select_for_tap(lengths, budget, rng, window)
        # The response is what ends a row; verl pads nothing into jagged ids.
        prompts = [n - r for n, r in zip(lengths, response_lengths(data), strict=True)]
        tap.arm({row: choose_window(lengths[row], prompts[row], window, rng) for row in rows})
        data[ROW] = torch.arange(len(lengths))
        tap.count(data)


class TLTActorWorker(DetachActorWorker):
    """Adds `tlt_setup`, `tlt_take` and the copying of verifier weights to verl's hybrid worker.

    `DetachActorWorker` is that worker with methods to set the policy aside and take it back, for `separate_async`.
    """

    actor_worker_cls = TLTTrainingWorker
    _tlt_capture: VerifierCapture | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_setup(
        self, config: TLTConfig, aux_layers: list[int], capture_ranks: Collection[int], counts_tokens: bool = False
    ) -> TapReady:
        """Install the tap on this rank's engine; `capture_ranks` copy the verifier weights of the coming sync."""
        dtype = torch.float16 if dtype_name(self.config.rollout.dtype) == "float16" else torch.bfloat16
        try:
            adapter = adapt(self.actor.engine)
        except DrafterError as why:
            return TapReady(group=0, untapped=str(why))
        self.actor.tap = HiddenStateTap(adapter, aux_layers, dtype)
        self.actor.tap_budget = config.buffer.first_tokens
        self.actor.tap_window = config.buffer.window
        policy = policy_shape(self.actor.engine.model_config.local_path)
        self.actor.tap.counts_tokens = policy.vocab_size if counts_tokens else 0
        self._tlt_capture = VerifierCapture(dtype, ray.put, policy.tied, policy.norm_offset)
        self._tlt_capture.armed = self.rank in capture_ranks
        return TapReady(self.actor.engine.get_data_parallel_rank())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_take(self, shares: Sequence[int], capture_ranks: Collection[int], tokens: int) -> TappedStates:
        """Hand over the last old-log-prob forward's hidden states, and the verifier weights of a sync before it.

        `shares`: spot workers that each rank shares its sequences among; `capture_ranks` are of the next weight sync,
        `tokens` those to capture for each worker in the next forward.
        """
        self.actor.tap_budget = tokens
        tap, capture = self.actor.tap, self._tlt_capture
        assert tap is not None and capture is not None
        taken = tap.take()
        errors, tap.errors = tap.errors, 0
        counts, tap.token_counts = tap.token_counts, None
        captured = capture.take()
        capture.armed |= self.rank in capture_ranks
        return TappedStates(
            shards=tuple(ray.put(share) for share in shards_by_worker(taken, shares[self.rank])),
            verifier_weights=captured.reference,
            seconds=tap.seconds,
            errors=errors + captured.errors,
            sync_seconds=captured.seconds,
            token_counts=counts,
        )

    # Changes verl: patches/README.md#what-policy-and-drafter-share-is-copied-while-weights-are-synced
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> object:
        """As verl's; the parts the drafter shares are copied as they stream past, where that was asked for."""
        capture = self._tlt_capture
        if capture is None or not capture.armed:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        engine = self.actor.engine
        adapter_alone = False
        original = engine.get_per_tensor_param

        def captured(*args: object, **kwargs: object) -> tuple[Iterator[tuple[str, torch.Tensor]], object]:
            nonlocal adapter_alone
            params, peft = original(*args, **kwargs)
            adapter_alone = peft is not None
            return capture.tee(params), peft

        engine.get_per_tensor_param = captured
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            del engine.get_per_tensor_param  # the instance attribute; the class's method shows again
            path = engine.model_config.local_path
            capture.finish((lambda: vars(VerifierWeights.from_policy_dir(path))) if adapter_alone else None)
