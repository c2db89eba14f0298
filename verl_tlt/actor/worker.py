"""verl's actor worker with hidden-state capture in old-log-prob, and verifier weights from the weight sync.

The capture is in a subclass of the worker, which the TLT trainer alone installs. An engine registered under a vendor
key would replace the engine in every process, with the flag or without.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import ray
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_tlt.actor.adapters import adapt
from verl_tlt.actor.chosen_sequences import capture_turns, choose_window, select_sequences, turn_budget
from verl_tlt.actor.hidden_states import ROW, HiddenStateCapture, response_lengths
from verl_tlt.actor.verifier_weights import Captured, VerifierCapture
from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter import policy_shape
from verl_tlt.errors import DrafterError
from verl_tlt.messages.training import CapturedStates, CaptureReady

if TYPE_CHECKING:
    from tensordict import TensorDict


class TLTTrainingWorker(TrainingWorker):
    """The actor's training worker: has hidden states of sequences copied that it chooses before the forward."""

    capture: HiddenStateCapture | None = None
    capture_budget = 0
    """Tokens to capture of a batch that this rank computes, where it is its turn."""
    capture_turns = 1
    """Data-parallel ranks take turns: each captures from one of so many batches."""
    capture_window = 0
    batches_seen = 0

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """As verl's; `input_ids` in `data` are jagged [B, L_b]."""
        reference = tu.get(data, "no_lora_adapter", False)  # a LoRA actor also answers for the reference policy
        if self.capture is not None and not reference and "input_ids" in data:
            with self.capture.contained():
                self._choose(data, self.capture)
        return super().infer_batch(data)

    def _choose(self, data: TensorDict, capture: HiddenStateCapture) -> None:
        """Record some rows of this batch, the same on every rank that computes it."""
        turn = self.batches_seen
        self.batches_seen += 1  # first: a rank that fails below goes on with the same rows as the others
        lengths = data["input_ids"].offsets().diff().tolist()
        rng = random.Random(turn)
        budget = turn_budget(self.capture_budget, self.capture_turns, turn, self.engine.get_data_parallel_rank())
        window = min(self.capture_window, self.capture_budget)
        rows = select_sequences(lengths, budget, rng, window)
        # The response is what ends a row; verl pads nothing into jagged ids.
        prompts = [n - r for n, r in zip(lengths, response_lengths(data), strict=True)]
        capture.arm({row: choose_window(lengths[row], prompts[row], window, rng) for row in rows})
        data[ROW] = torch.arange(len(lengths))
        capture.count(data)


class TLTActorWorker(DetachActorWorker):
    """Adds `tlt_setup`, `tlt_take`, `tlt_stop` and the copying of verifier weights to verl's hybrid worker.

    `DetachActorWorker` is that worker with methods to set the policy aside and take it back, for `separate_async`.
    """

    actor_worker_cls = TLTTrainingWorker
    _tlt_verifier: VerifierCapture | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_setup(self, config: TLTConfig, aux_layers: list[int], counts_tokens: bool = False) -> CaptureReady:
        """Capture hidden states on this rank from now on; the first rank copies the verifier weights in every sync."""
        dtype = torch.float16 if dtype_name(self.config.rollout.dtype) == "float16" else torch.bfloat16
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        place = {"node": context.get_node_id(), "device": gpus[0] if gpus else ""}
        try:
            adapter = adapt(self.actor.engine)
        except DrafterError as why:
            return CaptureReady(group=0, refusal=str(why), **place)
        engine = self.actor.engine
        self.actor.capture = HiddenStateCapture(adapter, aux_layers, dtype)
        tokens = config.buffer.tokens_per_step or 0
        ranks = engine.get_data_parallel_size()
        turns = capture_turns(tokens, ranks, config.buffer.window)
        self.actor.capture_turns = turns
        self.actor.capture_budget = tokens * turns // ranks
        self.actor.capture_window = config.buffer.window
        policy = policy_shape(engine.model_config.local_path)
        self.actor.capture.counts_tokens = policy.vocab_size if counts_tokens else 0
        if self.rank == 0:
            self._tlt_verifier = VerifierCapture(dtype, ray.put, policy.tied, policy.norm_offset)
        return CaptureReady(engine.get_data_parallel_rank(), **place)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_take(self, counts: bool = False) -> CapturedStates:
        """Hand over the last old-log-prob forward's hidden states, and the verifier weights of the sync before it.

        `counts`: hand over also how often each token was in the first rollout's responses; the trainer asks for it
        until it has it.
        """
        capture = self.actor.capture
        assert capture is not None
        taken = capture.take()
        errors = capture.errors
        capture.errors = 0
        if not counts:
            capture.token_counts = None
        captured = Captured() if self._tlt_verifier is None else self._tlt_verifier.take()
        return CapturedStates(
            shards=ray.put(taken),
            verifier_weights=captured.reference,
            seconds=capture.seconds,
            errors=errors + captured.errors,
            sync_seconds=captured.seconds,
            token_counts=capture.token_counts,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_release(self) -> None:
        """Return GPU memory that nothing uses, as verl does in a weight sync: for the spot trainer."""
        torch.cuda.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tlt_stop(self) -> None:
        """Capture nothing any more on this rank."""
        if self.actor.capture is not None:
            self.actor.capture.take()  # its hooks stay, and record nothing from now on
        self.actor.capture = self._tlt_verifier = None

    # Changes verl: patches/README.md#what-policy-and-drafter-share-is-copied-while-weights-are-synced
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> object:
        """As verl's; on the first rank the parts that the drafter shares are copied as they stream past."""
        capture = self._tlt_verifier
        if capture is None:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        engine = self.actor.engine
        original = engine.get_per_tensor_param

        def captured(*args: object, **kwargs: object) -> tuple[Iterator[tuple[str, torch.Tensor]], object]:
            params, peft = original(*args, **kwargs)
            if peft is not None:  # LoRA: the sync brings the adapter alone, and the policy's parts do not change
                return params, peft
            return capture.tee(params), peft

        engine.get_per_tensor_param = captured
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            del engine.get_per_tensor_param  # the instance attribute; the class's method shows again
            capture.finish()
