"""How well a drafter would draft for recorded rollouts: the acceptance vLLM would report, without an engine.

Speculative sampling accepts a drafted token with probability min(1, q(x)/p(x)), and overall with sum_v min(p_v, q_v)
(Leviathan et al. 2023). Its output is distributed as the policy's own, so recorded rollouts are fair samples of it, and
given the text, accepting at each place is an independent coin of min(1, q/p) at the token that came. That makes three
exact steps out of one teacher-forced pass over the recurrence that training runs:

1. a[j, k] = sum_v min(p, q) at draft position k of a draft that starts at token j, q fed with the recorded tokens;
2. survival S[j, k] = a[j, k] times the coins before it in the same draft;
3. how often a draft starts at j at all: after m accepted tokens the next one starts at j + m + 1, so stretches that
   are easy to draft are visited less. A plain mean over j would flatter the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_tlt.drafter.data import Batch, TrainingSequence, grouped, pack, windows
from verl_tlt.drafter.policy import DrafterError
from verl_tlt.drafter.train import ROW_BLOCK, mixed_precision

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass(frozen=True)
class SequenceScore:
    """What drafting over one sequence would have given, always drafting `max_draft` tokens."""

    positions: int
    """Places a draft could start whose whole draft is recorded; 0: too short, nothing is known."""
    drafts: float
    """Drafts expected over those places."""
    accepted: np.ndarray
    """float64 [max_draft]: drafts expected to have their first k+1 tokens accepted, as vLLM counts per position."""

    @property
    def accept(self) -> np.ndarray:
        """float64 [max_draft]: acceptance at position k given that the positions before were accepted."""
        before = np.concatenate([[self.drafts], self.accepted[:-1]])
        return np.divide(self.accepted, before, out=np.zeros_like(self.accepted), where=before > 0)

    @property
    def accept_length(self) -> float:
        """Tokens per draft: 1 + sum of survivals, between 1 and max_draft + 1; 1 where nothing is known."""
        return 1.0 + (float(self.accepted.sum()) / self.drafts if self.drafts else 0.0)


def accept_length(scores: Iterable[SequenceScore]) -> float:
    """tau_sim over all sequences: tokens per draft; 1 where nothing is known."""
    drafts = accepted = 0.0
    for score in scores:
        drafts += score.drafts
        accepted += float(score.accepted.sum())
    return 1.0 + (accepted / drafts if drafts else 0.0)


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
    (`compute_probs_and_sample_next_token`). Temperature 0 is greedy on both sides.

    Args:
        model: its verifier weights are those of the policy that made the rollouts.
        sequences: whole ones or windows; those longer than `budget` are scored piece by piece.
        temperature: of the rollout.
        top_p: of the rollout; 1 is off.
        top_k: of the rollout; 0 or less is off.
        max_draft: K, tokens in each draft.
        budget: rows scored at once. Memory is about `20 * budget * vocabulary` bytes.
        lm_head: [V, H], the policy's whole head; needed where the draft vocabulary is pruned, since the policy's mass
            outside it can never be accepted.

    Raises:
        DrafterError: a pruned draft vocabulary without `lm_head`.
    """
    if model.use_draft_vocab and lm_head is None:
        raise DrafterError("acceptance(): a drafter with a pruned vocabulary needs the policy's whole head, lm_head.")
    pieces = [(i, window) for i, sequence in enumerate(sequences) for window in windows(sequence, budget)]
    scores: list[list[SequenceScore]] = [[] for _ in sequences]
    was_training = model.training
    model.eval()
    try:
        for group in grouped(pieces, lambda piece: piece[1].rows, budget):
            batch = pack(window for _, window in group)
            probe = _Probe(model, batch.to(model.fc.weight.device), temperature, top_p, top_k, lm_head)
            overlap, coin = probe.run(max_draft)  # [K, S] each
            begin = 0
            for owner, window in group:
                rows = slice(begin, begin + window.rows)
                scores[owner].append(_walk(window, overlap[:, rows], coin[:, rows]))
                begin = rows.stop
    finally:
        model.train(was_training)
    return [_total(found, max_draft) for found in scores]


class _Probe:
    """Stands in for the training loss, which sees every pass's logits next to the policy's, and notes acceptances.

    Riding the loss keeps one recurrence for training and scoring, the one of `speculators`.
    """

    def __init__(
        self,
        model: Eagle3DraftModel,
        batch: Batch,
        temperature: float,
        top_p: float,
        top_k: int,
        lm_head: torch.Tensor | None,
    ) -> None:
        self.model, self.rows = model, batch.rows
        self.batch = batch.padded(ROW_BLOCK) if batch.input_ids.is_cuda else batch
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.lm_head = lm_head
        self.policy: torch.Tensor | None = None  # [S, DV] the policy's probabilities on the draft vocabulary
        self.chosen: torch.Tensor | None = None  # [S] the policy's probability of the token that came
        self.overlap: list[torch.Tensor] = []
        self.coin: list[torch.Tensor] = []

    def run(self, max_draft: int) -> tuple[np.ndarray, np.ndarray]:
        """`(overlap, coin)`, float64 [K, S]: at [k, r] of position k in the draft that row r starts; 0 past the end."""
        batch = self.batch
        with torch.no_grad(), mixed_precision(batch.input_ids.device):
            self.model(
                hidden_states=batch.hidden_states.float(),
                input_ids=batch.input_ids,
                document_ids=batch.document_ids,
                loss_mask=torch.ones_like(batch.loss_mask),
                position_ids=batch.position_ids,
                verifier_last_hidden_states=batch.last_hidden.float(),
                ttt_steps=max_draft,
                loss_config={"acceptance": (self, 1.0)},
            )
        return self._stack(self.overlap), self._stack(self.coin)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Called once per pass k with drafter and policy logits [1, S - k, DV], row i of both about the same token."""
        if self.policy is None:
            self.policy, self.chosen = self._policy(targets[0].float())
        assert self.chosen is not None
        k = len(self.overlap)
        draft = _probabilities(logits[0].float(), self.temperature)  # [S - k, DV]
        tokens = self.batch.next_ids[0, k:]
        self.overlap.append(torch.minimum(draft, self.policy[k:]).sum(-1))
        drawn = self._at(draft, tokens)
        self.coin.append((drawn / self.chosen[k:].clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0))
        return logits.new_zeros(logits.shape[:2])

    def _policy(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's probabilities on the draft vocabulary [S, DV] and at the tokens that came [S]."""
        tokens = self.batch.next_ids[0]
        if self.lm_head is None:
            policy = _probabilities(targets, self.temperature, self.top_p, self.top_k)
            return policy, self._at(policy, tokens)
        hidden = self.model.verifier_norm(self.batch.last_hidden[0].float())  # [S, H]
        whole = hidden @ self.lm_head.to(hidden.device, hidden.dtype).T  # [S, V]
        policy = _probabilities(whole, self.temperature, self.top_p, self.top_k)
        chosen = policy.gather(1, tokens[:, None])[:, 0]
        return (policy[:, self.model.t2d] if self.model.use_draft_vocab else policy), chosen

    def _at(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entries [S] of `probabilities` [S, DV] at target ids [S]; 0 for tokens outside the draft vocabulary."""
        if not self.model.use_draft_vocab:
            return probabilities.gather(1, tokens[:, None])[:, 0]
        kept = self.model.t2d
        draft_id = (kept.long().cumsum(0) - 1).clamp_min(0)[tokens]  # [S]
        return probabilities.gather(1, draft_id[:, None])[:, 0] * kept[tokens]

    def _stack(self, columns: list[torch.Tensor]) -> np.ndarray:
        out = np.zeros((len(columns), self.rows))
        for k, column in enumerate(columns):
            size = max(self.rows - k, 0)
            out[k, :size] = column[:size].double().cpu().numpy()
        return out


def _probabilities(logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """Sampling probabilities [S, V] in vLLM's order: temperature, top-k, then top-p over what is left."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
    return logits.softmax(-1)


def _walk(piece: TrainingSequence, overlap: np.ndarray, coin: np.ndarray) -> SequenceScore:
    """Expected drafts and acceptances along one sequence; overlap and coin are [K, rows]."""
    max_draft = len(overlap)
    starts = piece.loss_rows(max_draft)
    first, stop = starts.start, starts.stop
    if not starts:
        return SequenceScore(0, 0.0, np.zeros(max_draft))
    ahead = np.cumprod(np.vstack([np.ones(overlap.shape[1]), coin]), axis=0)  # [K+1, rows]: first k coins all fell well
    survival = ahead[:-1] * overlap  # [K, rows]
    visits = np.zeros(stop + max_draft + 1)  # expected drafts that start at each row
    visits[first] = 1.0
    for row in range(first, stop):
        for m in range(max_draft):
            visits[row + m + 1] += visits[row] * (ahead[m, row] - ahead[m + 1, row])
        visits[row + max_draft + 1] += visits[row] * ahead[max_draft, row]
    started = visits[first:stop]
    return SequenceScore(len(starts), float(started.sum()), survival[:, first:stop] @ started)


def _total(pieces: list[SequenceScore], max_draft: int) -> SequenceScore:
    return SequenceScore(
        positions=sum(p.positions for p in pieces),
        drafts=sum(p.drafts for p in pieces),
        accepted=np.sum([p.accepted for p in pieces], axis=0) if pieces else np.zeros(max_draft),
    )
