"""Records between the trainer, the rollout servers and their schedulers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


def accept_length(accepted: float, drafts: float) -> float:
    """Tokens per verified draft, of at least one, with the token that the target adds."""
    return 1.0 + accepted / drafts


# ---------------------------------------------------------------------- the trainer to a rollout server


def store_name(job: str) -> str:
    """Name of the Ray actor that a starting server asks for the drafter; with the job's id: jobs share namespaces."""
    return f"verl_tlt_drafter_store_{job}"


@dataclass(frozen=True)
class DrafterFile:
    """A drafter as vLLM loads it."""

    version: int  # how often a drafter was published before; 0 is what the run started with
    config: str  # text of config.json
    weights: bytes  # a safetensors file in the rollout's dtype, without what vLLM shares with the policy
    acceptance: tuple[float, ...] = ()
    """Conditional acceptance expected at each draft position, from held-out sequences; empty: unknown."""

    @property
    def untrained(self) -> bool:
        """Whether nothing that it drafts is accepted: a random head."""
        return bool(self.acceptance) and not any(self.acceptance)


# ---------------------------------------------------------------------- a rollout server to the trainer


@dataclass(frozen=True)
class DrafterStatus:
    """Which drafter a server serves, as of its last load."""

    version: int = -1  # of the drafter that the engine serves; -1: none yet
    ok: bool = False  # the last load was accepted, by every rank of the engine
    seconds: float = 0.0  # duration of the last load
    error: str | None = None  # why the engine does not draft as it was asked to
    acceptance: tuple[float, ...] = ()  # `DrafterFile.acceptance` of the drafter that is served


class StepTime(NamedTuple):
    """What a steady step took."""

    draft_length: int  # K, or -1 without the drafter's pass
    batch: int
    seconds: float  # median of the clean steps


@dataclass  # not frozen: the scheduler counts in one
class EngineStats:
    """What one engine did since it was last asked: the scheduler sums, the trainer's metrics read.

    Counters that vLLM has too bear its names (`vllm.v1.spec_decode.metrics`).
    """

    num_steps: int = 0
    num_decode_tokens: int = 0  # sampled tokens, without the first one after a prefill
    num_drafts: int = 0  # drafts verified: one per request and step that verified
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    """[i]: drafts of steps with K of at least i+1; K varies, so a rate per position needs it beside the next one."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()  # [i]: drafts whose first i+1 tokens were all accepted
    steps_by_draft_length: Mapping[int, int] = field(default_factory=dict)
    """Engine steps by the K they verified; -1: the drafter did not run."""
    control_s: float = 0.0  # seconds that engine steps waited for the controller
    tokens_by_batch: Mapping[int, int] = field(default_factory=dict)  # tokens of decode-only steps by their batch
    mean_context: float = 0.0  # tokens of context of a decode-phase request, on average
    decode_s: float = 0.0  # seconds of decode-only steps
    undrafted_s: float = 0.0
    """Estimate by the step costs: seconds in which decode-only steps without drafts give the same tokens."""
    step_times: tuple[StepTime, ...] = ()  # of every draft length and batch with a clean step, ascending
    failure: str | None = None
    """Why there are no figures: the engine did not answer, or verl-tlt failed in it and it drafts nothing since."""
