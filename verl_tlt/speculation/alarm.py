"""The alarm for a drafter whose drafts are accepted far less often in a rollout than on held-out text."""

from collections.abc import Iterable, Sequence

from verl_tlt.messages.rollout import EngineStats

FAR_BELOW = 0.5
"""Share of the held-out acceptance of the first draft token below which a rollout's is an alarm."""
FEWEST_DRAFTS = 200
"""Drafts in a rollout from which on its acceptance counts: of 200 at a rate of 0.3, fewer than half that are accepted
in one rollout of a million."""


def falls_short(stats: Iterable[EngineStats], held_out: Sequence[float]) -> str | None:
    """A sentence with the likely causes if acceptance in a rollout is far below what it was on held-out text, or None.

    The first draft token is compared, because the other positions depend on the draft lengths that were chosen.
    `stats`: one per engine. `held_out`: conditional acceptance by draft position of the served drafter; empty: unknown.
    """
    drafts = accepted = 0
    for engine in stats:
        drafts += engine.num_drafts
        accepted += next(iter(engine.num_accepted_tokens_per_pos), 0)
    if not held_out or drafts < FEWEST_DRAFTS or accepted / drafts >= FAR_BELOW * held_out[0]:
        return None
    return (
        f"In this rollout {accepted / drafts:.0%} of the first draft tokens were accepted, and {held_out[0]:.0%} on "
        "held-out text. Likely causes: a drafter of another policy or of other aux layers, weights that were not "
        "loaded again after a weight sync (tlt/reload_failures), or prompts unlike those that were held out."
    )
