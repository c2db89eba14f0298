"""Every setting of the plugin: typed dataclasses, one default each, and one clear sentence for a wrong one.

A user's settings arrive as the `tlt` node of verl's Hydra config. The driver turns them into a `TLTConfig`,
which checks them, and passes them on as a plain dict in `actor_rollout_ref.rollout.custom.tlt`, the only
place verl hands to every process. Nothing here imports verl, torch or vLLM.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from verl_tlt.errors import TLTError

OBJECTIVES = {"eagle": 1, "hass": 3, "eagle3": 7}
"""Passes of the training-time test by the name of the method that trains so; the costs of the TLT paper's Table 7."""


def dtype_name(name: Any) -> str:
    """A rollout's `dtype` as torch spells it; engines compute in 16 bits unless told otherwise."""
    short = str(name).removeprefix("torch.")
    return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(short, short)


class TLTConfigError(TLTError, ValueError):
    """A setting is wrong; the message names the key and says what is allowed."""


@dataclass(frozen=True)
class Bounds:
    """Which numbers a setting takes; of a list, each of its numbers. Infinity is none of them unless it is a bound."""

    low: float
    high: float = sys.float_info.max
    open: bool = False
    """Whether the bounds themselves are out."""

    def allow(self, value: float) -> bool:
        """Whether `value` lies within; NaN does not."""
        if self.open and math.isfinite(value):
            return self.low < value < self.high
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high >= sys.float_info.max:
            return f"above {self.low:g}" if self.open else f"{self.low:g} or above"
        return f"between {self.low:g} and {self.high:g}" if self.open else f"{self.low:g}..{self.high:g}"


# Where a number has bounds of its own, they stand at the setting.
POSITIVE = Bounds(0, open=True)
NOT_NEGATIVE = Bounds(0)
COUNT = Bounds(1)
SHARE = Bounds(0, 1)
DRAFT_LENGTH = Bounds(0, 16)


@dataclass(frozen=True)
class DrafterConfig:
    """What drafts, and how it learns."""

    path: str | None = None
    """Directory of an EAGLE-3 drafter to start from, or its name on the Hugging Face hub; speculators', SpecForge's or
    SafeAILab's layout. Null: a random head."""
    save_dir: str | None = None
    """Where the drafter is left at the end of the run; null: `<trainer.default_local_dir>/tlt_drafter`."""
    aux_layers: Annotated[tuple[int, ...] | None, NOT_NEGATIVE] = None
    """Layer *inputs* of the policy fed to the drafter; null: (2, L/2, L-3), spread out for shallow models."""
    intermediate_size: Annotated[int | None, COUNT] = None
    """Width of a new drafter's MLP; null: the policy's. A narrower one drafts and trains faster and learns less."""
    objective: Literal["eagle", "hass", "eagle3"] = "hass"
    """How many draft positions a training step unrolls: `eagle` 1, `hass` 3, `eagle3` 7."""
    loss: Literal["kl_div", "ce", "tv", "nla", "lk_hybrid"] = "kl_div"
    """Loss of `speculators.losses`."""
    learning_rate: Annotated[float, Bounds(0, 1, open=True)] = 1e-3
    """AdamW's learning rate after warm-up."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 20
    """Optimizer steps over which the learning rate rises linearly."""
    batch_tokens: Annotated[int, COUNT] = 1024
    """Tokens in one packed micro-batch: also the longest a stop request waits."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seeds the random head and the order of training sequences."""

    @property
    def passes(self) -> int:
        """Training-time-test passes per step."""
        return OBJECTIVES[self.objective]


@dataclass(frozen=True)
class SpeculationConfig:
    """How many tokens to draft, decided once per engine step before drafting."""

    enable: bool = True
    """False: decode as stock verl does; spot training can still run."""
    policy: Literal["goodput", "bandit", "ema", "table", "fixed", "off"] = "goodput"
    """Who chooses the draft length K: measured goodput, TLT's bandit, SGLang's tiers, a table measured at start, one K,
    or nobody."""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """Constants of the policies goodput, bandit and ema, by name; docs/adaptive-speculation.md lists them."""
    max_draft_length: Annotated[int, Bounds(1, 16)] = 3
    """K_max: the longest draft."""
    arms: Annotated[tuple[int, ...] | None, DRAFT_LENGTH] = None
    """Draft lengths the policy may use, ascending, starting with 0; null: 0..K_max on eager engines, else those with
    CUDA graphs ({0, 1, 3} on vLLM 0.24, {0, 1, 3, 7} later), up to K_max."""
    fixed: Annotated[int | None, DRAFT_LENGTH] = None
    """The K of policy=fixed; null: K_max."""
    calibrate: bool = True
    """Measure step latency by batch and K at start, about 20 seconds; false: learn it from the rollout alone."""
    costs_dir: str | None = "~/.cache/verl-tlt/costs"
    """Where step costs are kept, measured by `verl-tlt calibrate` or learned by a run, for the next run on the same
    hardware, policy and vLLM, which then measures nothing at start; null: nowhere."""
    audit_every: Annotated[int, NOT_NEGATIVE] = 0
    """Every so many steps one replica decodes without the drafter, and the true saving is reported; 0: never."""
    source: Literal["eagle", "ngram", "both"] = "eagle"
    """Who drafts: the drafter, n-grams of sibling responses without any drafter, or n-grams where they match and the
    drafter elsewhere. n-grams give up vLLM's async scheduling."""
    ngram_keep: bool = True
    """Whether a prompt's responses outlive a weight sync, for its next epoch; false: only siblings are quoted."""


@dataclass(frozen=True)
class SpotConfig:
    """Training the drafter in idle time: on replicas that have finished while others decode, or while the trainer
    waits for samples (`trainer.v1.trainer_mode=separate_async`).
    """

    enable: bool = True
    """False: the drafter stays as it was loaded."""
    poll_s: Annotated[float, POSITIVE] = 0.05
    """Seconds between two looks at the replicas' load while it changes, up to five times as many while it does not."""
    settle_s: Annotated[float, NOT_NEGATIVE] = 0.1
    """A replica must have been empty this long before it is asked to leave, or the trainer must have waited as long."""
    stop_timeout_s: Annotated[float, POSITIVE] = 5.0
    """A spot worker that has not stopped by then is killed and restarted; RL does not wait longer."""
    max_epochs: Annotated[float, Bounds(0, math.inf, open=True)] = 3.0
    """Passes over the buffer's tokens per session at most (a small buffer is memorised otherwise)."""
    min_merge_steps: Annotated[int, COUNT] = 8
    """Fewer optimizer steps than this are not merged but kept for later: AdamW's first steps are sign-like."""
    max_failures: Annotated[int, COUNT] = 3
    """Failed sessions in a row after which a replica's spot training stays off for the run."""


@dataclass(frozen=True)
class BufferConfig:
    """The hidden states of recent rollouts, kept on the node that made them."""

    max_mb: Annotated[int, COUNT] = 2048
    """Bytes of hidden states per spot worker, in MiB; the oldest step is evicted first."""
    keep_steps: Annotated[int, COUNT] = 8
    """RL steps a sequence stays."""
    min_tokens: Annotated[int, NOT_NEGATIVE] = 2000
    """Below this many tokens no session starts."""
    tokens_per_step: Annotated[int, COUNT] = 8192
    """Tokens captured per worker and RL step; each length gets its share of the tokens."""
    window: Annotated[int, COUNT] = 4096
    """Longest stretch kept of one sequence, at its true positions."""
    held_out: Annotated[float, Bounds(0, 0.9, open=True)] = 0.1
    """Share of sequences that only the publish gate sees."""


@dataclass(frozen=True)
class GateConfig:
    """Whether a merged drafter is served."""

    enable: bool = True
    """False: every merged drafter is published."""
    margin: Annotated[float, SHARE] = 0.0025
    """Publish when the candidate is surely not worse than the served drafter by this share of its accept length (and
    is not seen to be worse than the initial one by as much)."""
    revert: Annotated[float, SHARE] = 0.01
    """Go back to the best of served and initial when the candidate is surely worse than it by this share."""
    min_tokens: Annotated[int, NOT_NEGATIVE] = 512
    """Held-out positions needed to judge; with fewer a candidate is served only if what is served is useless."""


@dataclass(frozen=True)
class TraceConfig:
    """What is written down."""

    dir: str | None = None
    """Directory of the JSONL trace; null: `<trainer.default_local_dir>/tlt_trace`."""
    engine_steps: bool = True
    """One line per engine step (about 150 bytes)."""


@dataclass(frozen=True)
class TLTConfig:
    """The `tlt` node."""

    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    spot: SpotConfig = field(default_factory=SpotConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    @classmethod
    def from_dict(cls, node: Mapping[str, Any] | None) -> TLTConfig:
        """Build from nested mappings (YAML, Hydra, JSON).

        Raises:
            TLTConfigError: an unknown key, a value of the wrong type, or values that contradict each other.
        """
        config = _build(cls, node or {}, "tlt")
        _check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars: survives OmegaConf, JSON and Ray."""
        return typing.cast(dict[str, Any], _plain(dataclasses.asdict(self)))


T = TypeVar("T")


def _build(cls: type[T], node: Mapping[str, Any], where: str) -> T:
    if not isinstance(node, Mapping):
        raise TLTConfigError(f"{where} must be a mapping of settings, not {node!r}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" Did you mean {where}.{close[0]}?" if close else f" Known keys: {', '.join(names)}."
            raise TLTConfigError(f"{where}.{key} is not a setting of verl-tlt.{hint}")
        hint_type = hints[key]
        path = f"{where}.{key}"
        convert: Any = _build if dataclasses.is_dataclass(hint_type) else _cast
        values[key] = convert(hint_type, value, path)
    return cls(**values)


def _cast(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, within its bounds; ints pass for floats, lists for tuples, nothing else does."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = _cast(args[0], value, where)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if wrong := [number for number in numbers if not args[1].allow(number)]:
            raise TLTConfigError(f"{where} must be {args[1]}, not {wrong[0]}.")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _cast(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value is False and "off" in args:  # how YAML reads a bare `off`
            return "off"
        if value not in args:
            raise TLTConfigError(f"{where} must be one of {', '.join(map(str, args))}, not {value!r}.")
        return value
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise TLTConfigError(f"{where} must be a mapping of names to values, not {value!r}.")
        return {k: _plain(v) for k, v in value.items()}
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise TLTConfigError(f"{where} must be a list of {args[0].__name__}, not {value!r}.")
        return tuple(_cast(args[0], v, where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TLTConfigError(f"{where} must be of type {hint.__name__}, not {value!r}.")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if hasattr(value, "__iter__") and not isinstance(value, str | bytes) else value


def _check_policy(s: SpeculationConfig) -> None:
    """Let the policy itself judge its options; the draft lengths may be fewer later, where CUDA graphs decide."""
    from verl_tlt.speculation.policies.factory import make_policy  # numpy, which this module does not need otherwise
    from verl_tlt.speculation.types import ControlError

    try:
        make_policy(s.policy, s.arms or tuple(range(s.max_draft_length + 1)), settings=s.policy_options)
    except ControlError as error:
        raise TLTConfigError(f"tlt.speculation.policy_options: {error}") from error


def _check(c: TLTConfig) -> None:
    """Contradictions between settings."""
    s = c.speculation
    if s.arms is not None:
        if list(s.arms) != sorted(set(s.arms)) or not s.arms or s.arms[0] != 0:
            raise TLTConfigError(f"tlt.speculation.arms must be ascending and start with 0, not {list(s.arms)}.")
        if s.arms[-1] > s.max_draft_length:
            raise TLTConfigError(
                f"tlt.speculation.arms goes up to {s.arms[-1]}, above "
                f"tlt.speculation.max_draft_length={s.max_draft_length}."
            )
    if s.fixed is not None and s.fixed > s.max_draft_length:
        raise TLTConfigError(f"tlt.speculation.fixed must be 0..max_draft_length={s.max_draft_length}, not {s.fixed}.")
    if s.policy_options:
        _check_policy(s)
