"""What an arm says of itself, against what was measured: seconds saved, and rollouts in which nothing was drafted."""

from collections.abc import Sequence
from typing import Any

from verl_tlt.commands.compare.record import Step
from verl_tlt.commands.compare.result import Pairs, pairs, pooled, ratio


def claims(stock: Sequence[Step], arm: Sequence[Step]) -> dict[str, Any]:
    """An arm's `saved`, and `rollout_off`: rollouts in which nothing was drafted, per token; None: there was none."""
    both = pairs(stock, arm)
    off = [(theirs, ours) for theirs, ours in both if ours.draft_length == 0.0]
    return {
        "saved": saved(both),
        "rollout_off": ratio(off, lambda s: s.rollout_s, lambda s: s.tokens) if off else None,
    }


def saved(both: Pairs) -> dict[str, float] | None:
    """What an arm's `tlt/saved_estimate_s` claimed, and by how much those rollouts were shorter than stock's.

    Both limits of what was measured and of the claim's error are of 95 % of the draws; the machine's pace is in them,
    since stock's step ran at another time. None: no step had a claim.
    """
    claims = [(ours.saved_s, theirs.rollout_s - ours.rollout_s) for theirs, ours in both if ours.saved_s is not None]
    if not claims:
        return None
    measured = pooled(claims, lambda sums: sums[:, 1])
    error = pooled(claims, lambda sums: sums[:, 0] - sums[:, 1])
    names = ("claimed_s", "measured_s", "measured_low_s", "measured_high_s", "error_low_s", "error_high_s")
    figures = (sum(claim for claim, _ in claims), *measured, *error[1:])
    return {name: round(figure, 2) for name, figure in zip(names, figures, strict=True)}
