"""Drafts without a model: what the siblings of a response said after the same few tokens.

RL samples several responses to each prompt, and the same prompt again an epoch later. They repeat each other, most of
all where a problem is easy (the TLT paper's model-free drafter, arXiv 2511.16665, has such a database per prompt). So
each prompt has a book of the responses to it: those of this visit, running siblings included, and those of the visit
before. A draft is what followed the longest match of the latest tokens. How far to trust such a match is counted.

Pure Python, free of vLLM; a wrong draft costs time, never a token. `engine_core/ngram_drafts.py` connects it with an
engine.

The store is that of LZ77 compressors: per sequence its tokens and, for each n-gram, a link to the n-gram's previous
place, with a dict from n-gram to its latest place. A token costs a few dozen bytes and about a microsecond.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

SHORTEST = 3
"""Tokens of an n-gram: a shorter match says next to nothing."""
LONGEST = 16
"""Tokens compared at most; a longer match is no better."""
CANDIDATES = 8
"""Earlier places of an n-gram looked at, latest first."""
TOKEN_BYTES, NGRAM_BYTES = 12, 150
"""Memory of a stored token, and of an n-gram not seen before in its visit (dict entry and two integers)."""
_SPAN = 1 << 24  # positions per sequence; a place is sequence * _SPAN + position
_FADE = 512.0  # drafts of a match length after which old evidence counts half
_TRY_FIRST = 4.0  # drafts of a match length believed to be accepted before there is evidence


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft and how it was found."""

    tokens: list[int]
    matched: int
    """Length of the match it follows, SHORTEST..LONGEST."""


class Trust:
    """How often the first token of a draft was accepted, by the length of the match behind it."""

    def __init__(self) -> None:
        self._offered = [_TRY_FIRST] * (LONGEST + 1)
        self._accepted = [_TRY_FIRST] * (LONGEST + 1)

    def of(self, matched: int) -> float:
        """Expected acceptance of a draft's first token, 0..1."""
        return self._accepted[matched] / self._offered[matched]

    def learn(self, matched: int, accepted: bool) -> None:
        """Count one verified draft."""
        self._offered[matched] += 1.0
        self._accepted[matched] += accepted
        if self._offered[matched] > _FADE:
            self._offered[matched] *= 0.5
            self._accepted[matched] *= 0.5


class _Visit:
    """The responses to one prompt in one rollout."""

    def __init__(self) -> None:
        self.tokens: list[array[int]] = []  # per sequence, [length]
        self.links: list[array[int]] = []  # per sequence, [length]: previous place of the n-gram ending there, or -1
        self.latest: dict[int, int] = {}  # n-gram → place of its last token
        self.live = 0
        self.bytes = 0

    def open(self, head: Sequence[int]) -> int:
        """A new sequence that begins with the prompt's end, so that first tokens have something to match."""
        self.tokens.append(array("i"))
        self.links.append(array("q"))
        self.live += 1
        sequence = len(self.tokens) - 1
        self.extend(sequence, head)
        return sequence

    def extend(self, sequence: int, new: Iterable[int]) -> None:
        """Append tokens and index the n-grams that they complete."""
        tokens, links, latest = self.tokens[sequence], self.links[sequence], self.latest
        known, base = len(latest), sequence * _SPAN
        before = len(tokens)
        tokens.extend(new)
        for end in range(before, len(tokens)):
            if end < SHORTEST - 1:
                links.append(-1)
                continue
            gram = _gram(tokens, end)
            links.append(latest.get(gram, -1))
            latest[gram] = base + end
        self.bytes += (len(tokens) - before) * TOKEN_BYTES + (len(latest) - known) * NGRAM_BYTES

    def longest_match(self, context: array[int]) -> tuple[int, array[int], int]:
        """(matched tokens, sequence, position after the match) of the longest match; 0 matched: none.

        Args:
            context: the sequence to continue; behind its own last token nothing follows, so it never matches itself.
        """
        best, where, after = 0, context, 0
        if len(context) < SHORTEST:
            return best, where, after
        place = self.latest.get(_gram(context, len(context) - 1), -1)
        for _ in range(CANDIDATES):
            if place < 0:
                break
            sequence, end = divmod(place, _SPAN)
            tokens = self.tokens[sequence]
            if end + 1 < len(tokens):
                length = _common_end(context, tokens, end)
                if length > best:
                    best, where, after = length, tokens, end + 1
            place = self.links[sequence][end]
        return best, where, after


@dataclass
class _Book:
    """All that is kept of one prompt."""

    visits: list[_Visit] = field(default_factory=list)
    """At most two, the latest last."""
    epoch: int = -1
    """The index's count of policies when the latest visit began."""


@dataclass(slots=True)
class _Request:
    book: _Book
    visit: _Visit
    sequence: int


class NgramIndex:
    """Books of all prompts that an engine has seen, within a bound of memory.

    Args:
        max_bytes: the oldest visits without a running request are forgotten beyond it; where that does not help, new
            tokens are no longer indexed.
        keep: whether responses survive a change of the policy; otherwise everything starts anew with each.
    """

    def __init__(self, max_bytes: int, keep: bool = True) -> None:
        self.max_bytes, self.keep = max_bytes, keep
        self.bytes = 0
        self.trust = Trust()
        self._books: OrderedDict[bytes, _Book] = OrderedDict()  # least recently visited first
        self._requests: dict[str, _Request] = {}
        self._policies = 0

    def __len__(self) -> int:
        return len(self._books)

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        """A request arrives; its response joins the book of its prompt."""
        key = blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
        book = self._books.setdefault(key, _Book())
        self._books.move_to_end(key)
        if not book.visits or (book.epoch != self._policies and not book.visits[-1].live):
            self._begin_visit(book, prompt)
        visit, before = book.visits[-1], book.visits[-1].bytes
        sequence = visit.open(prompt[-LONGEST:])
        self.bytes += visit.bytes - before
        self._requests[request] = _Request(book, visit, sequence)

    def _begin_visit(self, book: _Book, prompt: Sequence[int]) -> None:
        while len(book.visits) > 1:
            self.bytes -= book.visits.pop(0).bytes
        visit = _Visit()
        visit.open(prompt)  # prompts are quoted too
        visit.live = 0
        self.bytes += visit.bytes
        book.visits.append(visit)
        book.epoch = self._policies

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """A request was given tokens."""
        held = self._requests.get(request)
        if held is None:
            return
        before = held.visit.bytes
        held.visit.extend(held.sequence, tokens)
        self.bytes += held.visit.bytes - before
        if self.bytes > self.max_bytes:
            self._forget_oldest()
            if self.bytes > self.max_bytes:  # all that is left is running: these requests are followed no further
                self.end(request)

    def end(self, request: str) -> None:
        """A request has finished or was aborted; what it said stays in its book."""
        held = self._requests.pop(request, None)
        if held is not None:
            held.visit.live -= 1

    def propose(self, request: str, length: int, least: float = 0.0) -> Proposal | None:
        """What may follow, up to `length` tokens; None where nothing matches that is trusted at least `least`."""
        held = self._requests.get(request)
        if held is None or length < 1:
            return None
        context = held.visit.tokens[held.sequence]
        best, where, after = 0, context, 0
        for visit in reversed(held.book.visits):
            found = visit.longest_match(context)
            if found[0] > best:
                best, where, after = found
        if not best or self.trust.of(best) < least:
            return None
        return Proposal(where[after : after + length].tolist(), best)

    def new_policy(self) -> None:
        """The policy's weights changed: trust starts anew and, unless they are kept, so do the books."""
        self._policies += 1
        self.trust = Trust()
        if not self.keep:
            self._books.clear()
            self._requests.clear()
            self.bytes = 0

    def _forget_oldest(self) -> None:
        """Drop visits in which nothing runs, of the prompts visited longest ago first, down to nine tenths."""
        for key in list(self._books):
            book = self._books[key]
            kept = [visit for visit in book.visits if visit.live]
            self.bytes -= sum(visit.bytes for visit in book.visits if not visit.live)
            book.visits = kept
            if not kept:
                del self._books[key]
            if self.bytes < 0.9 * self.max_bytes:
                return


def _gram(tokens: array[int], end: int) -> int:
    """The n-gram whose last token is at `end`, as one integer (token ids take 21 bits)."""
    return (tokens[end - 2] << 42) | (tokens[end - 1] << 21) | tokens[end]


def _common_end(context: array[int], tokens: array[int], end: int) -> int:
    """How many tokens before and at `end` are those that `context` ends with, up to LONGEST."""
    length, last = SHORTEST, len(context) - 1
    most = min(LONGEST, len(context), end + 1)
    while length < most and tokens[end - length] == context[last - length]:
        length += 1
    return length
