"""The captured sequences of recent RL steps: which are kept, trained on next, or held out and scored for the gate.

Hidden states take 28-64 KB a token for 7B-70B policies, hence bytes are capped and the oldest sequence goes first.
"""

import bisect
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer, SequenceScore, TrainingSequence, acceptance
from verl_tlt.drafter.data import grouped, windows
from verl_tlt.messages.training import VERSIONS, BufferStats, HeldOutScores, Parameters, RolloutSampling

OPEN_BATCHES = 32
"""Micro-batches kept open while packing (`drafter.data.grouped`)."""
PORTION = 1024
"""Most tokens scored between two looks at the stop flag (but at least one sequence), and fewest worth scoring."""
KEPT_TOKENS = 8192
"""Tokens after which the scores of all versions are kept, on an accelerator: each time their weights are moved there,
a tenth of a second for a 7B policy's drafter."""
CPU_TOKENS = 256
"""`KEPT_TOKENS` and `PORTION` on a CPU, which takes seconds for so many tokens with a real vocabulary."""
HELD_OUT_TOKENS = 32_768
"""Most tokens a gate looks at: twice what a paired comparison needs, and still seconds of work."""
FEWEST_PROMPTS = 8
"""Fewest prompts to score, however long their sequences: the gate judges by no fewer than its `MIN_PROMPTS`."""
JUDGING_SHARE = 0.25
"""Largest share of a session that its scores may take: three quarters are for training."""


@dataclass(frozen=True, eq=False)
class _Item:
    step: int
    prompt: str
    held_out: bool
    sequence: TrainingSequence


class Buffer:
    """The sequences of recent RL steps. Each is either trained on or held out for the publish gate, for good.

    `max_bytes` caps them; with `keep_steps` of 1 only the newest RL step's stay. `held_out` is a share of prompts: a
    hash decides, the same in all buffers of a run, for from some of a prompt's responses a drafter learns what the
    others say.
    """

    def __init__(self, *, max_bytes: int, keep_steps: int, held_out: float) -> None:
        self._max_bytes, self._keep_steps, self._held_out = max_bytes, keep_steps, held_out
        self._items: list[_Item] = []  # oldest first
        self._nbytes = self._train_tokens = 0
        self._queue: list[list[TrainingSequence]] = []  # micro-batches left of the present pass
        self._queued_for = 0  # rows of a micro-batch in it
        self._pass_rows = 0  # of the present pass
        self.epochs = 0.0
        """Passes over what is trained on in this session."""
        self._max_epochs = math.inf

    def add(self, step: int, index: int, sequence: TrainingSequence) -> bool:
        """Add a sequence of an RL step, or a window of it; then drop the oldest until the caps hold.

        `index`, its number in that step, stands for its prompt where that is unknown. False: it is not added, because
        it alone exceeds the cap, or is older than what the buffer keeps.
        """
        if sequence.nbytes > self._max_bytes or (self._items and step <= self._items[-1].step - self._keep_steps):
            return False
        prompt = f"{step}:{index}" if sequence.prompt is None else f"{sequence.prompt}"
        digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") < self._held_out * 2.0**64
        item = _Item(step, prompt, held_out, sequence)
        bisect.insort_right(self._items, item, key=lambda i: i.step)  # arrival order within a step
        self._count(item, 1)
        while self._nbytes > self._max_bytes or self._items[0].step <= self._items[-1].step - self._keep_steps:
            self._count(self._items.pop(0), -1)
        self._queue = []  # a new pass begins
        return True

    def held_out(self, max_tokens: float = math.inf, fewest: int = 0) -> list[TrainingSequence]:
        """The gate's sequences, newest first, up to `max_tokens`, and older ones up to `fewest` prompts."""
        chosen: list[TrainingSequence] = []
        prompts: set[str] = set()
        total = 0
        for item in reversed(self._items):
            if not item.held_out or len(item.sequence) < 2:  # of one token nothing can be judged
                continue
            total += len(item.sequence)
            if total <= max_tokens or (len(prompts) < fewest and item.prompt not in prompts):
                chosen.append(item.sequence)
                prompts.add(item.prompt)
        return chosen

    def ready(self, min_tokens: int) -> bool:
        return self._train_tokens >= max(1, min_tokens)

    def begin_session(self, max_epochs: float) -> None:
        """Begin a new pass; `exhausted` after `max_epochs` of them, lest a small buffer is learned by heart."""
        self.epochs, self._max_epochs, self._queue = 0.0, max_epochs, []

    def exhausted(self) -> bool:
        """Whether the session's passes are used up, or there is nothing to train on."""
        return self._train_tokens == 0 or self.epochs >= self._max_epochs - 1e-9  # a sum of shares

    def sample_batch(self, rng: random.Random, budget: int) -> list[TrainingSequence]:
        """The next micro-batch: windows of training sequences, of at most `budget` rows together; empty without any.

        A pass has every row once, but for windows of prompt alone. It is packed as a whole and its micro-batches come
        in random order, so that a session that stops early has drawn each sequence in proportion to its length.
        """
        if not self._queue or self._queued_for != budget:
            trained = (i.sequence for i in self._items if not i.held_out)
            pieces = [piece for sequence in trained for piece in windows(sequence, budget) if piece.loss_rows()]
            rng.shuffle(pieces)
            self._queue = list(grouped(pieces, lambda piece: piece.rows, budget, open_groups=OPEN_BATCHES))
            rng.shuffle(self._queue)
            self._queued_for, self._pass_rows = budget, sum(piece.rows for piece in pieces)
        if not self._queue:
            return []
        batch = self._queue.pop()
        self.epochs += sum(piece.rows for piece in batch) / self._pass_rows
        return batch

    def stats(self) -> BufferStats:
        tokens = sum(len(i.sequence) for i in self._items)
        return BufferStats(len(self._items), tokens, self._train_tokens, self._nbytes)

    def _count(self, item: _Item, sign: int) -> None:
        self._nbytes += sign * item.sequence.nbytes
        self._train_tokens += sign * len(item.sequence) * (not item.held_out)


# ---------------------------------------------------------------------- scores of what is held out


@dataclass(eq=False)
class Judging:
    """The scores so far of one candidate, and of the served and the initial drafter on the same text.

    It outlives the session: one that is told to stop leaves to the next what all versions were scored on.
    """

    versions: Mapping[str, Parameters]
    scores: dict[str, list[SequenceScore]] = field(default_factory=lambda: {which: [] for which in VERSIONS})
    prompts: list[int] = field(default_factory=list)
    """The prompt of each scored sequence, by a number."""
    tokens: int = 0
    seconds: float = 0.0
    judged_s: float = 0.0
    """The part of the sessions' `seconds` that went into the scores."""
    _seen: WeakSet[TrainingSequence] = field(default_factory=WeakSet)

    def enough(self, sequences: Sequence[TrainingSequence]) -> bool:
        """Whether as many tokens and prompts were scored as these sequences have."""
        prompts = len({id(s) if s.prompt is None else s.prompt for s in sequences})
        return self.tokens >= sum(map(len, sequences)) and len({*self.prompts}) >= min(FEWEST_PROMPTS, prompts)

    def new(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        """Those that were not scored yet."""
        return [sequence for sequence in sequences if sequence not in self._seen]

    def add(self, sequences: Sequence[TrainingSequence], scores: Mapping[str, list[SequenceScore]]) -> None:
        for sequence in sequences:
            self.prompts.append(len(self.prompts) if sequence.prompt is None else sequence.prompt)
            self.tokens += len(sequence)
            self._seen.add(sequence)
        for version, new in scores.items():
            self.scores[version] += new

    def combined(self, max_draft: int) -> HeldOutScores:
        """The scores for the gate; a candidate whose numbers are not finite has scores that are not either."""
        acceptances = {
            version: np.array([[s.drafts, *s.accepted] for s in scores], dtype=np.float64).reshape(-1, 1 + max_draft)
            for version, scores in self.scores.items()
        }
        if not all(np.isfinite(value).all() for value in self.versions["candidate"].values()):
            acceptances["candidate"][:] = np.nan  # greedy acceptance is a number whatever the logits are
        positions = np.array([score.positions for score in self.scores["candidate"]], dtype=np.int64)
        return HeldOutScores(np.array(self.prompts, dtype=np.uint64), positions, **acceptances)


def tokens_to_judge(most: int, tokens: int, share: float | None, *, ran_out: bool) -> int:
    """How many held-out tokens the next session that scores looks at; `most` was the limit of the last one.

    That one had `tokens`, of which the sessions since the merge spent `share` of their time; None: it was told to stop
    before it had all scores. It `ran_out` of epochs, or was stopped.
    """
    if share is None:
        wanted = tokens // 2
    elif share > JUDGING_SHARE and not ran_out:
        wanted = int(tokens * max(JUDGING_SHARE / share, 0.5))
    else:
        wanted = max(most, int(tokens * min(JUDGING_SHARE / max(share, 1e-9), 2.0)))
    return min(max(wanted, PORTION), HELD_OUT_TOKENS)


def score_versions(
    trainer: DrafterTrainer,
    versions: Mapping[str, Parameters],
    sequences: list[TrainingSequence],
    sampling: RolloutSampling,
    max_draft: int,
    lm_head: torch.Tensor | None,
    should_stop: Callable[[], bool],
    rows: int = PORTION,
) -> dict[str, list[SequenceScore]] | None:
    """Scores of the sequences by version, the same parameters scored only once; None when told to stop.

    The trainer's own weights are restored. `lm_head` is the policy's whole head, for a pruned draft vocabulary.
    `should_stop` is asked before each portion: no more tokens than a micro-batch of `rows`, but a sequence at least.
    """
    budget = min(rows, PORTION)
    scored: dict[int, list[SequenceScore]] = {}
    for parameters in versions.values():
        if id(parameters) in scored:  # until something is published, the served drafter is the initial one
            continue
        found = scored[id(parameters)] = []
        with trainer.holding(parameters):
            for portion in grouped(sequences, len, budget):
                if should_stop():
                    return None
                found += acceptance(
                    trainer.model, portion, **vars(sampling), max_draft=max_draft, budget=budget, lm_head=lm_head
                )
    return {name: scored[id(parameters)] for name, parameters in versions.items()}
