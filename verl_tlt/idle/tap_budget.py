"""How many tokens to capture of a step, for a session to have something to train on as long as its bubble lasts.

A drafter for a toy learns all there is to learn from 8,192 tokens a step; one for a 7B policy has passed over them
before a bubble of minutes has well begun. So the tokens double while most sessions use up their passes with much of the
bubble left, as far as two steps fit into the buffer; and they are halved again, for good, if copying them out of the
actor's forward takes noticeable time.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

LEFT = 0.2
"""Share of a bubble that may be left when a session's data is used up; with more left it was short of data."""
SHORTEST_S = 1.0
"""Shortest bubble in seconds that counts: a shorter one is over before data could matter."""
STEP_SHARE = 0.5
"""Largest share of a buffer that one step's tokens fill: doubling stops while two steps still fit. Page-locked memory
of the actor's ranks holds as many bytes for each worker while they are handed over."""
TAP_SHARE = 0.005
"""Largest share of a step's time that the tap may take: half of what all of TLT's work may."""
COLD = 4
"""Factor of the tokens before a cold start: so much of one step (28 to 64 KB a token for 7B to 70B policies) still fits
into the smallest buffer."""
REMEMBERED = 3
"""Number of steps whose costs count."""

Seconds = Mapping[str, float]
"""Seconds by replica."""


class TapBudget:
    """Tokens of one step to capture for each worker's buffer, of `max_bytes`: `first`, adapted to bubbles if `follows`.

    `cold`: a cold start is to come, which needs `COLD` times as many.
    """

    def __init__(self, first: int, follows: bool, max_bytes: int, cold: bool = False) -> None:
        self.tokens, self._least = first * (COLD if cold and follows else 1), first
        self._max_bytes, self._follows = max_bytes, follows
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # of a captured token, as a share of its step
        self._asked = first  # tokens of the forward that comes next
        self._before: float | None = None  # when the step before this one was captured

    def _share(self, tokens: int) -> float:
        """Share of a step's time that capturing so many tokens takes; 0: nothing is known yet."""
        return tokens * median(self._costs) if self._costs else 0.0

    def sampled(self, bubble_s: Seconds, trained_s: Seconds, exhausted: Mapping[str, bool], token_bytes: float) -> None:
        """A step's sampling is over: by replica its bubble, the part of it in which it trained, and, of those that
        trained, whether the last session used up its passes; bytes of one token's hidden states (0: not known yet).
        """
        long = [name for name in exhausted if bubble_s.get(name, 0.0) >= SHORTEST_S]
        short_of_data = sum(exhausted[n] and trained_s.get(n, 0.0) < (1 - LEFT) * bubble_s[n] for n in long)
        wanted = self._follows and bool(token_bytes) and 2 * short_of_data > len(long)
        if wanted and self._share(2 * self.tokens) <= TAP_SHARE:
            self.tokens = max(self.tokens, min(2 * self.tokens, int(self._max_bytes * STEP_SHARE / token_bytes)))

    def tapped(self, tap_s: float, now: float) -> None:
        """A step's hidden states were captured and handed over at `now`, and the next forward was told of `tokens`.

        `tap_s`: seconds that this kept the step, in the forward of the actor's slowest rank and in handing over.
        """
        before, self._before = self._before, now
        captured, self._asked = self._asked, self.tokens
        if before is not None and now > before:
            self._costs.append(tap_s / (now - before) / captured)
            if self._follows and self._share(self.tokens) > TAP_SHARE:
                self.tokens = max(self._least, self.tokens // 2)
