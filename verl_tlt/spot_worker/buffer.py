"""What to keep of captured sequences, and what to train on next. Bookkeeping only: payloads are opaque.

The drafter trains while this step's long responses are still being written, so it learns from those of the steps
before (TLT section 5.2: one-step-off). Hidden states are heavy (28-64 KB a token for 7B-70B policies), hence bytes are
capped and the oldest sequence goes first. In every choice a stretch of text counts by its tokens, as it did when the
sequences were captured (`actor.windows`).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from dataclasses import dataclass
from typing import Generic, TypeVar

OPEN_BATCHES = 32
"""Micro-batches kept open while packing: enough to fill them nearly always, few enough to cost nothing."""

FEW_HELD_OUT, MOST_HELD_OUT = 24, 0.25
"""While fewer sequences are held out, a quarter of those that arrive joins them: the gate's intervals shrink with their
number, and a share that suits thousands of responses a step leaves it hardly any of sixteen."""

P = TypeVar("P")


@dataclass(frozen=True, eq=False)
class Window(Generic[P]):
    """A stretch of one captured sequence."""

    payload: P
    """The arrays, or a reference to them; never looked at here."""
    begin: int
    """First row of the payload's arrays."""
    end: int
    """Row after the last."""
    start: int
    """True position, in the whole sequence, of the first row."""
    prompt_len: int
    """Prompt tokens of the whole sequence."""

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class _Item(Generic[P]):
    step: int
    nbytes: int
    held_out: bool
    whole: Window[P]


class Buffer(Generic[P]):
    """The sequences of recent steps, split for good into those trained on and those only the publish gate sees.

    Args:
        max_bytes: cap on the payloads' bytes.
        keep_steps: RL steps a sequence stays: with 1 only the newest step's.
        held_out: share of sequences held out, by a hash of (step, index); `MOST_HELD_OUT` while fewer than
            `FEW_HELD_OUT` are, unless it is 0.
    """

    def __init__(self, *, max_bytes: int, keep_steps: int, held_out: float) -> None:
        self._max_bytes, self._keep_steps, self._held_out = max_bytes, keep_steps, held_out
        self._items: list[_Item[P]] = []  # oldest first
        self._nbytes = self._train_tokens = 0
        self._evicted = self._refused = 0
        self._queue: list[list[Window[P]]] = []  # micro-batches left of the present pass
        self._queued_for = 0  # micro-batch size the queue was cut for
        self._pass_tokens = 0  # tokens of the present pass
        self._epochs = 0.0  # passes made in this session
        self._max_epochs = math.inf

    def add(
        self, *, step: int, index: int, prompt_len: int, length: int, nbytes: int, payload: P, start: int = 0
    ) -> bool:
        """Take in one captured sequence, or a window of it; then drop the oldest until the caps hold.

        Args:
            step: RL step that generated it.
            index: its number in that step, which decides whether it is held out. Siblings of one prompt may share a
                number, so that the gate never judges on a prompt whose other answers were trained on.
            prompt_len: prompt tokens of the whole sequence.
            length: tokens in the payload.
            nbytes: memory the payload holds.
            payload: handed back as it is.
            start: true position of the payload's first token, where a window was captured.

        Returns:
            False where the sequence alone exceeds the cap, or is older than what the buffer keeps: it is not taken.
        """
        if nbytes > self._max_bytes or (self._items and step <= self._items[-1].step - self._keep_steps):
            self._refused += 1
            return False
        whole = Window(payload, 0, length, start, prompt_len)
        item = _Item(step, nbytes, self.is_held_out(step, index), whole)
        bisect.insort_right(self._items, item, key=lambda i: i.step)  # arrival order within a step
        self._count(item, 1)
        while self._nbytes > self._max_bytes or self._items[0].step <= self._items[-1].step - self._keep_steps:
            self._count(self._items.pop(0), -1)
            self._evicted += 1
        self._queue = []  # a new pass begins
        return True

    def is_held_out(self, step: int, index: int) -> bool:
        """Whether only the publish gate may see a sequence that arrives now."""
        few = self._held_out > 0.0 and sum(i.held_out for i in self._items) < FEW_HELD_OUT
        share = max(self._held_out, MOST_HELD_OUT) if few else self._held_out
        digest = hashlib.blake2b(f"{step}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < share * 2.0**64

    def held_out(self, max_tokens: int | None = None) -> list[Window[P]]:
        """The gate's sequences, newest first (closest to the policy that is served), up to `max_tokens`."""
        chosen, total = [], 0
        for item in reversed(self._items):
            if item.held_out and (max_tokens is None or total + item.whole.tokens <= max_tokens):
                chosen.append(item.whole)
                total += item.whole.tokens
        return chosen

    def ready(self, min_tokens: int) -> bool:
        """Whether there is enough to train on."""
        return self._train_tokens >= max(1, min_tokens)

    def begin_session(self, max_epochs: float) -> None:
        """Begin a new pass; `exhausted` after `max_epochs` of them (a small buffer is learnt by heart otherwise)."""
        self._epochs, self._max_epochs, self._queue = 0.0, max_epochs, []

    def session_epochs(self) -> float:
        """Passes over the training tokens made in this session."""
        return self._epochs

    def exhausted(self) -> bool:
        """Whether the session's passes are used up, or there is nothing to train on."""
        return self._train_tokens == 0 or self._epochs >= self._max_epochs - 1e-9  # a sum of shares

    def sample_batch(self, rng: random.Random, budget_tokens: int) -> list[Window[P]]:
        """The next micro-batch: windows of training sequences, together at most `budget_tokens`; empty without any.

        A pass visits every token once. It is packed as a whole and its micro-batches come in random order: however
        early a session stops, what it drew holds each sequence in proportion to its tokens. (Filling micro-batches
        while drawing would favour short sequences, which fit everywhere.) A sequence longer than the budget is cut
        into pieces of about equal length; pieces with nothing but prompt teach nothing and are left out.
        """
        if not self._queue or self._queued_for != budget_tokens:
            pieces = [w for i in self._items if not i.held_out for w in _pieces(i.whole, budget_tokens)]
            rng.shuffle(pieces)
            self._queue = _pack(pieces, budget_tokens)
            rng.shuffle(self._queue)
            self._queued_for, self._pass_tokens = budget_tokens, sum(w.tokens for w in pieces)
        if not self._queue:
            return []
        batch = self._queue.pop()
        self._epochs += sum(w.tokens for w in batch) / self._pass_tokens
        return batch

    def stats(self) -> dict[str, float]:
        """What it holds: sequences, tokens, train_tokens, held_out_tokens, bytes, steps, sequences_per_gb (of the
        present mix in 10^9 bytes; 0 when empty), evicted and refused (sequences since the start).
        """
        tokens = sum(i.whole.tokens for i in self._items)
        return {
            "sequences": len(self._items),
            "tokens": tokens,
            "train_tokens": self._train_tokens,
            "held_out_tokens": tokens - self._train_tokens,
            "bytes": self._nbytes,
            "steps": len({i.step for i in self._items}),
            "sequences_per_gb": len(self._items) * 1e9 / self._nbytes if self._nbytes else 0.0,
            "evicted": self._evicted,
            "refused": self._refused,
        }

    def _count(self, item: _Item[P], sign: int) -> None:
        self._nbytes += sign * item.nbytes
        self._train_tokens += sign * item.whole.tokens * (not item.held_out)


def _pieces(whole: Window[P], longest: int) -> list[Window[P]]:
    """Cut a window into the fewest pieces of at most `longest` tokens, of about equal length; skip pure prompt."""
    count = math.ceil(whole.tokens / longest)
    cuts = [whole.tokens * k // count for k in range(count + 1)]
    return [
        Window(whole.payload, a, b, whole.start + a, whole.prompt_len)
        for a, b in itertools.pairwise(cuts)
        if whole.start + b > whole.prompt_len
    ]


def _pack(pieces: list[Window[P]], budget: int) -> list[list[Window[P]]]:
    """First fit, in the order given, into the last few micro-batches begun."""
    batches: list[list[Window[P]]] = []
    room: list[int] = []
    for piece in pieces:
        for k in range(max(0, len(batches) - OPEN_BATCHES), len(batches)):
            if piece.tokens <= room[k]:
                break
        else:
            k = len(batches)
            batches.append([])
            room.append(budget)
        batches[k].append(piece)
        room[k] -= piece.tokens
    return batches
