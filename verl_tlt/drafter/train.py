"""Train a drafter in steps that can be stopped between any two of them.

AdamW on the drafter's own parameters, with the loss of `speculators` over `ttt_steps` training-time-test passes (1
trains as EAGLE does; more feed the drafter its own hidden state, as HASS and EAGLE-3 do). Sessions are short, so beta2
is 0.95. The learning rate never falls in a run: the average of recent weights is served. The host waits once a step,
for the loss; it runs no further ahead, for a stop would wait for all that is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from verl_tlt.drafter.build import policy_width
from verl_tlt.drafter.data import ROW_BLOCK, Batch, FedBatch, TrainingSequence, ahead, align, feed_to
from verl_tlt.drafter.policy import Fields
from verl_tlt.drafter.tensor_file import not_finite
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

Tensors = Mapping[str, torch.Tensor]

BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"
STATE = (*_MOMENTS, AVERAGE)
"""What the optimizer holds of each parameter, in its shape: AdamW's moments, and the average of its recent values."""
AVERAGED_STEPS = 50
"""Most optimizer steps that the moving average reaches back. At first it reaches back a ninth of those taken: a new
head's weights of twenty steps ago are worth little."""
LOSS = "kl_div"
"""Name in `speculators.losses`."""
CLIP = 1.0
"""Largest gradient norm."""
_UNROLL_ABOVE = 0.5
"""The next draft position is unrolled once the moving average of the last one's accuracy exceeds this."""
_ACCURACY_DECAY = 0.9
"""Weight of the steps before in this moving average."""
_MAX_EMPTY = 100
"""Batches without a loss that are an error when they come in a row."""


@dataclass(frozen=True)
class StepResult:
    """What one micro-batch gave."""

    loss: float  # summed over the passes, mean over the rows with a loss; NaN or infinite when skipped for it
    tokens: int  # rows with a loss
    acc_by_position: tuple[float, ...]
    """[passes of the step]: share of rows whose argmax at draft position k is the policy's, given that those before
    were."""
    skipped: bool  # the loss or a gradient was not finite and nothing was changed


@dataclass(frozen=True)
class TrainSummary:
    """What `train_until` did."""

    steps: int  # optimizer steps taken
    tokens: int  # rows learned from
    skipped: int  # micro-batches left out because they were not finite
    stopped: bool  # the stop flag ended it, and neither tokens nor data ran out
    loss: float  # mean over the steps; NaN without any


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What is trained and published, by name: everything but the policy's embedding, head and norm."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class DrafterTrainer:
    """Trains a drafter whose verifier weights are filled: the model, its optimizer, its place in the warm-up.

    `learning_rate` holds after a linear warm-up over all sessions. `ttt_steps`: most passes per step. Training begins
    with one, and the next position is unrolled when drafts reach it, for until then a step costs less and teaches as
    much. `trained`: the drafter has learned before, so the average reaches back `AVERAGED_STEPS` from the start.
    """

    def __init__(
        self,
        model: Eagle3DraftModel,
        *,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
        ttt_steps: int = 3,
        trained: bool = False,
    ) -> None:
        self.model = model
        self._trained = trained
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.ttt_steps = ttt_steps
        self.parameters = trainable_parameters(model)
        # Fused: it leaves weights and moments alone where `found_inf` says so, and the host need not know.
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        for p in self.parameters.values():  # before the first step: their memory is part of every session's
            moments = {key: torch.zeros_like(p) for key in _MOMENTS}
            step = torch.zeros((), device=p.device)
            self.optimizer.state[p] = {"step": step, **moments, AVERAGE: p.detach().clone()}
        self.passes = 1  # draft positions that the next step unrolls
        self._accuracy = 0.0  # moving average, at the last of these positions
        self.steps = 0  # optimizer steps taken, over all sessions
        self.skipped = 0  # micro-batches left out because they were not finite, over all sessions
        model.train()

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def step(self, batch: Batch) -> StepResult:
        """Learn from one packed batch; a `DrafterError` where a token is none of the policy's, or no row has a loss."""
        fed = self.feed()(batch)
        if fed.tokens == 0:
            raise DrafterError("No row of this batch has a loss: its sequences lie in prompts or are too short.")
        return self.step_on(fed)

    def feed(self) -> Callable[[Batch], FedBatch]:
        return feed_to(self.device, self.ttt_steps, self.model.verifier_vocab_size)

    def step_on(self, fed: FedBatch) -> StepResult:
        """Learn from a batch that is on the device, or on its way there; some of its rows have a loss."""
        loss, metrics = self._forward(fed.arrived(), self.passes)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        broken = ~(torch.isfinite(loss.detach()) & torch.isfinite(norm))
        hits = [metrics[f"cond_acc_{k}_sum"] for k in range(self.passes)]
        totals = [metrics[f"cond_acc_{k}_total"] for k in range(self.passes)]
        on_device = torch.stack([number.float() for number in (broken, loss.detach(), *hits, *totals)])
        figures = torch.empty(len(on_device), pin_memory=on_device.is_cuda)
        figures.copy_(on_device, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if on_device.is_cuda else None
        self._optimize(broken)
        if copied is not None:
            copied.synchronize()  # waits for the copy, not for the optimizer's step behind it
        skipped, value, *counts = figures.tolist()
        counted_hits = counts[: self.passes]
        counted_totals = counts[self.passes :]
        accuracy = tuple(hit / max(1.0, total) for hit, total in zip(counted_hits, counted_totals, strict=True))
        if skipped:
            self.skipped += 1
        else:
            self.steps += 1
            self._note_accuracy(accuracy[-1])
            self._update_averages()
        return StepResult(value, fed.tokens, accuracy, skipped=bool(skipped))

    def _optimize(self, broken: torch.Tensor) -> None:
        """Take an optimizer step, which changes nothing where `broken` is true on the device; drop the gradients."""
        warmed_up = min(1.0, (self.steps + 1) / max(1, self.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * warmed_up
        self.optimizer.found_inf = broken.float()  # type: ignore[attr-defined]  # as `torch.amp.GradScaler` tells it
        self.optimizer.step()
        del self.optimizer.found_inf  # type: ignore[attr-defined]  # it would stay on the device
        self.optimizer.zero_grad(set_to_none=True)

    def _note_accuracy(self, accuracy: float) -> None:
        """Unroll one more draft position from the next step on if the last one is accurate enough."""
        self._accuracy = _ACCURACY_DECAY * self._accuracy + (1 - _ACCURACY_DECAY) * accuracy
        if self._accuracy > _UNROLL_ABOVE and self.passes < self.ttt_steps:
            self.passes += 1
            self._accuracy = 0.0

    def _update_averages(self) -> None:
        reach = AVERAGED_STEPS if self._trained else min(AVERAGED_STEPS, 1 + self.steps / 9)
        move = get_ema_multi_avg_fn(1 - 1 / reach)  # type: ignore[no-untyped-call]
        move([*self.averages().values()], [*self.parameters.values()], None)

    def averages(self) -> dict[str, torch.Tensor]:
        """The average over recent steps of every trainable parameter, by name; itself, not a copy."""
        return {name: self.optimizer.state[p][AVERAGE] for name, p in self.parameters.items()}

    def start_over(self) -> None:
        """Reset the optimizer's moments and steps; the weights stay, and are their own average."""
        with torch.no_grad():
            for p, state in self.optimizer.state.items():
                for value in state.values():
                    value.zero_()
                state[AVERAGE].copy_(p)
        self.steps = 0  # warm up again

    def state(self) -> Fields:
        """Everything a bit-exact resume needs, on the host: weights, their average, optimizer, counters.

        What lies on the host is not copied, so the next step changes it.
        """
        optimizer = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), self.optimizer.state_dict())
        averages = [values.pop(AVERAGE) for values in optimizer["state"].values()]
        return {
            "parameters": {name: p.detach().cpu() for name, p in self.parameters.items()},
            AVERAGE: dict(zip(self.parameters, averages, strict=True)),
            "optimizer": optimizer,
            "steps": self.steps,
            "skipped": self.skipped,
            "passes": [self.passes, self._accuracy],
        }

    def load_state(self, state: Mapping[str, Any], beside: str = "") -> None:
        """Continue from `state()`; a `DrafterError`, and no change, where it is none of this drafter.

        `beside`: where the state may hold other values of the parameters, which are checked as its own are.
        """
        try:
            weights = state["parameters"]
            average = state.get(AVERAGE, weights)  # older states have none
            saved = state["optimizer"]["state"]
            # By the parameter's number, which is text in a state from a file; empty before the first step.
            moments = [saved.get(i, saved.get(str(i), {})) for i in range(len(self.parameters))]
            steps = int(state["steps"])
            skipped = int(state["skipped"])
            # Older states have no passes: training had all of them from its first step on.
            passes, accuracy = map(float, state.get("passes", (self.ttt_steps, 0.0)))
            self._check_state((weights, average, state.get(beside, weights)), moments)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, DrafterError):
                raise
            raise DrafterError(f"This is no training state of a drafter: {error!r}.") from error
        self._copy_in(weights)
        self.start_over()
        with torch.no_grad():
            for (name, p), values in zip(self.parameters.items(), moments, strict=True):
                own = self.optimizer.state[p]
                own[AVERAGE].copy_(average[name])
                for key, value in values.items():
                    own[key].copy_(value)
        self.steps = steps
        self.skipped = skipped
        self.passes = max(1, min(int(passes), self.ttt_steps))
        self._accuracy = accuracy

    def _check_state(self, parameters: tuple[Tensors, ...], moments: list[Tensors]) -> None:
        """Raise a `DrafterError` where these are not tensors of this drafter, or hold numbers that are not finite."""
        for values in parameters:
            self._check(values)
        for own, values in zip(self.optimizer.state.values(), moments, strict=True):
            shapes = {key: value.shape for key, value in own.items() if key != AVERAGE}
            if values and {key: value.shape for key, value in values.items()} != shapes:
                raise DrafterError("The optimizer's moments are not those of the drafter.")
        for values in (*parameters, *moments):
            if (broken := not_finite(values)) is not None:
                raise DrafterError(f"The training state's {broken} holds NaN or infinity.")

    def cloned_parameters(self) -> dict[str, torch.Tensor]:
        """A float32 copy of every trainable parameter on the host, by name."""
        return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in self.parameters.items()}

    def load_parameters(self, parameters: Tensors) -> None:
        """Take over weights, as their own average; the optimizer's moments stay."""
        self._copy_in(parameters)
        for name, average in self.averages().items():
            average.copy_(self.parameters[name].detach())

    @contextmanager
    def holding(self, parameters: Tensors) -> Iterator[None]:
        """Give the drafter other weights inside the block; its own come back to the bit."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy_in(parameters)
        try:
            yield
        finally:
            self._copy_in(own)

    def rehearse(self, rows: int = ROW_BLOCK) -> None:
        """Run a forward and a backward pass over `rows` of zeros: tunes kernels, which a stop would wait for."""
        hidden = policy_width(self.model)
        states = torch.zeros(rows + 1, (len(self.model.target_layer_ids) + 1) * hidden, dtype=torch.bfloat16)  # [L, 4H]
        tokens = torch.zeros(rows + 1, dtype=torch.int64)
        nothing = TrainingSequence(tokens, 1, states[:, hidden:], states[:, :hidden])
        loss, _ = self._forward(self.feed()(align(nothing)).arrived())
        torch.autograd.backward(loss)
        self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: Batch, passes: int | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        from speculators.losses import resolve_loss_config

        kind = "fused" if self.device.type == "cuda" else "eager"  # the fused losses are Triton kernels
        return run_passes(self.model, batch, passes or self.ttt_steps, resolve_loss_config(LOSS, kind))

    def _check(self, values: Tensors) -> None:
        """Raise a `DrafterError` where these are not tensors of the parameters' names and shapes."""
        different = sorted(set(values) ^ set(self.parameters))
        if different:
            raise DrafterError(f"These parameters are not those of the drafter: {', '.join(different[:4])}.")
        for name, value in values.items():
            if value.shape != (own := self.parameters[name].shape):
                raise DrafterError(f"{name} is {list(value.shape)}, but the drafter's is {list(own)}.")

    def _copy_in(self, values: Tensors) -> None:
        self._check(values)
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)


def train_until(trainer: DrafterTrainer, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> TrainSummary:
    """Step through `batches` until `should_stop()` or the end of the data.

    `should_stop` is called before each micro-batch. A hundred batches in a row without a loss are a `DrafterError`.
    """
    steps_before = trainer.steps
    skipped_before = trainer.skipped
    empty = 0  # batches in a row without a loss
    stopped = False
    results: list[StepResult] = []
    with ahead(batches, trainer.feed()) as source:
        while True:
            if should_stop():
                stopped = True
                break
            fed = next(source, None)
            if fed is None:
                break
            if fed.tokens == 0:
                empty += 1
                if empty == _MAX_EMPTY:
                    raise DrafterError(
                        f"{empty} batches in a row had no row with a loss: the sequences hold no response."
                    )
                continue
            empty = 0
            result = trainer.step_on(fed)
            if not result.skipped:
                results.append(result)
    return TrainSummary(
        steps=trainer.steps - steps_before,
        tokens=sum(result.tokens for result in results),
        skipped=trainer.skipped - skipped_before,
        stopped=stopped,
        loss=float(np.mean([result.loss for result in results])) if results else math.nan,
    )


def run_passes(
    model: Eagle3DraftModel, batch: Batch, passes: int, loss: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The training-time test of `speculators` over a batch in float32: (`loss` over all passes, its counts)."""
    width = batch.hidden_states.shape[-1]
    reads = max(1, len(model.target_layer_ids)) * policy_width(model)
    if width != reads:
        raise DrafterError(f"The hidden states are {width} wide, and the drafter reads {reads} numbers a token.")
    with mixed_precision(batch.input_ids.device), NoWaiting():
        _, total, metrics = model(
            hidden_states=batch.hidden_states,
            input_ids=batch.input_ids,
            document_ids=batch.document_ids,
            loss_mask=batch.loss_mask,
            position_ids=batch.position_ids,
            verifier_last_hidden_states=batch.last_hidden,
            ttt_steps=passes,
            loss_config=loss,
        )
    return total, metrics


@contextmanager
def mixed_precision(device: torch.device) -> Iterator[None]:
    """bfloat16 matrix products on CUDA over float32 master weights; plain float32 elsewhere.

    Attention is not cuDNN's, which would make a plan for each number of rows, for about a second, on each device.
    """
    if device.type != "cuda":
        yield
        return
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


class NoWaiting(TorchFunctionMode):
    """Makes the forward of `speculators` queue its work without a wait for the device: constants are filled in there.

    Accuracy counts (`cond_acc_*`) select rows, whose number the host would have to know: here other rows become False.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and isinstance(args[0], int | float):
            return torch.full((), args[0], **{"dtype": None, **(kwargs or {})})
        if func is torch.masked_select and args[0].dtype == torch.bool:
            return args[0] & args[1]
        return func(*args, **(kwargs or {}))
