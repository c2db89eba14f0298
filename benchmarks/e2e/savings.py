"""Seconds that TLT says it saved, beside those that were measured."""

from collections.abc import Sequence

from benchmarks.intervals import pooled
from verl_tlt.commands.compare.record import Step
from verl_tlt.commands.compare.result import pairs


def saved(stock: Sequence[Step], arm: Sequence[Step]) -> dict[str, float] | None:
    """What an arm's `tlt/saved_estimate_s` claimed, and by how much those rollouts were shorter than stock's.

    Both limits of what was measured and of the claim's error are of 95 % of the draws; the machine's pace is in them,
    since stock's step ran at another time, and so are the lengths that each arm sampled. None: no step had a claim.
    """
    both = [(ours.saved_s, theirs.rollout_s - ours.rollout_s) for theirs, ours in pairs(stock, arm)]
    claims = [(claimed, measured) for claimed, measured in both if claimed is not None]
    if not claims:
        return None
    measured, low, high = pooled(claims, lambda sums: sums[:, 1])
    _, error_low, error_high = pooled(claims, lambda sums: sums[:, 0] - sums[:, 1])
    figures = {
        "claimed_s": sum(claim for claim, _ in claims),
        "measured_s": measured,
        "measured_low_s": low,
        "measured_high_s": high,
        "error_low_s": error_low,
        "error_high_s": error_high,
    }
    return {name: round(figure, 2) for name, figure in figures.items()}
