"""What a GPU changes for the drafter's training: its numbers, its speed, what a stop waits for. No engine is needed.

    python -m benchmarks.gpu.drafter --out FILE --budget 480

* numerics: is the loss, and the gradient of every parameter, what the CPU computes in float32?
* speed: tokens a second and memory by a 7B run's default, with the attention that CUDA gets and with the one that it
  does not; and does any step after the first trace a graph?
* stop: how long the real learner goes on after it was told to stop.

Without a GPU: `--tiny`, which says of no figure that it is one of a GPU.
"""

import threading
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import Bench, Part, clock, main, peak_gib, planned_gib, seconds
from benchmarks.gpu.shapes import Shape, draft_vocab_of, drafter, rows_of, shape_of, texts, verifier_weights
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import Batch, DrafterTrainer, StepResult, default_attention, pack, to_numpy16
from verl_tlt.drafter.memory import TrainingDevice
from verl_tlt.messages.training import SpotPlan, VerifierArrays
from verl_tlt.spot_trainer.trainer import SpotTrainer
from verl_tlt.trainer.run_setup import first_drafter

PASSES = 3
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
TUNED = {"TRITON_CACHE_AUTOTUNING": "1"}
"""As in the spot trainer."""


# ---------------------------------------------------------------------- numerics


def numerics(bench: Bench) -> dict[str, Any]:
    """One batch of three documents on both sides, with all draft positions. On the CPU alone the kernel that CUDA gets
    meets the one it does not.

    Returns:
        both losses; each parameter's |g - g0| / |g0|, the largest of them.
    """
    shape = shape_of(bench, "small")
    batch = pack(texts(shape, (300, 180, 33)))
    step0, gradients0 = _gradients(shape, "cpu", default_attention("cpu"), batch)
    step, gradients = _gradients(shape, bench.device, default_attention("cuda"), batch)
    errors = {n: float((gradients[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in gradients0.items()}
    return {
        "loss": {"cpu_float32": step0.loss, "tested": step.loss},
        "draft_positions": len(step.acc_by_position),
        "relative_error": errors,
        "largest_error": max(errors.values()),
    }


def _gradients(shape: Shape, device: str, attention: str, batch: Batch) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """The trainer's own step, and its gradients before they are clipped."""
    trainer = DrafterTrainer(drafter(shape, device, attention), ttt_steps=PASSES)
    trainer.passes = PASSES
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def keep(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen[name] = parameter.grad.detach().float().cpu().clone()

        return keep

    with TrainingDevice(device).resident(trainer, batch.rows):
        for name, parameter in trainer.parameters.items():
            parameter.register_post_accumulate_grad_hook(watch(name))
        return trainer.step(batch), seen


# ---------------------------------------------------------------------- speed


def speed(bench: Bench) -> dict[str, Any]:
    """Steps of a 7B run's default at varied row counts, with one pass and with all; the graphs that dynamo has traced
    after each; and full steps with each attention that the drafter could have here.
    """
    shape, rows = shape_of(bench, "7b"), rows_of(bench)
    parts = [[8] * 4] * 3 + [[28], [24], [16, 8], [20]] + [[8] * 4] * 2  # documents of a batch, in rows / 32
    batches = {str(p): pack(texts(shape, [1 + n * rows // 32 for n in p])) for p in parts}
    trainer = DrafterTrainer(_default_drafter(bench, shape), ttt_steps=PASSES)
    with TrainingDevice(bench.device).resident(trainer, rows):
        rehearsal = seconds(bench.device, [lambda: trainer.rehearse(rows)])[0]
        steps = []
        for passes in (1, PASSES):
            trainer.passes = passes
            steps += [_timed(bench, trainer, batches[str(p)]) for p in parts]
        planned = planned_gib(trainer.model, rows, PASSES)
    full, by_attention = batches[str(parts[0])], {}
    for attention in (default_attention("cuda"), default_attention("cpu")):
        other = DrafterTrainer(_default_drafter(bench, shape, attention), ttt_steps=PASSES)
        with TrainingDevice(bench.device).resident(other, rows):
            other.passes = PASSES
            by_attention[attention] = [_timed(bench, other, full) for _ in range(3)]
    return {"rehearsal_s": rehearsal, "planned_gib": planned, "steps": steps, "by_attention": by_attention}


def _default_drafter(bench: Bench, shape: Shape, attention: str | None = None) -> Any:
    return drafter(shape, bench.device, attention, draft_vocab=draft_vocab_of(bench))


def _timed(bench: Bench, trainer: DrafterTrainer, batch: Batch) -> dict[str, Any]:
    """One step: its seconds, the most memory it took, and the graphs that dynamo has traced so far."""
    from torch._dynamo.utils import counters

    passes, start = trainer.passes, clock(bench.device)
    result = trainer.step(batch)
    took = clock(bench.device) - start
    graphs = counters["stats"]["unique_graphs"]
    found = {"rows": batch.rows, "passes": passes, "seconds": took, "graphs": graphs, "skipped": result.skipped}
    return found | {"tokens_per_s": round(result.tokens / took), "peak_gib": peak_gib(bench.device)}


# ---------------------------------------------------------------------- the real learner of a 7B run


def stop(bench: Bench) -> dict[str, Any]:
    """Sessions of the real learner that are told to stop: seconds from the word to the end of the session."""
    learner = _learner(bench)
    learner.trainer.passes = PASSES  # as once drafts are accepted: a step takes longest
    planned = planned_gib(learner.model, rows_of(bench), PASSES, learner.plan.window)
    found: dict[str, Any] = {"rows": rows_of(bench), "planned_gib": planned, "sessions": []}
    found["warm_up_s"] = seconds(bench.device, [learner.rehearse])[0]
    peak_gib(bench.device)
    for wait in (1.0, 1.0, 1.0) if bench.tiny else (15.0, 8.0, 8.0):
        found["sessions"].append(_stopped_session(learner, wait))
        found["sessions"][-1]["peak_gib"] = peak_gib(bench.device)
        if bench.cuda:
            found["sessions"][-1]["left_on_device_mib"] = torch.cuda.memory_reserved() >> 20
        bench.note(**found)
    return found


def _learner(bench: Bench) -> SpotTrainer:
    """One that has the policy's weights, its draft vocabulary, and something to train on."""
    shape, rows = shape_of(bench, "7b"), rows_of(bench)
    config = TLTConfig.from_dict({"drafter": {"vocab": draft_vocab_of(bench)}})
    policy = str(shape.write(bench.directory / "policy"))
    start = first_drafter(config, policy, "bfloat16", 4096, None)
    plan = SpotPlan(
        policy_dir=policy, drafter=start.trainable, sampling=SAMPLING, dtype="bfloat16", device=bench.device,
        batch_tokens=rows, min_tokens=rows, max_epochs=1e4,
    )  # fmt: skip
    learner = SpotTrainer(plan)
    weights = verifier_weights(shape)
    arrays = VerifierArrays(to_numpy16(weights.embed), to_numpy16(weights.lm_head), to_numpy16(weights.norm))
    learner.add(1, texts(shape, [rows + 100] * 12), arrays, np.arange(draft_vocab_of(bench)))
    return learner


def _stopped_session(learner: SpotTrainer, wait: float) -> dict[str, Any]:
    told, at = threading.Event(), [0.0]

    def tell() -> None:
        at[0] = time.perf_counter()
        told.set()

    timer = threading.Timer(wait, tell)
    timer.start()
    result = learner.train(0, told.is_set)
    end = time.perf_counter()
    timer.cancel()
    latency = round(end - at[0], 4) if told.is_set() else None
    return {
        "outcome": result.outcome, "draft_positions": learner.trainer.passes, "steps": result.steps,
        "tokens": result.tokens, "skipped": result.skipped, "loss": result.loss,
        "session_s": round(result.seconds, 3), "stop_latency_s": latency,
    }  # fmt: skip


PARTS = {
    "numerics": Part(numerics, 30, most_s=120),
    "speed": Part(speed, 60, environment=TUNED),
    "stop": Part(stop, 90, most_s=190, environment=TUNED),
}
"""In the order of what a user meets first."""

if __name__ == "__main__":
    main("benchmarks.gpu.drafter", PARTS, __doc__)
