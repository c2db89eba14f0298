"""The real learner on a GPU: how long it goes on when it is told to stop, and what the gate's scores take."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from benchmarks.gpu.parts import Bench, peak_gib, seconds
from benchmarks.gpu.shapes import drafter, rows_of, shape_of, texts, verifier_weights
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import DrafterTrainer, session_bytes, to_numpy16
from verl_tlt.messages.training import RolloutSampling, VerifierArrays
from verl_tlt.spot_worker.device import TrainingDevice
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.scoring import PORTION, score_versions
from verl_tlt.trainer.run_setup import first_drafter

PASSES = 3
SAMPLING = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)


def stop(bench: Bench) -> dict[str, Any]:
    """Sessions of the real learner that are told to stop: seconds from the word to the end of the session."""
    shape, rows = shape_of(bench, "7b"), rows_of(bench)
    config = TLTConfig.from_dict(
        {"buffer": {"min_tokens": rows, "held_out": 0.1}, "drafter": {"batch_tokens": rows},
         "spot": {"max_epochs": 1e4}}
    )  # fmt: skip
    policy = str(shape.write(bench.directory / "policy"))
    start = first_drafter(config, policy, "bfloat16", 4096, None)
    learner = SpotLearner("a", config, policy, start.trainable, SAMPLING, bench.device)
    weights = verifier_weights(shape)
    arrays = VerifierArrays(to_numpy16(weights.embed), to_numpy16(weights.lm_head), to_numpy16(weights.norm))
    learner.add(1, texts(shape, [rows + 100] * 12), arrays)
    found: dict[str, Any] = {"warm_up_s": seconds(bench.device, [learner.warm_up])[0], "sessions": []}
    for wait in (1.0, 1.0, 1.0) if bench.tiny else (15.0, 8.0, 8.0):
        found["sessions"].append(_stopped_session(learner, wait))
        if bench.cuda:
            found["sessions"][-1]["left_on_device_mib"] = torch.cuda.memory_reserved() >> 20
    return found


def _stopped_session(learner: SpotLearner, wait: float) -> dict[str, Any]:
    told, at = threading.Event(), [0.0]

    def tell() -> None:
        at[0] = time.perf_counter()
        told.set()

    timer = threading.Timer(wait, tell)
    timer.start()
    result = learner.train(told.is_set)
    end = time.perf_counter()
    timer.cancel()
    latency = round(end - at[0], 4) if told.is_set() else None
    return {"outcome": result.outcome, "steps": result.steps, "tokens": result.tokens, "skipped": result.skipped,
            "loss": result.loss, "session_s": round(result.seconds, 3), "stop_latency_s": latency}  # fmt: skip


def scoring(bench: Bench) -> dict[str, Any]:
    """Scores of one version on eight sequences, as a session makes them: seconds of each turn, and the peak."""
    shape = shape_of(bench, "7b")
    sequences = texts(shape, [rows_of(bench) + 1] * 8, seed=3)
    trainer = DrafterTrainer(drafter(shape, bench.device), ttt_steps=PASSES)
    versions = {"candidate": trainer.parameters_numpy()}

    def score() -> None:
        score_versions(trainer, versions, sequences, SAMPLING, PASSES, None, lambda: False)

    with TrainingDevice(bench.device).resident(trainer, PORTION, rows_of(bench), trains=False):
        peak_gib(bench.device)
        taken = seconds(bench.device, [score] * 3)
        peak = peak_gib(bench.device)
    planned = session_bytes(trainer.model, PORTION, PASSES, rows_of(bench)) / 2**30
    return {"turns_s": taken, "tokens": 8 * rows_of(bench), "peak_gib": peak, "planned_gib": round(planned, 2)}
