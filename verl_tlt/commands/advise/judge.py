"""Judges whether TLT pays, by rules over a run's numbers. The first rule that applies answers, and names its number."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WORTH = 1.05
"""How many times as fast a step must become for TLT to be worth its trouble."""
BOUND = 1.15
"""How many times as fast a step must become with a rollout of no duration: below this no drafter is worth it."""
FULL = 0.15
"""Share of engine time at small batches below which replicas are taken for always full."""
TOOL_BOUND = 0.5
"""Share of a response's time in tools from which on engines mostly wait."""
SHORT_S = 15.0
"""A rollout of fewer seconds is short: what TLT does once a step is a large part of it."""
PEERS = "Others measured no gain to 2.12 times (docs/alternatives.md)"
"""Speed-ups of whole steps, of two users of the TLT paper's code and of the paper."""

Answer = Literal["yes", "yes, with a trained drafter", "no", "it depends"]


@dataclass(frozen=True)
class Numbers:
    """What decides. Shares are 0 to 1, seconds are of one RL step; mappings are by setting: low, likely, high."""

    gen_s: float
    """Seconds of stock's rollout."""
    rest_s: float
    """Seconds of a step outside rollout."""
    overhead_s: float
    """Seconds of TLT's own work on the critical path."""
    rollout: Mapping[str, float]
    """How many times as fast as stock's the engines are done."""
    accept: Mapping[str, float]
    """Accept length at K=3, or at the longest draft below."""
    accept_known: bool
    """Whether the user gave the acceptance; else it is assumed."""
    tail_share: float
    """Part of the engines' decoding time at batches below 32."""
    bubble_s: float
    """Mean over replicas of the time without anything to decode while another replica still decodes."""
    bubble_needed_s: float
    """Seconds of bubble that a session needs for its result to be merged."""
    replicas: int
    has_drafter: bool
    trains: bool
    """Whether idle time may train the drafter."""
    mode: str = "sync"
    reward_s: float = 0.0
    """Part of `rest_s`."""
    tool_share: float = 0.0
    """Part of a response's time in which it waits for tools."""
    response_mean: float = 0.0
    tail_break_even: float = 1.0
    """Accept length above which the K of `accept` pays at a batch of 8."""
    measured: bool = True
    """Whether the seconds were measured in a run; else they are simulated."""
    context: int = 0
    """Tokens of context of a request in the tail: a mean response, and its prompt."""
    break_even: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """By batch and K: the accept length above which a draft pays."""
    kv_tokens: int = 0
    assumed: Mapping[str, str] = field(default_factory=dict)
    """What is assumed where neither recipe nor run nor user says it: value and why."""

    @property
    def share(self) -> float:
        whole = self.gen_s + self.rest_s
        return self.gen_s / whole if whole > 0 else 0.0

    @property
    def bound(self) -> float:
        """Amdahl: how many times as fast a step is whose rollout takes no time."""
        return 1.0 / max(1.0 - self.share, 1e-3)

    def step(self, setting: str) -> float:
        """How many times as fast a whole step is; drafting does not shorten the waiting for tools."""
        faster = self.gen_s * (self.tool_share + (1.0 - self.tool_share) / self.rollout[setting])
        return (self.gen_s + self.rest_s) / (faster + self.rest_s + self.overhead_s)


@dataclass(frozen=True)
class Verdict:
    """The answer, and the sentence with the number that decides it."""

    answer: Answer
    because: str


def judge(n: Numbers) -> Verdict:
    best, worst = n.step("high"), n.step("low")
    if n.bound < BOUND:
        most = f"without any duration it would make a step {n.bound:.2f} times as fast"
        if n.reward_s > n.gen_s:
            reward = f"it is reward-bound: reward takes {n.reward_s:.1f} s of a step, rollout {n.gen_s:.1f} s"
            return Verdict("no", f"{reward}; {most}.")
        return Verdict("no", f"rollout is {n.share:.0%} of a step; {most}, and no more.")
    if n.tool_share >= TOOL_BOUND:
        waiting = f"responses wait for tools {n.tool_share:.0%} of their time, and no engine decodes"
        return Verdict("no", f"it is tool-bound: {waiting}.")
    if best < WORTH:
        return _too_little(n, best)
    if not n.has_drafter and (why := never_trained(n)):
        only = ", so that a cold start is all it learns from" if n.trains else ""
        remedy = f"with one from verl-tlt warmup a step is {worst:.2f} to {best:.2f} times as fast"
        return Verdict("no", f"idle time would not train its drafter: {why}{only}; {remedy}.")
    expected = f"{n.accept['low']:.2f} to {n.accept['high']:.2f} are {'expected' if n.accept_known else 'assumed'}"
    pays = f"from {n.tail_break_even:.2f} on drafts pay at a batch of 8, and {expected}"
    basis = "" if n.measured else " Most of this is assumed: --metrics of a stock run replaces it."
    range_ = f"a step is {n.step('likely'):.2f} ({worst:.2f} to {best:.2f}) times as fast"
    if worst >= WORTH:
        answer: Answer = "yes" if n.has_drafter else "yes, with a trained drafter"
        return Verdict(answer, f"{range_}. The accept length decides: {pays}.{basis} {PEERS}.")
    whose = "" if n.has_drafter else " of a trained drafter"
    return Verdict("it depends", f"on the accept length{whose}: {pays}; {range_}.{basis} {PEERS}.")


def never_trained(n: Numbers) -> str | None:
    """Why idle time would not train a drafter; None: it would."""
    if not n.trains:
        return "tlt.spot.enable=false trains nothing"
    if n.mode == "separate_async":
        return None  # there the trainer waits, not the replicas
    if n.replicas == 1:
        return "with one replica nobody waits for anybody, and the bubble is 0 s"
    if n.bubble_s < n.bubble_needed_s:
        return f"replicas wait {n.bubble_s:.1f} s a step on average, and a session needs {n.bubble_needed_s:.1f} s"
    return None


def _too_little(n: Numbers, best: float) -> Verdict:
    end = f"a step is {best:.2f} times as fast at the high end"
    if n.tail_share < FULL:
        full = f"{n.tail_share:.0%} of their time is at batches below 32, and beyond, verifying costs what drafts bring"
        return Verdict("no", f"its replicas never drain: {full}; {end}.")
    if n.gen_s < SHORT_S:
        short = f"{n.response_mean:.0f} tokens on average are rolled out in {n.gen_s:.1f} s"
        return Verdict("no", f"its responses are short: {short}, and TLT's own work takes {n.overhead_s:.1f} s; {end}.")
    pays = f"they pay from an accept length of {n.tail_break_even:.2f} on at a batch of 8"
    return Verdict("no", f"drafts bring too little: {pays}; {end}.")
