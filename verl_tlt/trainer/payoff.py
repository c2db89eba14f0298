"""When speculation does not pay in this run: it is stopped with its likely cause, and goes on with evidence alone.

Each engine weighs its drafter before every rollout (`speculation.draft_length`), by expectations that can be wrong in
the same way time after time. So the trainer looks at what came of them: drafts of which next to nothing is accepted, or
rollouts that end later than stock's would have, several times in a row, stop speculation in every engine. Then, in
rarer and rarer rollouts, one replica drafts again, and if it gains, everybody does. Pure, counts rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.baseline import Savings

IN_A_ROW = 3
"""Rollouts that show the same before speculation stops."""
USELESS = 1.05
"""Accept length up to which a drafter only costs."""
LOST = 0.03
"""Share of a rollout by which it must end later than stock's, and by which a probe must gain."""
FIRST_PROBE, LONGEST_WAIT = 8, 64
"""Rollouts from a stop to the first probe, and between two of them at most; the wait doubles."""


class Payoff:
    """Whether speculation is stopped, and who probes.

    Args:
        replicas: all replicas, in a fixed order.
        policy: `tlt.speculation.policy`; with "fixed" drafting is an order, and goes on.
        source: `tlt.speculation.source`; n-grams that match nothing cost nothing.
    """

    def __init__(self, replicas: Sequence[str], policy: str = "goodput", source: str = "eagle") -> None:
        self.cause = ""
        """Why speculation is stopped; empty: it is not."""
        self._replicas, self._source, self._ordered = list(replicas), source, policy == "fixed"
        self._useless = self._losing = 0
        self._wait, self._until, self._probes = FIRST_PROBE, 0, 0

    def choose_probe(self) -> str | None:
        """While stopped: the replica that drafts in the coming rollout all the same; each in turn, None in most."""
        if not self.cause or self._until > 0:
            return None
        return self._replicas[self._probes % len(self._replicas)]

    def observe(self, stats: Mapping[str, EngineStats], savings: Savings, stock: float, audited: bool) -> str | None:
        """Take note of a rollout.

        Args:
            stats: the schedulers' sums by replica.
            savings: what TLT saved in it.
            stock: share that stock vLLM's step takes of one in OFF, 1 where it was not measured.
            audited: somebody drafted nothing on purpose, so that the rollout's end says little.

        Returns:
            What is to be said: why speculation stops, or that it goes on; None: nothing new.
        """
        drafting = [name for name, s in stats.items() if s.num_drafts and _drafted(s) > 0.5]
        if self.cause:
            return self._probed(drafting, stats, savings)
        if self._ordered or not drafting:
            return None
        accepted, rollout_s = _accept_length(stats, drafting), max(s.busy_s for s in stats.values())
        self._useless = self._useless + 1 if accepted <= USELESS and self._source == "eagle" else 0
        if not audited and savings.drafting_s is not None and rollout_s > 0:
            share = savings.drafting_s / rollout_s
            self._losing = self._losing + 1 if share < -LOST else 0
        if self._useless < IN_A_ROW and self._losing < IN_A_ROW:
            return None
        if self._useless >= IN_A_ROW:
            why = (
                f"next to nothing that is drafted is accepted (accept length {accepted:.2f}): a drafter of another "
                "policy or of other aux layers, or stale weights (tlt/reload_failures)"
            )
        elif stock < 1.0 - LOST and _gained(savings, stats, drafting) > 0.0:
            why = (
                f"an engine with a drafter that does not run takes {1 / stock:.2f} times stock vLLM's step, which "
                "drafting does not make up for; tlt.speculation.enable=false is faster"
            )
        else:
            why = f"an accept length of {accepted:.2f} does not make up for what a drafted step costs at these batches"
        self._stop(why)
        return f"Speculation is stopped after {IN_A_ROW} rollouts that it made slower: {why}."

    def _stop(self, why: str) -> None:
        self.cause, self._useless, self._losing = why, 0, 0
        self._wait = self._until = FIRST_PROBE

    def _probed(self, drafting: Sequence[str], stats: Mapping[str, EngineStats], savings: Savings) -> str | None:
        """While stopped: a probe may have brought evidence."""
        self._until -= 1
        if self._until >= 0:
            return None
        self._probes += 1
        gained = _gained(savings, stats, drafting)
        if drafting and gained > LOST and (_accept_length(stats, drafting) > USELESS or self._source != "eagle"):
            self.cause = ""
            return f"Speculation goes on: {', '.join(drafting)} drafted, and saved {gained:.0%} of its decoding time."
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._until = self._wait
        return None


def _drafted(stats: EngineStats) -> float:
    """Share of engine steps that verified a draft."""
    steps = stats.steps_by_draft_length
    return sum(n for k, n in steps.items() if k > 0) / max(1, sum(steps.values()))


def _accept_length(stats: Mapping[str, EngineStats], names: Sequence[str]) -> float:
    drafts = sum(stats[name].num_drafts for name in names)
    return 1.0 + sum(sum(stats[name].num_accepted_tokens_per_pos) for name in names) / max(1, drafts)


def _gained(savings: Savings, stats: Mapping[str, EngineStats], names: Sequence[str]) -> float:
    """Share of decoding time in OFF that these replicas saved; 0 where less than half of it can be compared."""
    saved_s, compared_s = (sum(savings.of.get(name, (0.0, 0.0))[i] for name in names) for i in range(2))
    if compared_s <= 0.0 or compared_s < sum(stats[name].busy_s for name in names) / 2:
        return 0.0
    return saved_s / (saved_s + compared_s) if saved_s + compared_s > 0 else 0.0
