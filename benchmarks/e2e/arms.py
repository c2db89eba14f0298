"""What the benchmark compares: stock verl, vLLM's own speculation, and TLT with and without its parts.

Those of vLLM take the drafter that `tlt` starts from unless their name says otherwise, and `vllm-table` the draft
lengths that are best by the same measured step costs.

verl puts its engines to sleep after every rollout, at level 2, which discards the drafter's weights with the policy's.
verl sends the policy's anew, and nobody the drafter's: vLLM issue 52479, open in September 2026, and so by default in
the sources of vLLM 0.24, 0.28, 0.29, 0.31 and 0.32. That is `vllm-3-lost`. On a GPU the memory then holds anything,
here NaN (`verl_cpu.sleep_memory`), of which vLLM drafts token 0 again and again; all drafts are rejected, tokens stay
right, and no warning is given. It drafts greedily, vLLM's default: with drawn drafts NaN would reach the tokens.

The other arms of vLLM keep their drafter because their engines never sleep (`NO_SLEEP`); on a GPU their weights and KV
cache would stay in its memory during training. A drafter is also kept by vLLM 0.32 where it is asked to
(`sleep_preserve_parameter_names`), and at level 1, which verl takes for LoRA and for MTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.toy_job import SAMPLES
from verl_tlt.commands.compare.plan import NO_SPOT, STOCK, TLT, Arm, vllm_arm

VLLM_LENGTHS = (1, 3, 7)
LONGEST = VLLM_LENGTHS[-1]
KEPT = "vLLM's own speculation, K={}, with {}, kept because the engines never sleep: verl's defaults lose it"
WARMED = "the warmed-up drafter"
COLD_START_S = "60"
"""What a run of some hundred such steps would give its cold start by itself; a turn of a dozen would have none."""


@dataclass(frozen=True)
class Load:
    prompts: int
    """Of a step, each with `SAMPLES` responses; two replicas share them."""
    requests: int
    """Most that an engine decodes at once: `max_num_seqs`."""

    @property
    def responses(self) -> int:
        return self.prompts * SAMPLES

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the recipe: one update a step, whatever its size."""
        return (
            f"data.train_batch_size={self.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            f"actor_rollout_ref.rollout.max_num_seqs={self.requests}",
        )


LOADS = {
    "small": Load(prompts=6, requests=32),
    "large": Load(prompts=24, requests=64),
    "wide": Load(prompts=48, requests=128),
}
"""An engine begins with 12, 48 or 96 responses: the more there are, the less drafts pay."""


@dataclass(frozen=True)
class Heads:
    warm: Path
    """Made by `verl-tlt warmup` for the policy that every arm starts from."""
    stale: Path
    """Made in the same way for an earlier policy."""
    random: Path
    """Not trained at all."""


def arms(
    heads: Heads, schedule: Sequence[Sequence[int]], cold_start: str = COLD_START_S, longest: int = LONGEST
) -> dict[str, Arm]:
    """All by name, `stock` first.

    `schedule` is that of `vllm-table`; `cold_start` is `tlt.spot.cold_start_s` of the arm without a drafter; `longest`
    is the longest draft of TLT's arms and of `vllm-table`.
    """
    common = (f"tlt.speculation.max_draft_length={longest}",)
    every = [Arm(STOCK, "stock verl, no speculation", False), *_of_vllm(heads, schedule, longest)]
    every += _of_tlt(heads.warm, common, cold_start)
    return {arm.name: arm for arm in every}


def _of_vllm(heads: Heads, schedule: Sequence[Sequence[int]], longest: int) -> list[Arm]:
    """Stock verl, stock vLLM, and a drafter that nobody trains."""
    lost = (
        "vLLM's own speculation, K=3, with the warmed-up drafter and verl's defaults: its weights are discarded at "
        "every sleep and not sent again (vLLM issue 52479)"
    )
    by_batch = KEPT.format("by batch from a table of measured costs", WARMED)
    return [
        *(vllm_arm(f"vllm-{k}", KEPT.format(k, WARMED), str(heads.warm), k) for k in VLLM_LENGTHS),
        vllm_arm("vllm-table", by_batch, str(heads.warm), longest, schedule),
        vllm_arm("vllm-3-stale", KEPT.format(3, "a drafter made for an earlier policy"), str(heads.stale), 3),
        vllm_arm("vllm-3-random", KEPT.format(3, "a drafter of random weights"), str(heads.random), 3),
        vllm_arm("vllm-3-lost", lost, str(heads.warm), 3, lost=True),
    ]


def _of_tlt(warm: Path, common: tuple[str, ...], cold_start: str) -> list[Arm]:
    """TLT with and without its parts; verl's defaults otherwise, sleep too."""
    begins = "a cold start if that pays" if cold_start == "null" else f"a cold start of {cold_start} s at most"
    no_spot, started = "tlt.spot.enable=false", f"tlt.drafter.path={warm}"
    parts = [
        ("tlt-off", "TLT from a random drafter that nothing trains: what it costs where it does not draft", (no_spot,)),
        (NO_SPOT, "TLT from the warmed-up drafter, which it does not train", (started, no_spot)),
        ("tlt-ngram", "TLT with n-grams in a drafter's place", ("tlt.speculation.source=ngram", no_spot)),
        (
            "tlt-fresh",
            f"TLT from a random drafter: {begins}, then trained in idle time",
            (f"tlt.spot.cold_start_s={cold_start}",),
        ),
        (TLT, "TLT from the warmed-up drafter, trained on in idle time", (started,)),
    ]
    return [Arm(name, label, True, (*common, *own)) for name, label, own in parts]
