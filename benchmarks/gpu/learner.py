"""The real learner on a GPU: how long it goes on when it is told to stop, what the gate's scores take, and what becomes
of a session whose process is killed.

Policy, draft vocabulary and micro-batches are those of a 7B run by default.
"""

import multiprocessing
import threading
import time
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import NEEDS_CUDA, Bench, device_memory, peak_gib, planned_gib, seconds
from benchmarks.gpu.shapes import draft_vocab_of, drafter, rows_of, shape_of, texts, verifier_weights
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import DrafterTrainer, to_numpy16
from verl_tlt.drafter.memory import TrainingDevice
from verl_tlt.messages.training import RolloutSampling, VerifierArrays
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.scoring import score_versions
from verl_tlt.trainer.run_setup import first_drafter

PASSES = 3
SAMPLING = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)
STARTED_S = 300.0
"""Seconds for a learner's process to come up and take its first steps."""


def stop(bench: Bench) -> dict[str, Any]:
    """Sessions of the real learner that are told to stop: seconds from the word to the end of the session."""
    learner = _learner(bench)
    found: dict[str, Any] = {"warm_up_s": _warm_up(bench, learner), "sessions": []}
    peak_gib(bench.device)
    for wait in (1.0, 1.0, 1.0) if bench.tiny else (15.0, 8.0, 8.0):
        found["sessions"].append(_stopped_session(learner, wait))
        if bench.cuda:
            found["sessions"][-1]["left_on_device_mib"] = torch.cuda.memory_reserved() >> 20
    found |= {"rows": rows_of(bench), "peak_gib": peak_gib(bench.device)}
    planned = planned_gib(learner.model, rows_of(bench), PASSES, learner.config.buffer.window)
    return {**found, "planned_gib": planned}


def successor(bench: Bench) -> dict[str, Any]:
    """A session's process is killed in its middle, and another one takes its place: what is on the device at each
    stage, seconds to warm up there, and from the word to the end of the first session.
    """
    memory: dict[str, Any] = {}

    def note(stage: str) -> None:
        memory[stage] = device_memory() if bench.cuda else NEEDS_CUDA

    spawn = multiprocessing.get_context("spawn")
    trains = spawn.Event()
    victim = spawn.Process(target=_train_for_ever, args=(bench, trains), daemon=True)
    note("before")
    victim.start()
    if not trains.wait(STARTED_S):
        raise RuntimeError(f"no session had begun after {STARTED_S:.0f} s")
    note("in the session")
    victim.kill()
    victim.join()
    note("killed")
    learner = _learner(bench)
    warm_up_s = _warm_up(bench, learner)
    first = _stopped_session(learner, 1.0)
    note("afterwards")
    return {"killed_with": victim.exitcode, "memory_gib": memory, "warm_up_s": warm_up_s, "first_session": first}


def _train_for_ever(bench: Bench, trains: Event) -> None:
    """A process of its own: a warm-up, and a session without an end; says when it has taken its third step."""
    learner = _learner(bench)
    learner.warm_up()

    def look() -> bool:
        if learner.trainer.steps >= 3:
            trains.set()
        return False

    learner.train(look)


def _learner(bench: Bench) -> SpotLearner:
    """One that has the policy's weights, its draft vocabulary, and something to train on."""
    shape, rows = shape_of(bench, "7b"), rows_of(bench)
    config = TLTConfig.from_dict(
        {"buffer": {"min_tokens": rows, "held_out": 0.1}, "spot": {"max_epochs": 1e4},
         "drafter": {"batch_tokens": rows, "vocab": draft_vocab_of(bench)}}
    )  # fmt: skip
    policy = str(shape.write(bench.directory / "policy"))
    start = first_drafter(config, policy, "bfloat16", 4096, None)
    learner = SpotLearner("a", config, policy, start.trainable, SAMPLING, bench.device)
    weights = verifier_weights(shape)
    arrays = VerifierArrays(to_numpy16(weights.embed), to_numpy16(weights.lm_head), to_numpy16(weights.norm))
    learner.add(1, texts(shape, [rows + 100] * 12), arrays, np.arange(draft_vocab_of(bench)))
    return learner


def _warm_up(bench: Bench, learner: SpotLearner) -> float:
    return seconds(bench.device, [learner.warm_up])[0]


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
    shape, rows = shape_of(bench, "7b"), rows_of(bench)
    sequences = texts(shape, [rows + 1] * 8, seed=3)
    trainer = DrafterTrainer(drafter(shape, bench.device, draft_vocab=draft_vocab_of(bench)), ttt_steps=PASSES)
    versions = {"candidate": trainer.parameters_numpy()}
    device = TrainingDevice(bench.device)
    head = device.hold(verifier_weights(shape).lm_head)

    def score() -> None:
        there = head.to(device.device, non_blocking=True)
        score_versions(trainer, versions, sequences, SAMPLING, PASSES, there, lambda: False, rows)

    with device.resident(trainer, rows, rows, trains=False):
        peak_gib(bench.device)
        taken = seconds(bench.device, [score] * 3)
        peak = peak_gib(bench.device)
    planned = planned_gib(trainer.model, rows, PASSES, rows)
    return {"turns_s": taken, "tokens": 8 * rows, "rows": rows, "peak_gib": peak, "planned_gib": planned}
