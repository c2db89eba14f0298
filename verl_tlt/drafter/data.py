"""From rollouts to training batches: one rollout as the drafter's teacher, aligned, and packed with others in one row.

At step t vLLM feeds the drafter token x_{t+1} with the policy's hidden state g_t at position t, and asks for the
distribution of x_{t+2}, which the policy answers from y_{t+1} (`SpecDecodeBaseProposer.set_inputs_first_pass`). A row
of a batch is exactly that triple. A sequence of L tokens makes L - 1 rows.

Between processes hidden states travel as numpy, because Ray's object store hands numpy arrays to every process of a
node without a copy, which it does not do for torch tensors. numpy has no bfloat16, so those arrays hold its bits as
uint16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch


def to_numpy16(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` on the host in 16 bits: float16 as it is, anything else as bfloat16 bits in uint16; same shape."""
    if tensor.dtype == torch.float16:
        return tensor.detach().cpu().contiguous().numpy()
    return tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()


def from_numpy16(array: np.ndarray) -> torch.Tensor:
    """The tensor behind `to_numpy16`: uint16 as bfloat16 bits, floats as they are. A read-only array is copied."""
    if not array.flags.writeable:  # arrays out of Ray's store are; torch has no read-only tensors
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt with its response, or a window of one, as the policy saw it in one forward pass.

    Index t is local to the window; its position in the whole sequence is `start + t`.
    """

    tokens: torch.Tensor
    """int64 [L]."""
    prompt_len: int
    """Tokens of the window that belong to the prompt: `tokens[prompt_len:]` is response; 0 when none does."""
    aux: torch.Tensor
    """[L, 3H], any float (16 bits in buffers): the aux layers' inputs at t, side by side, in ascending layer order."""
    last: torch.Tensor
    """[L, H], any float: the last layer's output at t *before* the final norm; it predicts token t+1."""
    start: int = 0
    """Position of `tokens[0]` in the whole sequence."""

    def __post_init__(self) -> None:
        """Refuse tensors that do not belong together."""
        length = len(self.tokens)
        if self.aux.shape[0] != length or self.last.shape[0] != length:
            raise ValueError(
                f"A sequence of {length} tokens came with {self.aux.shape[0]} aux and {self.last.shape[0]} last states."
            )

    def __len__(self) -> int:
        """Tokens in the window."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Memory its tensors hold."""
        return self.tokens.nbytes + self.aux.nbytes + self.last.nbytes

    def window(self, begin: int, end: int) -> TrainingSequence:
        """Tokens `begin:end` at their true positions; views, no copies."""
        return replace(
            self,
            tokens=self.tokens[begin:end],
            aux=self.aux[begin:end],
            last=self.last[begin:end],
            prompt_len=max(self.prompt_len - begin, 0),
            start=self.start + begin,
        )


PADDING = -1
"""Document id of rows that hold nothing: they are seen by no other row and carry no loss."""


@dataclass(frozen=True)
class Batch:
    """Sequences side by side in one row of S positions; attention never crosses a document's border."""

    input_ids: torch.Tensor
    """int64 [1, S]: x_{t+1}."""
    hidden_states: torch.Tensor
    """float [1, S, 3H]: g_t, the aux layers' inputs."""
    last_hidden: torch.Tensor
    """float [1, S, H]: y_{t+1} before the final norm; through norm and head it is the teacher of this row."""
    next_ids: torch.Tensor
    """int64 [1, S]: x_{t+2}, the token the rollout sampled where this row drafts; 0 past the end."""
    loss_mask: torch.Tensor
    """bool [1, S]: the policy's next token is a response token that is known."""
    position_ids: torch.Tensor
    """int64 [1, S]: t, as vLLM counts (RoPE is relative, so only differences matter)."""
    document_ids: torch.Tensor
    """int64 [1, S]: which sequence, from 0; -1 is padding."""

    @property
    def rows(self) -> int:
        """Positions S, padding included: what a step costs."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Rows with a loss: what a step learns from."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """On `device`, hidden states cast to `dtype`."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        for name in ("hidden_states", "last_hidden"):
            moved[name] = moved[name].to(dtype)
        return Batch(**moved)

    def padded(self, multiple: int) -> Batch:
        """Filled up with padding rows to a multiple of `multiple`."""
        missing = -self.rows % multiple
        if not missing:
            return self
        grown = {}
        for f in fields(self):
            tensor = getattr(self, f.name)
            shape = (1, missing, *tensor.shape[2:])
            fill = tensor.new_full(shape, PADDING) if f.name == "document_ids" else tensor.new_zeros(shape)
            grown[f.name] = torch.cat([tensor, fill], dim=1)
        return Batch(**grown)

    def rows_within(self) -> torch.Tensor:
        """int64 [1, S]: each row's index within its own document."""
        ids = self.document_ids[0]
        index = torch.arange(self.rows, device=ids.device)
        new = torch.ones_like(ids, dtype=torch.bool)
        new[1:] = ids[1:] != ids[:-1]
        first = torch.where(new, index, torch.zeros_like(index)).cummax(0).values  # [S] first row of the document
        return (index - first)[None]

    def for_passes(self, ttt_steps: int) -> Batch:
        """Without loss on the first `ttt_steps - 1` rows of each document.

        Pass k is scored against the row k places on. A document's first k rows would be scored against passes that
        started in the document before; masking them makes packing exact and gives every pass the same rows.
        """
        return replace(self, loss_mask=self.loss_mask & (self.rows_within() >= ttt_steps - 1))


def align(sequence: TrainingSequence) -> Batch:
    """The rows of one sequence, as a batch of its own (S = L - 1).

    The loss falls on rows whose input is a response token and whose next token is known: vLLM drafts from nowhere else.

    Raises:
        ValueError: fewer than two tokens.
    """
    length = len(sequence)
    if length < 2:
        raise ValueError(f"A sequence of {length} tokens has nothing to draft; at least 2 are needed.")
    tokens = sequence.tokens  # [L]
    target = torch.arange(1, length)  # [L-1] local index t+1 of each row's input and teacher
    return Batch(
        input_ids=tokens[1:][None],
        hidden_states=sequence.aux[:-1][None],
        last_hidden=sequence.last[1:][None],
        next_ids=torch.cat([tokens[2:], tokens.new_zeros(1)])[None],
        loss_mask=((target >= sequence.prompt_len) & (target <= length - 2))[None],
        position_ids=(sequence.start + target - 1)[None],
        document_ids=torch.zeros(1, length - 1, dtype=torch.int64),
    )


def pack(sequences: Iterable[TrainingSequence], budget: int | None = None) -> Batch:
    """One batch of whole sequences: document ids count up, positions restart with each.

    Raises:
        ValueError: no sequence, or more rows than `budget`.
    """
    parts = [align(sequence) for sequence in sequences]
    if not parts:
        raise ValueError("There is no sequence to pack.")
    rows = sum(part.rows for part in parts)
    if budget is not None and rows > budget:
        raise ValueError(f"{len(parts)} sequences make {rows} rows, above the budget of {budget}.")
    columns = {f.name: torch.cat([getattr(part, f.name) for part in parts], dim=1) for f in fields(Batch)}
    owner = [torch.full((1, part.rows), i, dtype=torch.int64) for i, part in enumerate(parts)]
    columns["document_ids"] = torch.cat(owner, dim=1)
    return Batch(**columns)


def split(sequence: TrainingSequence, budget: int) -> list[TrainingSequence]:
    """Windows of at most `budget` rows that share one token at each border, so that every row appears once."""
    last = len(sequence) - 1  # rows
    return [sequence.window(begin, min(begin + budget, last) + 1) for begin in range(0, last, budget)]


def groups(sequences: Iterable[TrainingSequence], budget: int) -> Iterator[list[TrainingSequence]]:
    """Sequences in the given order, cut where longer than `budget`, grouped so that each group fits it."""
    held: list[TrainingSequence] = []
    rows = 0
    for sequence in sequences:
        for window in split(sequence, budget):
            size = len(window) - 1
            if held and rows + size > budget:
                yield held
                held, rows = [], 0
            held.append(window)
            rows += size
    if held:
        yield held


def batches(sequences: Iterable[TrainingSequence], budget: int) -> Iterator[Batch]:
    """Packed batches of at most `budget` rows, in the given order; a shuffled endless stream works as well."""
    for group in groups(sequences, budget):
        yield pack(group, budget)


def shuffled(sequences: list[TrainingSequence], rng: np.random.Generator) -> Iterator[TrainingSequence]:
    """All sequences in random order, again and again; the order follows `rng` alone."""
    while sequences:
        for i in rng.permutation(len(sequences)):
            yield sequences[i]
