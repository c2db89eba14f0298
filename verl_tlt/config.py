"""Every setting of the plugin: typed dataclasses, one default each, and one clear sentence for a wrong one.

A user's settings arrive as the `tlt` node of verl's Hydra config. The driver turns them into a `TLTConfig`,
which checks them, and passes them on as a plain dict in `actor_rollout_ref.rollout.custom.tlt`, the only
place verl hands to every process. A field made by `constant` is no setting: no user needs another value, and the
driver may compute one for the run. Nothing here imports verl, torch or vLLM.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from verl_tlt import LONGEST_DRAFT
from verl_tlt.errors import TLTError, wrong_field

OBJECTIVES = {"eagle": 1, "hass": 3, "eagle3": 7}
"""Passes of the training-time test by the name of the method that trains so; the costs of the TLT paper's Table 7."""


def dtype_name(name: object) -> str:
    """A rollout's `dtype` as torch spells it; engines compute in 16 bits unless told otherwise."""
    short = str(name).removeprefix("torch.")
    return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(short, short)


class TLTConfigError(TLTError, ValueError):
    """A setting is wrong; the message names the key and says what is allowed."""


STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""Types are not converted, except that an int may stand for a float and a list for a tuple."""

MOST = 2**31 - 1
"""Largest number that a setting may have: larger ones overflow clocks, random generators and engines."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
DraftLength = Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]


def constant(default: Any) -> Any:
    """Declare a field of a section that is no setting."""
    return field(default=default, metadata={"constant": True})


def _policy(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"live_table|fixed|[\w.]+:\w+", value):
        raise PydanticCustomError("policy", "must be live_table, fixed or module:Class of your own")
    return value


Policy = Annotated[str, BeforeValidator(_policy)]


@dataclass(frozen=True, config=STRICT)
class DrafterConfig:
    """The drafter and how it is trained."""

    method: Literal["eagle3", "mtp"] = "eagle3"
    """Kind of drafter: `eagle3`, a separate head, or `mtp`, the multi-token prediction head in the policy's files."""
    path: str | None = None
    """Folder of the drafter to start from, or its name on the Hugging Face hub. Null: a random EAGLE-3 head, or the
    policy's own MTP head. A resumed run takes the drafter of its checkpoint instead. If the checkpoint has none, it
    takes the newest drafter of the earlier checkpoints in the same folder."""
    save_dir: str | None = None
    """Folder in which the trained drafter is saved at the end. Null: `<trainer.default_local_dir>/tlt_drafter`."""
    vocab: Annotated[int, Field(ge=2)] | Literal["full"] | None = None
    """Number of tokens that a new EAGLE-3 drafter can propose (the most frequent ones of the first rollout), or `full`
    for all. Null: all, or 32,768 if the policy has more than 65,536 tokens. A drafter from `path` keeps its own."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Learning rate with which the drafter is trained (AdamW)."""
    warmup_steps: Index = constant(20)
    """Optimizer steps over which the learning rate rises linearly: AdamW's moments are of few steps before."""
    batch_tokens: Count | None = constant(None)
    """Tokens in one packed micro-batch, which is also the longest that a stop request waits."""


@dataclass(frozen=True, config=STRICT)
class SpeculationConfig:
    """Drafting in the rollout."""

    enable: bool = True
    """False: engines start without a drafter, as in stock verl. The drafter can still be trained."""
    policy: Policy = "live_table"
    """How the draft length K is chosen: `live_table`, from measured step times and acceptance; `fixed`, one K in every
    step, also if that is slower than no drafts; or `module:Class`, your own rule for choosing K."""
    max_draft_length: Annotated[int, Field(ge=1, le=LONGEST_DRAFT)] = 3
    """Longest draft, in tokens. On GPUs with vLLM 0.24 to 0.31 a larger value can make steps with shorter drafts
    slower, because vLLM pads them."""
    fixed: DraftLength | None = None
    """K of `policy=fixed`. Null: the longest draft."""
    calibrate: bool = constant(True)
    """Measure step latency by batch and K at start."""
    source: Literal["eagle", "ngram"] = "eagle"
    """`eagle`: the drafter proposes tokens. `ngram`: drafts are copied from other responses to the same prompt, without
    a drafter and without vLLM's async scheduling. They are as long as allowed at every batch size. Whether this saves
    time was not measured."""


@dataclass(frozen=True, config=STRICT)
class SpotConfig:
    """Training the drafter in idle time: on the GPU of a replica that has finished while others decode. With
    `trainer.v1.trainer_mode=separate_async`: on the trainer's GPUs, while they wait for samples.
    """

    enable: bool = True
    """False: the drafter is not trained and stays as it was loaded."""
    stop_timeout_s: Positive = 5.0
    """Seconds that RL waits for a training session to stop. Then the spot trainer (the process that trains) is killed
    and replaced."""
    max_epochs: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 3.0
    """Maximum number of passes over the buffered tokens per session. More passes overfit."""
    cold_start_s: NotNegative | None = None
    """Seconds that a run without a drafter pauses once, in its third step, to train one; 0: never. Null: 30 on GPUs,
    0 on the CPU."""


@dataclass(frozen=True, config=STRICT)
class BufferConfig:
    """The hidden states of recent rollouts, which the drafter is trained on."""

    max_mb: Count | None = None
    """MiB of host memory for hidden states; the oldest sequences are dropped first. Null: 2048 on the CPU. On GPUs 15 %
    of the memory that Ray may use on a node, minus what verl-tlt needs there for other things, but at least 2048."""
    min_tokens: Index = constant(2000)
    """Tokens below which no session starts: a replica does not leave for less than a few optimizer steps."""
    tokens_per_step: Count | None = None
    """Tokens whose hidden states are captured in each RL step. Null: 65,536, which is 2 GB for a 7B policy and
    4 GB for a 70B one."""
    window: Count = constant(4096)
    """Longest stretch kept of one sequence, at its true positions: it bounds the memory of one micro-batch."""
    held_out: Annotated[float, Field(gt=0, lt=0.9)] | None = constant(None)
    """Share of prompts whose responses only the publish gate sees; null: `trainer.run_setup` computes it."""


@dataclass(frozen=True, config=STRICT)
class GateConfig:
    """The test that a newly trained drafter has to pass before it is served."""

    enable: bool = True
    """False: each newly trained drafter is served without being scored first."""


@dataclass(frozen=True, config=STRICT)
class TraceConfig:
    """The trace, which `verl-tlt report` reads."""

    dir: str | None = None
    """Folder of the trace. Null: `<trainer.default_local_dir>/tlt_trace`."""


@dataclass(frozen=True, config=STRICT)
class TLTConfig:
    """The `tlt` node."""

    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    spot: SpotConfig = field(default_factory=SpotConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    @classmethod
    def from_user(cls, node: Mapping[str, object]) -> TLTConfig:
        """Build from the `tlt` node of a user's config, in which constants have no place (`from_dict`)."""
        return _checked(_build(cls, node, "tlt", constants=False))

    @classmethod
    def from_dict(cls, node: Mapping[str, object] | None) -> TLTConfig:
        """Build from nested mappings; `TLTConfigError` for an unknown key, a wrong type, or a contradiction."""
        return _checked(_build(cls, node or {}, "tlt", constants=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars: survives OmegaConf, JSON and Ray."""
        return dataclasses.asdict(self)


T = TypeVar("T")


def _build(cls: type[T], node: object, where: str, *, constants: bool) -> T:
    if not isinstance(node, Mapping):
        raise TLTConfigError(f"{where} must be a mapping of settings, not {node!r}.")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if constants or is_setting(f)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            instead = f"Did you mean {where}.{close[0]}?" if close else f"Known keys: {', '.join(known)}."
            removed = "CHANGELOG.md lists removed settings, and what to do instead."
            raise TLTConfigError(f"{where}.{key} is not a setting of verl-tlt. {instead} {removed}")
        is_section = dataclasses.is_dataclass(hints[key])
        if is_section:
            values[key] = _build(hints[key], value, f"{where}.{key}", constants=constants)
        elif value == "None":  # Python's spelling of Hydra's null
            values[key] = None
        else:
            values[key] = value
    try:
        return cls(**values)
    except ValidationError as error:
        raise TLTConfigError(f"{where}.{_wrong(error)}") from None


def is_setting(section_field: dataclasses.Field[Any]) -> bool:
    """Whether a user may set this field of a section, which is no `constant`."""
    return not section_field.metadata.get("constant", False)


def _wrong(error: ValidationError) -> str:
    """The key that pydantic refuses, and what is wrong with it.

    A key that takes values of several types has an error for each type: the sentence says what each would take.
    """
    first, *others = error.errors()
    key = str(first["loc"][0])
    _, wrong = wrong_field(error)
    must, separator, given = wrong.rpartition(", not ")
    alternatives = [other["msg"].removeprefix("Input should be ") for other in others if other["loc"][0] == key]
    return f"{key} {' or '.join([must, *alternatives])}{separator}{given}"


def _checked(config: TLTConfig) -> TLTConfig:
    """The same settings; a `TLTConfigError` where a number is too large, or where settings contradict each other."""
    for section, settings in config.to_dict().items():
        for key, value in settings.items():
            if isinstance(value, int | float) and MOST < value < math.inf:
                raise TLTConfigError(f"tlt.{section}.{key} must be at most {MOST:,}, not {value}.")
    speculation = config.speculation
    fixed = speculation.fixed
    longest = speculation.max_draft_length
    if fixed is not None and speculation.policy != "fixed" and speculation.source != "ngram":
        raise TLTConfigError("tlt.speculation.fixed needs tlt.speculation.policy=fixed: set that too, or leave it out.")
    if fixed is not None and fixed > longest:
        raise TLTConfigError(f"tlt.speculation.fixed must be 0..max_draft_length={longest}, not {fixed}.")
    if config.drafter.method == "mtp" and config.drafter.vocab is not None:
        raise TLTConfigError("tlt.drafter.vocab shapes an EAGLE-3 head; with tlt.drafter.method=mtp leave it out.")
    return config
