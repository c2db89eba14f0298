"""Between the actor's workers, the spot workers and the trainer. Arrays are numpy: every process has it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from ray import ObjectRef

Parameters = Mapping[str, np.ndarray]
"""Trainable parameters of a drafter by name, float32."""

VERSIONS = ("candidate", "served", "initial")
"""The versions of a drafter that the gate compares: the newest merged one, the one that engines draft with, and the one
that the run started with (`spot_worker.merge`)."""


# ---------------------------------------------------------------------- actor worker -> trainer -> spot worker


@dataclass(frozen=True)
class HiddenStateShard:
    """What one rank holds of the captured window of one sequence: the tap's own copy, which travels as it is."""

    row: int  # number of the sequence in its group's batch
    tokens: np.ndarray  # int64 [L], the whole window's on every rank
    prompt_len: int  # tokens of the window that belong to the prompt
    prompt: int  # digest of the whole prompt, the same for all of its responses
    start: int  # position of the window in the sequence
    stretches: tuple[tuple[int, int], ...]
    """Tokens [begin, end) of the window that this rank holds, n in all, in the order of the states' rows."""
    wanted: tuple[int, ...]
    """Layers whose inputs make the sequence whole, ascending; the last one is the policy's number of layers, under
    which goes the input of the final norm."""
    layers: tuple[int, ...]  # those of `wanted` that are here
    states: np.ndarray  # 16 bits [len(layers), n, H] (see `drafter.to_numpy16`)


@dataclass(frozen=True)
class VerifierArrays:
    """The parts of the policy that the drafter shares, in 16 bits, with the shapes of `drafter.VerifierWeights`."""

    embed: np.ndarray
    lm_head: np.ndarray
    norm: np.ndarray


@dataclass(frozen=True)
class TapReady:
    """One rank's answer to `tlt_setup`."""

    group: int  # the data-parallel rank, which is the same on all ranks that compute the same sequences
    untapped: str | None = None  # why this engine has no tap, in one sentence; None: it has one


@dataclass(frozen=True)
class TappedStates:
    """What one rank's tap took from the last old-log-prob forward. The arrays stay in the object store of its node."""

    shards: tuple[ObjectRef, ...]  # for each share of the sequences a list of `HiddenStateShard`
    verifier_weights: ObjectRef | None
    """`VerifierArrays` out of the last weight sync, or under LoRA the first; None: as they were, or another rank's."""
    seconds: float  # what the tap cost
    errors: int  # micro-batches it could not keep, and verifier weights that could not be copied
    sync_seconds: float = 0.0  # what copying the verifier weights cost the last weight sync
    token_counts: np.ndarray | None = None
    """int64 [V]: how often each token is in the responses of a batch, once in a run where it was asked for."""


# ---------------------------------------------------------------------- spot worker -> trainer


@dataclass(frozen=True)
class RolloutSampling:
    """The rollout's sampling settings, under which acceptance is judged."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class BufferStats:
    """What a spot worker's buffer holds after it took over a step's sequences."""

    sequences: int
    tokens: int
    train_tokens: int  # the part of `tokens` that is trained on; the rest is held out for the publish gate
    bytes: int
    incomplete: int = 0  # sequences of this step that were left out: a rank's shard is missing
    responses: int = 0
    """Response tokens of this step's sequences; 0 where the drafter has the policy's whole vocabulary."""
    draftable: int = 0  # those of them that are in the draft vocabulary

    @classmethod
    def combined(cls, stats: Sequence[BufferStats]) -> BufferStats:
        """What a replica's workers hold; `train_tokens` is what the fullest has, for one that can train is enough."""
        sums = {f.name: sum(getattr(s, f.name) for s in stats) for f in fields(cls)}
        return replace(cls(**sums), train_tokens=max(s.train_tokens for s in stats))


@dataclass(frozen=True)
class SessionResult:
    """One training session."""

    outcome: Literal["stopped", "exhausted", "failed"]
    """Stopped by the trainer, its epochs over the buffer are used up, or it raised."""
    steps: int = 0  # optimizer steps
    tokens: int = 0
    epochs: float = 0.0
    skipped: int = 0  # micro-batches with a non-finite loss or gradient
    seconds: float = 0.0
    loss: float = math.nan  # mean over the session's steps
    scores: HeldOutScores | None = None
    """Scores of the candidate merged before this session; None: it was judged already, or not to the end."""
    judged_s: float = 0.0  # the part of `seconds` that went into the scores, before it trained
    slowest_s: float = 0.0  # its longest micro-batch: what a stop may have to wait for
    devices: float = 1.0  # mean number of devices that trained during `seconds`

    @classmethod
    def combined(cls, results: Sequence[SessionResult]) -> SessionResult:
        """The sessions that a replica's workers had at the same time, as one."""
        longest = max(r.seconds for r in results)
        trained = [r for r in results if r.tokens and math.isfinite(r.loss)]
        learned = sum(r.tokens for r in trained)
        return cls(
            outcome="stopped" if any(r.outcome == "stopped" for r in results) else "exhausted",
            steps=sum(r.steps for r in results),
            tokens=sum(r.tokens for r in results),
            epochs=max(r.epochs for r in results),
            skipped=sum(r.skipped for r in results),
            seconds=longest,
            loss=sum(r.loss * r.tokens for r in trained) / learned if trained else math.nan,
            scores=HeldOutScores.combined([r.scores for r in results if r.scores is not None]),
            judged_s=max(r.judged_s for r in results),
            slowest_s=max(r.slowest_s for r in results),
            devices=sum(r.seconds for r in results) / longest if longest else 0.0,
        )


@dataclass(kw_only=True)
class MergeVerdict:
    """What becomes of the drafter that was merged last, and why."""

    decision: Literal["published", "kept", "reverted"] = "kept"
    """Kept: the served drafter stays and the candidate trains on."""
    reason: str = ""  # the gate's verdict in words, or why it did not judge
    gain: float | None = None
    """The candidate's held-out accept length relative to the served drafter's, minus one; None: not judged."""
    gain_low: float | None = None  # lower end of the gate's interval around `gain`
    tau: Mapping[str, float] = field(default_factory=dict)
    """Held-out accept length of `candidate`, `served` and `initial`; empty: not judged."""
    seconds: float = 0.0  # what judging, merging and exporting took


@dataclass(frozen=True)
class Resumed:
    """What a spot worker holds after it resumed from a checkpoint: checksums, to compare with those of its files."""

    steps: int
    candidate: str
    served: str
    initial: str
    moments: str  # Adam's


@dataclass(frozen=True)
class MergeFacts:
    """Workers and tokens behind an average, final or partial."""

    tokens: int
    included: tuple[str, ...]  # workers in it, in order; empty: all were excluded
    excluded: dict[str, str] = field(default_factory=dict)  # worker -> why it is not in it
    longest: int = 0  # tokens of its longest session
    squares: int = 0  # sum of the sessions' squared tokens


@dataclass(frozen=True)
class MergedSlice:
    """One slice of an average on its way between workers: number i is `values[i]` times the scale of its block."""

    facts: MergeFacts
    values: np.ndarray  # int16 [n]; empty when everything was excluded
    scales: np.ndarray  # float32 [blocks]
    lengths: tuple[int, ...]  # numbers in each block, n in all


@dataclass(frozen=True)
class HeldOutScores:
    """Held-out acceptance of three drafters at the same positions, by sequence.

    Counts are float64 [S, 1+K], `SequenceScore.drafts` and `.accepted`: the drafts expected over the sequence (drafters
    differ in how many they need), then those of them whose first 1, 2, ..., K tokens are all accepted.
    """

    prompts: np.ndarray  # number of each sequence's prompt, uint64 [S]: responses to one prompt resemble each other
    positions: np.ndarray  # positions judged in each sequence, int [S]
    candidate: np.ndarray
    served: np.ndarray
    initial: np.ndarray

    def __post_init__(self) -> None:
        """Refuse counts that no drafter can have; a candidate may: the gate then reverts it."""
        for name in ("served", "initial"):
            counts = self.of(name)
            # Counts are expectations over one text: they need not fall along the draft in every sequence.
            if not np.isfinite(counts).all() or (counts < 0).any():
                raise ValueError(f"The {name} drafter's counts must be finite and not negative.")

    @classmethod
    def combined(cls, parts: Sequence[HeldOutScores]) -> HeldOutScores | None:
        """The scores of several workers as one; None where none has scored."""
        if not parts:
            return None
        parts = [part for part in parts if len(part.positions)] or parts[:1]  # one without sequences knows no K
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def of(self, which: str) -> np.ndarray:
        """The counts of one version, [S, 1+K]."""
        return {name: getattr(self, name) for name in VERSIONS}[which]

    def accept_length(self, which: str) -> float:
        """Tokens per draft of K tokens, over all sequences: 1 + those accepted; 1 where nothing was judged."""
        counts = self.of(which).sum(axis=0)
        return float(counts.sum() / counts[0]) if counts[0] else 1.0

    def taus(self) -> dict[str, float]:
        return {which: self.accept_length(which) for which in VERSIONS}

    def conditional(self, which: str) -> list[float]:
        """Chance, for each of the K draft positions, that it is accepted given that those before it were."""
        counts = self.of(which).sum(axis=0).tolist()
        return [min(1.0, b / a) if a > 0 else 0.0 for a, b in itertools.pairwise(counts)]


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
    tokens_trained: int = 0  # by all spot workers in this run, before and after it was resumed
