"""What the benchmark compares: stock verl, vLLM's own speculation, and TLT.

The arms of vLLM take the drafter that `tlt` starts from.

verl puts its engines to sleep after every rollout, at level 2, which discards the drafter's weights with the policy's.
verl sends the policy's anew, and nobody the drafter's: vLLM issue 52479, open in September 2026, and so by default in
the sources of vLLM 0.24, 0.28, 0.29, 0.31 and 0.32. That is `vllm-3-lost`. On a GPU the memory then holds anything,
here NaN (`verl_cpu.sleep_memory`), of which vLLM drafts token 0 again and again; all drafts are rejected, tokens stay
right, and no warning is given. It drafts greedily, vLLM's default: with drawn drafts NaN would reach the tokens.

The other arms of vLLM keep their drafter because their engines never sleep (`NO_SLEEP`); on a GPU their weights and KV
cache would stay in its memory during training. A drafter is also kept by vLLM 0.32 where it is asked to
(`sleep_preserve_parameter_names`), and at level 1, which verl takes for LoRA and for MTP.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from verl_tlt.commands.compare.plan import NO_SLEEP, STOCK, TLT, Arm, vllm_arm

KEPT = "vLLM's own speculation, {}, with the warmed-up drafter, kept because the engines never sleep"
LOST = (
    "vLLM's own speculation, K=3, with the warmed-up drafter and verl's defaults: its weights are discarded at every "
    "sleep and not sent again (vLLM issue 52479)"
)
COLD_START_S = "300"
"""Of `tlt-fresh`. A step of stock verl takes about 200 s here; on the CPU a run has no cold start by default."""


@dataclass(frozen=True)
class Load:
    prompts: int
    """Of a step, four responses each; two replicas share them."""
    requests: int
    """Most that an engine decodes at once: `max_num_seqs`."""

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
    "wide": Load(prompts=48, requests=128),
}
"""24 and 192 responses, which two engines share: the more there are, the less drafts pay."""


def lost_arm(name: str, label: str, drafter: str, longest: int) -> Arm:
    """vLLM's own speculation with verl's defaults: engines sleep and lose the drafter, and drafts are greedy."""
    kept = vllm_arm(name, label, drafter, longest)
    overrides = [o.replace("draft_sample_method:probabilistic", "draft_sample_method:greedy") for o in kept.overrides]
    return replace(kept, overrides=tuple(o for o in overrides if o != NO_SLEEP))


def arms(warm: Path, cold_start: str, longest: int) -> dict[str, Arm]:
    """All by name, `stock` first.

    Args:
        warm: the drafter, made by `verl-tlt warmup` for the policy that every arm starts from.
        cold_start: `tlt.spot.cold_start_s` of the arm without a drafter.
        longest: the longest draft of TLT's arms.
    """
    drafter, began = str(warm), f"tlt.drafter.path={warm}"
    begins = "a cold start if that pays" if cold_start == "null" else f"a cold start of {cold_start} s at most"

    def tlt(name: str, label: str, *overrides: str) -> Arm:
        return Arm(name, f"TLT {label}", True, (f"tlt.speculation.max_draft_length={longest}", *overrides))

    every = [
        Arm(STOCK, "stock verl, no speculation", False),
        vllm_arm("vllm-3", KEPT.format("K=3"), drafter, 3),
        vllm_arm("vllm-7", KEPT.format("K=7"), drafter, 7),
        lost_arm("vllm-3-lost", LOST, drafter, 3),
        tlt(
            "tlt-fresh",
            f"from a random drafter: {begins}, then trained in idle time",
            f"tlt.spot.cold_start_s={cold_start}",
        ),
        tlt(TLT, "from the warmed-up drafter, trained on in idle time", began),
    ]
    return {arm.name: arm for arm in every}
