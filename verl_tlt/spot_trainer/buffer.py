"""The captured sequences of recent RL steps: which are kept, which are trained on next, which are held out.

Hidden states take 28 to 64 KB a token for 7B to 70B policies, so bytes are capped and the oldest sequence goes first.
"""

import math
import random
from dataclasses import dataclass

from verl_tlt.drafter import TrainingSequence
from verl_tlt.drafter.data import grouped, windows
from verl_tlt.drafter.held_out import digest_of, mark_of

KEPT_STEPS = 8
"""RL steps a sequence stays: older ones are of another policy."""
OPEN_BATCHES = 32
"""Micro-batches kept open while packing (`drafter.data.grouped`)."""


@dataclass(frozen=True, eq=False)
class _Item:
    step: int
    prompt: int  # a digest
    held_out: bool
    sequence: TrainingSequence


class Buffer:
    """The sequences of the last RL steps, of at most `max_bytes`. Each is trained on or held out for the publish gate.

    `held_out` is a share of prompts that a hash chooses: all responses to a prompt are held out together, for they
    resemble each other.
    """

    def __init__(self, *, max_bytes: int, held_out: float) -> None:
        self._max_bytes = max_bytes
        self._held_out = held_out
        self._items: list[_Item] = []  # oldest first
        self._first_prompt: int | None = None  # it is always trained on: there may be no other
        self._nbytes = 0
        self.train_tokens = 0
        """Tokens that are trained on; others are held out."""
        self._queue: list[list[TrainingSequence]] = []  # micro-batches left of the present pass
        self._pass_rows = 0  # of the present pass
        self.epochs = 0.0
        """Passes over what is trained on in this session."""
        self._max_epochs = math.inf

    def add(self, step: int, sequence: TrainingSequence) -> None:
        """Add a sequence of the newest RL step, or a window of it; then drop the oldest until the caps hold.

        One that alone exceeds the cap is left out.
        """
        if sequence.nbytes > self._max_bytes:
            return
        prompt = digest_of(sequence.tokens.tolist()) if sequence.prompt is None else sequence.prompt
        if self._first_prompt is None:
            self._first_prompt = prompt
        held_out = prompt != self._first_prompt and mark_of(prompt) < self._held_out
        self._items.append(_Item(step, prompt, held_out, sequence))
        self._nbytes += sequence.nbytes
        if not held_out:
            self.train_tokens += len(sequence)
        while self._nbytes > self._max_bytes or self._items[0].step <= step - KEPT_STEPS:
            self._drop_oldest()
        self._queue = []  # a new pass begins

    def _drop_oldest(self) -> None:
        item = self._items.pop(0)
        self._nbytes -= item.sequence.nbytes
        if not item.held_out:
            self.train_tokens -= len(item.sequence)

    def held_out(self, most: int, fewest: int, draft: int) -> list[TrainingSequence]:
        """The gate's sequences, newest first: up to `most` positions, then one of each other prompt up to `fewest`.

        A position is a place where a draft of `draft` tokens can start.
        """
        chosen: list[TrainingSequence] = []
        prompts: set[int] = set()
        total = 0
        for item in reversed(self._items):
            positions = item.sequence.positions(draft) if item.held_out else 0
            if not positions:
                continue
            total += positions
            if total <= most or (len(prompts) < fewest and item.prompt not in prompts):
                chosen.append(item.sequence)
                prompts.add(item.prompt)
        return chosen

    def begin_session(self, max_epochs: float) -> None:
        """Begin a new pass, of `max_epochs` at most, so that the drafter does not overfit a small buffer."""
        self.epochs = 0.0
        self._max_epochs = max_epochs
        self._queue = []

    def exhausted(self) -> bool:
        """Whether the session's passes are used up, or there is nothing to train on."""
        return self.train_tokens == 0 or self.epochs >= self._max_epochs - 1e-9  # a sum of shares

    def sample_batch(self, rng: random.Random, budget: int) -> list[TrainingSequence]:
        """The next micro-batch: windows of training sequences, of at most `budget` rows together; empty without any.

        A pass has every row once, but for windows of prompt alone. It is packed as a whole and its micro-batches come
        in random order, so that a session that stops early has drawn each sequence in proportion to its length.
        """
        if not self._queue:
            self._begin_pass(rng, budget)
        if not self._queue:
            return []
        batch = self._queue.pop()
        self.epochs += sum(piece.rows for piece in batch) / self._pass_rows
        return batch

    def _begin_pass(self, rng: random.Random, budget: int) -> None:
        pieces: list[TrainingSequence] = []
        for item in self._items:
            if not item.held_out:
                pieces += [piece for piece in windows(item.sequence, budget) if piece.loss_rows()]
        rng.shuffle(pieces)
        self._queue = list(grouped(pieces, lambda piece: piece.rows, budget, open_groups=OPEN_BATCHES))
        rng.shuffle(self._queue)
        self._pass_rows = sum(piece.rows for piece in pieces)
