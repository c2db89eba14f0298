"""Records between the actor's workers, the spot trainer and the RL trainer. Arrays are numpy: every process has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl_tlt.messages.rollout import DrafterFile

if TYPE_CHECKING:
    from ray import ObjectRef


# ---------------------------------------------------------------------- actor worker -> RL trainer -> spot trainer


@dataclass(frozen=True)
class HiddenStateShard:
    """What one rank holds of the captured window of one sequence: a copy of its own, which travels as it is."""

    row: int  # number of the sequence in its group's batch
    tokens: np.ndarray  # int64 [L], the whole window's on every rank
    prompt_len: int  # tokens of the window that belong to the prompt
    prompt: int  # digest of the whole prompt, the same for all of its responses
    start: int  # position of the window in the sequence
    stretches: tuple[tuple[int, int], ...]
    """Tokens [begin, end) of the window that this rank holds, n in all, in the order of the states' rows."""
    wanted: tuple[int, ...]
    """Layers whose inputs make the sequence whole, ascending. The last one is the policy's number of layers, which
    stands for the input of the final norm."""
    layers: tuple[int, ...]  # those of `wanted` that are here
    states: np.ndarray  # 16 bits [len(layers), n, H] (see `drafter.to_numpy16`)
    foreign: tuple[tuple[int, int], ...] = ()
    """Tokens [begin, end) of the window's response that the policy did not sample, such as a tool's answer."""


@dataclass(frozen=True)
class VerifierArrays:
    """The parts of the policy that the drafter shares, in 16 bits, with the shapes of `drafter.VerifierWeights`."""

    embed: np.ndarray
    lm_head: np.ndarray
    norm: np.ndarray


@dataclass(frozen=True)
class CaptureReady:
    """One rank's answer to `tlt_setup`."""

    group: int  # data-parallel rank: the same on all ranks that compute the same sequences
    node: str = ""  # Ray's id of the rank's node
    device: str = ""  # Ray's id of the rank's accelerator
    refusal: str | None = None  # why hidden states cannot be captured here, in one sentence; None: they can


@dataclass(frozen=True)
class CapturedStates:
    """What one rank captured in the last old-log-prob forward. The arrays stay in the object store of its node."""

    shards: ObjectRef  # a list of `HiddenStateShard`
    verifier_weights: ObjectRef | None
    """`VerifierArrays` out of the last weight sync; None: another rank copies them, or the sync brought none (LoRA)."""
    seconds: float  # what capturing took
    errors: int  # micro-batches that were not captured, and verifier weights that were not copied
    sync_seconds: float = 0.0  # what copying the verifier weights added to the last weight sync
    token_counts: np.ndarray | None = None
    """int64 [V]: how often each token is in the responses of the first batch; only where it was asked for."""


# ---------------------------------------------------------------------- RL trainer -> spot trainer


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """What the spot trainer is made of: at the start of a run, and again for one that replaces another."""

    policy_dir: str  # visible on its node
    drafter: DrafterFile  # the run's first drafter, float32
    sampling: Mapping[str, Any]  # the rollout's temperature, top_p and top_k, under which acceptance is judged
    dtype: str  # of the rollout, in which drafters are published
    device: str = "cpu"  # torch's device type: "cuda" or "cpu"
    checkpoint: str | None = None  # directory of the drafter's checkpoint that the run goes on from
    # training
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    batch_tokens: int = 1024
    max_epochs: float = 3.0
    # buffer
    buffer_bytes: int = 2 << 30
    min_tokens: int = 2000
    held_out: float = 0.1  # share of prompts
    window: int = 4096
    # gate
    gate: bool = True  # False: every trained candidate is published
    max_draft: int = 3  # K up to which drafts are scored


# ---------------------------------------------------------------------- spot trainer -> RL trainer


@dataclass(frozen=True)
class BufferStats:
    """What the spot trainer's buffer holds after it took over a step's sequences."""

    train_tokens: int  # tokens to train on; the others are held out for the publish gate
    incomplete: int = 0  # sequences of this step that were left out: a rank's shard is missing
    responses: int = 0
    """Response tokens of this step's sequences; 0 where the drafter has the policy's whole vocabulary."""
    draftable: int = 0  # those of them that are in the draft vocabulary


Decision = Literal["published", "kept", "reverted"]
"""Kept: the served drafter stays and the candidate trains on. Reverted: the candidate is given up."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of the candidate, and why."""

    decision: Decision = "kept"
    reason: str = ""  # in words
    gain: float | None = None
    """The candidate's held-out accept length relative to the served drafter's, minus one; None: not judged."""
    tau: Mapping[str, float] = field(default_factory=dict)
    """Held-out accept length of `candidate`, `served` and `initial`; empty: not scored."""
    acceptance: tuple[float, ...] = ()
    """Conditional acceptance by draft position of the drafter that is served from now on; empty: not scored."""
    publishes: bool = False
    """The spot trainer has a drafter to publish (`export`): the candidate, or the initial one if it is reverted."""


@dataclass(frozen=True)
class SessionResult:
    """One training session."""

    outcome: Literal["stopped", "exhausted", "failed"]
    """It was stopped by the RL trainer, its epochs over the buffer are used up, or it failed."""
    steps: int = 0  # optimizer steps
    tokens: int = 0
    skipped: int = 0  # micro-batches with a non-finite loss or gradient
    seconds: float = 0.0
    loss: float = math.nan  # mean over the session's steps
    verdict: Verdict | None = None  # on the candidate of the sessions before; None: it is not scored yet
    error: str | None = None  # why it failed


@dataclass(frozen=True)
class DrafterProvenance:
    """Where a drafter in a checkpoint comes from: keys of its `provenance.json`."""

    policy: str  # where the policy was loaded from (`actor_rollout_ref.model.path`)
    data: str  # the training files
    objective: str
    temperature: float  # the rollout's
    version: int = 0  # publications before it
    policy_step: int = 0  # RL step of the policy it was saved with
    acceptance: Sequence[float] = ()  # conditional acceptance by draft position on held-out sequences; empty: unknown
    tokens_trained: int = 0  # in this run, before and after it was resumed
