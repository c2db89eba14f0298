"""How well a drafter would draft for recorded rollouts: the acceptance vLLM would report, without an engine.

Speculative sampling accepts a drafted token with probability min(1, p(x)/q(x)), p the policy's and q the drafter's, and
overall with sum_v min(p_v, q_v) (Leviathan et al. 2023). Its output is distributed as the policy's own, so recorded
rollouts are fair samples of it. Given the recorded token, the chance that it was an accepted draft is min(1, q/p), at
each position independently. So one teacher-forced pass over the recurrence that training runs gives, exactly:

1. overlap[k, j] = sum_v min(p, q) at draft position k of a draft that starts at row j, q fed with the recorded tokens;
2. survival of position k = overlap there times min(1, q/p) of the recorded tokens before it in the same draft;
3. how often a draft starts at row j at all: after m accepted tokens the next one starts at j + m + 1, so fewer drafts
   start where text is easy to draft. A plain mean over j would flatter the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_tlt.drafter.data import ROW_BLOCK, Batch, TrainingSequence, check_tokens, grouped, pack
from verl_tlt.drafter.train import run_passes
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

PROBABILITY_ROWS = 256
"""Most rows whose probabilities are computed at once: those over the policy's vocabulary take 20 bytes a token."""


@dataclass(frozen=True)
class DraftCounts:
    """How many drafts there were and how much of them was accepted: counted by vLLM, or expected by `acceptance`."""

    drafts: float
    accepted: np.ndarray  # [K]: drafts whose first k+1 tokens were accepted, as vLLM counts per position

    @property
    def accept(self) -> np.ndarray:
        """float64 [K]: acceptance rate at position k given that the positions before were accepted."""
        before = np.concatenate([[self.drafts], self.accepted[:-1]])
        return np.divide(self.accepted, before, out=np.zeros(len(before)), where=before > 0)

    @property
    def accept_length(self) -> float:
        """Tokens per draft: 1 + sum of survivals, between 1 and K + 1; 1 without a draft."""
        return 1.0 + (float(self.accepted.sum()) / self.drafts if self.drafts else 0.0)


@dataclass(frozen=True)
class SequenceScore(DraftCounts):
    """What drafting K tokens at a time over one sequence would have given, expected over the drafts' sampling."""

    positions: int  # places a draft could start whose whole draft is recorded; 0: too short, nothing is known


def combined_score(scores: Iterable[SequenceScore], max_draft: int = 1) -> SequenceScore:
    """The sum of all these scores; `max_draft` is K where there are none."""
    scores = list(scores)
    return SequenceScore(
        positions=sum(s.positions for s in scores),
        drafts=sum(s.drafts for s in scores),
        accepted=sum((s.accepted for s in scores), np.zeros(max_draft)),
    )


def accept_length(scores: Iterable[SequenceScore]) -> float:
    """Simulated accept length (tau_sim) over all sequences: tokens per draft; 1 where nothing is known."""
    return combined_score(scores).accept_length


def acceptance(
    model: Eagle3DraftModel,
    sequences: list[TrainingSequence],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_draft: int = 3,
    budget: int = 1024,
    lm_head: torch.Tensor | None = None,
) -> list[SequenceScore]:
    """Score `model` on recorded rollouts; one score per sequence, in order, deterministic.

    The policy samples with temperature, top-k and top-p. The drafter samples with the temperature alone, as vLLM's does
    (`compute_probs_and_sample_next_token`). Temperature 0 is greedy on both sides; `top_p` 1 and `top_k` 0 are off. No
    sequence is cut, since a drafter drafts worse without the context before a cut. `max_draft` is K; `budget`: rows
    scored at once, each of which takes 8 bytes a token of the draft vocabulary. `lm_head`, [V, H], is the policy's
    whole head: needed where the draft vocabulary is pruned, as the policy's mass outside it can never be accepted.
    """
    if model.use_draft_vocab and lm_head is None:
        raise DrafterError("acceptance(): a drafter with a pruned vocabulary needs the policy's whole head, lm_head.")
    for sequence in sequences:
        check_tokens(sequence.tokens, model.verifier_vocab_size)
    device = model.verifier_norm.weight.device
    scores = [combined_score((), max_draft) for _ in sequences]
    if lm_head is not None:  # with CUDA the product is made in 16 bits anyway (`run_passes`)
        lm_head = lm_head.to(device, None if device.type == "cuda" else torch.float32)
    was_training = model.training
    model.eval()
    try:
        numbered = ((number, sequence) for number, sequence in enumerate(sequences) if sequence.rows > 0)
        for group in grouped(numbered, lambda item: item[1].rows, budget):
            batch = pack(sequence for _, sequence in group).to(device, torch.float32)
            if batch.input_ids.is_cuda:
                batch = batch.padded(ROW_BLOCK)
            rates = _Rates(model, batch, temperature, top_p, top_k, lm_head, max_draft)
            everywhere = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
            with torch.no_grad():
                run_passes(model, everywhere, max_draft, {"acceptance": (rates, 1.0)})
            overlap, recorded = rates.overlap_and_recorded.cpu().numpy()  # [K, S] each; the one wait for the device
            begin = 0
            for number, sequence in group:
                rows = slice(begin, begin + sequence.rows)
                scores[number] = _expected(sequence, overlap[:, rows], recorded[:, rows])
                begin = rows.stop
    finally:
        model.train(was_training)
    return scores


@dataclass(eq=False)
class _Rates:
    """Takes the place of the training loss and records acceptance, so that scoring runs the recurrence of training."""

    model: Eagle3DraftModel
    batch: Batch
    temperature: float
    top_p: float
    top_k: int
    lm_head: torch.Tensor | None
    max_draft: int

    def __post_init__(self) -> None:
        shape = (2, self.max_draft, self.batch.rows)
        self.overlap_and_recorded = torch.zeros(shape, dtype=torch.float64, device=self.batch.input_ids.device)
        """[2, K, S]: sum_v min(p, q), and min(1, q/p) of the recorded token; row k ends in k zeros. One tensor, so that
        the host waits once."""
        self.passes = 0
        self.policy = torch.empty(0)  # [S, DV] the policy's probabilities on the draft vocabulary
        self.chosen = torch.empty(0)  # [S] the policy's probability of the recorded token

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Called once for each pass k with the drafter's and the policy's logits [1, S - k, DV] for the same tokens."""
        k = self.passes
        self.passes += 1
        rows_left = logits.shape[1]
        overlap = self.overlap_and_recorded[0]
        recorded = self.overlap_and_recorded[1]
        if k == 0:
            self.policy = torch.empty_like(targets[0], dtype=torch.float32)
            self.chosen = self.policy.new_empty(rows_left)
            for rows in _blocks(rows_left):
                self.policy[rows], self.chosen[rows] = self._policy(targets[0, rows].float(), rows)
        policy = self.policy[k:]
        chosen = self.chosen[k:]
        tokens = self.batch.next_ids[0, k:]
        for rows in _blocks(rows_left):
            draft = _probabilities(logits[0, rows].float(), self.temperature)  # [B, DV]
            overlap[k, rows] = torch.minimum(draft, policy[rows]).sum(-1).double()
            ratio = self._at(draft, tokens[rows]) / chosen[rows].clamp_min(torch.finfo(torch.float32).tiny)
            recorded[k, rows] = ratio.clamp_max(1.0).double()
        return logits.new_zeros(logits.shape[:2])

    def _policy(self, targets: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's probabilities in B rows: on the draft vocabulary [B, DV] and of the recorded tokens [B]."""
        tokens = self.batch.next_ids[0, rows]
        if self.model.use_draft_vocab:
            assert self.lm_head is not None
            hidden = self.model.verifier_norm(self.batch.last_hidden[0, rows])  # [B, H]
            targets = (hidden @ self.lm_head.T).float()  # [B, V]
        policy = _probabilities(targets, self.temperature, self.top_p, self.top_k)
        chosen = policy.gather(1, tokens[:, None])[:, 0]
        if self.model.use_draft_vocab:
            offsets = self.model.d2t
            ids = offsets + torch.arange(len(offsets), device=offsets.device)  # [DV]; a mask would have the host wait
            policy = policy[:, ids]
        return policy, chosen

    def _at(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entries [S] of `probabilities` [S, DV] at target ids [S]; 0 for tokens outside the draft vocabulary."""
        if not self.model.use_draft_vocab:
            return probabilities.gather(1, tokens[:, None])[:, 0]
        t2d = self.model.t2d
        draft_id = (t2d.long().cumsum(0) - 1).clamp_min(0)[tokens]  # [S]
        return probabilities.gather(1, draft_id[:, None])[:, 0] * t2d[tokens]


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(begin, min(rows, begin + PROBABILITY_ROWS)) for begin in range(0, rows, PROBABILITY_ROWS))


def _probabilities(logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """Sampling probabilities [S, V] in vLLM's order: temperature, top-k, then top-p over what is left."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = logits / temperature
    if top_k > 0:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1.0:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.softmax(-1)


def _expected(window: TrainingSequence, overlap: np.ndarray, recorded: np.ndarray) -> SequenceScore:
    """Expected drafts and acceptances along one sequence, from its columns of `_Rates.overlap_and_recorded`."""
    max_draft = len(overlap)
    return combined_score((_of_turn(rows, overlap, recorded) for rows in window.loss_rows(max_draft)), max_draft)


def _of_turn(starts: range, overlap: np.ndarray, recorded: np.ndarray) -> SequenceScore:
    """The same for one turn: drafts may start at the rows `starts`, and one does start at the first of them."""
    max_draft = len(overlap)
    first = starts.start
    stop = starts.stop
    # [K+1, rows]: chance that the first k recorded tokens were accepted from a draft that starts there.
    reached = np.cumprod(np.vstack([np.ones(overlap.shape[1]), recorded]), axis=0)
    survival = reached[:-1] * overlap  # [K, rows]
    drafts = np.zeros(stop + max_draft + 1)  # expected drafts that start at each row
    drafts[first] = 1.0
    for row in starts:
        ends = -np.diff(reached[:, row], append=0.0)  # [K+1] chance that m tokens are accepted
        drafts[row + 1 : row + max_draft + 2] += drafts[row] * ends
    started = drafts[first:stop]
    return SequenceScore(positions=len(starts), drafts=float(started.sum()), accepted=survival[:, first:stop] @ started)
