"""What is compared: ways to run one recipe, each with its own command line and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from verl_tlt.errors import TLTError

STOCK, TLT, NO_SPOT = "stock", "tlt", "tlt-no-spot"
LONGEST_DRAFT = 16
ENGINE = "actor_rollout_ref.rollout"
SPECULATIVE = f"++{ENGINE}.engine_kwargs.vllm.speculative_config"
NO_SLEEP = f"{ENGINE}.free_cache_engine=False"
OWN_LOG = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "5"}
"""verl keeps vLLM's log, which has the accept length of its own speculation, at warnings unless told otherwise."""


class CompareError(TLTError):
    """What a comparison was asked for cannot be compared, or a job of it failed."""


@dataclass(frozen=True)
class Arm:
    """One way to run the recipe."""

    name: str
    label: str
    """What it is, in words that stand in a table."""
    tlt: bool
    """Whether it has the flag, and the recipe's settings of TLT."""
    overrides: tuple[str, ...] = ()
    """After those of the recipe."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process of its jobs, besides the recipe's."""

    @property
    def own_speculation(self) -> bool:
        """Whether vLLM's own speculation is on, whose accept length only its log has."""
        return any(override.startswith(SPECULATIVE) for override in self.overrides)


def quoted(value: object) -> str:
    """A value as Hydra reads it, whatever characters it has."""
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value)).replace("'", r"\'")
    return f"'{text}'"


def vllm_arm(
    name: str, label: str, drafter: str, longest: int, schedule: Sequence[Sequence[int]] = (), *, sampled: bool = True
) -> Arm:
    """Stock verl whose engines have vLLM's own speculation.

    Args:
        name: of the arm.
        label: what it is.
        drafter: an EAGLE-3 drafter; its weights are read from its file, though verl fills in the policy's later.
        longest: `num_speculative_tokens`, K.
        schedule: rows of `num_speculative_tokens_per_batch_size`; none: always `longest`.
        sampled: drafts are drawn; False: vLLM's default, the likeliest token, which is accepted less often.
    """
    table = f",num_speculative_tokens_per_batch_size:{[list(row) for row in schedule]}" if schedule else ""
    method = "probabilistic" if sampled else "greedy"
    config = (
        f"{SPECULATIVE}={{method:eagle3,model:{quoted(drafter)},num_speculative_tokens:{longest},"
        f"draft_sample_method:{method},draft_load_config:{{load_format:auto}}{table}}}"
    )
    return Arm(name, label, False, (config, f"{ENGINE}.disable_log_stats=False"), OWN_LOG)


def named_arms(names: Sequence[str], drafter: str | None) -> list[Arm]:
    """Stock verl and the arms of these names.

    Args:
        names: `tlt`, `tlt-no-spot`, or `vllm-K` and `vllm-K-lost` for any K.
        drafter: what TLT and vLLM draft with; None: TLT starts from a random head.

    Raises:
        CompareError: there is no such arm, or one that needs a drafter and none is given.
    """
    given = () if drafter is None else (f"++tlt.drafter.path={quoted(drafter)}",)
    known = {
        STOCK: Arm(STOCK, "the recipe with stock verl", False),
        TLT: Arm(TLT, "the recipe with verl-tlt", True, given),
        NO_SPOT: Arm(NO_SPOT, "verl-tlt whose drafter is not trained", True, (*given, "++tlt.spot.enable=false")),
    }
    found = {STOCK: known[STOCK]}
    for name in names:
        match = re.fullmatch(r"vllm-([1-9][0-9]?)(-lost)?", name)
        if name not in known and (match is None or int(match[1]) > LONGEST_DRAFT):
            vllm = f"vllm-1 to vllm-{LONGEST_DRAFT} and vllm-1-lost to vllm-{LONGEST_DRAFT}-lost"
            raise CompareError(f"There is no arm {name!r}; there are {', '.join(known)}, {vllm}.")
        if match is None:
            found[name] = known[name]
        elif drafter is None:
            raise CompareError(f"The arm {name} needs a drafter: name one with --drafter or tlt.drafter.path.")
        else:
            found[name] = _fixed(name, drafter, int(match[1]), lost=bool(match[2]))
    if len(found) == 1:
        raise CompareError(f"Stock verl is compared with nothing: give another arm, such as --arms {TLT}.")
    return list(found.values())


def _fixed(name: str, drafter: str, k: int, *, lost: bool) -> Arm:
    """vLLM's own speculation with one draft length, with verl's defaults (`lost`) or with engines that never sleep."""
    own = f"vLLM's own speculation, K={k}"
    if lost:  # what is left in a GPU's memory may be NaN, which drawn drafts would bring into the tokens
        return vllm_arm(
            name, f"{own}, with verl's defaults, which lose the drafter in sleep", drafter, k, sampled=False
        )
    arm = vllm_arm(name, f"{own}; its engines never sleep, since verl's defaults lose the drafter", drafter, k)
    return replace(arm, overrides=(*arm.overrides, NO_SLEEP))
