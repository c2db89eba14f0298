"""Drafts without a model: the tokens that followed the same n-gram in other responses to the prompt.

The index keeps, per prompt, the responses of the current rollout, running ones included, and of the rollout before that
had this prompt (TLT's model-free drafter, arXiv 2511.16665). Per response it has the tokens and, for each n-gram, a
link to its previous place, as LZ77 compressors do: some dozen bytes and about a microsecond a token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

SHORTEST = 3
"""Tokens of an n-gram, and of the shortest match."""
LONGEST = 16
"""Tokens of the longest match."""
CANDIDATES = 8
"""Earlier places of an n-gram looked at, latest first."""
TOKEN_BYTES = 12
"""Memory of a stored token."""
NGRAM_BYTES = 150
"""Memory of an n-gram that is new in its rollout: a dict entry and two integers."""
_SPAN = 1 << 24
"""Positions per response; a place is response * _SPAN + position."""
_HALVE_AT = 512.0
"""Drafts of a match length at which all counts are halved, so that the latest weigh more."""
_ASSUMED = 4.0
"""Drafts of a match length that count as accepted before any was verified."""


class NgramDraft(NamedTuple):
    """Draft tokens and the length of the match that they follow."""

    tokens: list[int]
    matched: int  # SHORTEST..LONGEST


class _Match(NamedTuple):
    """An earlier place whose tokens are those at the end of a context."""

    length: int  # tokens that are the same
    tokens: array[int]  # the response that has them
    after: int  # position of the token behind them


class Trust:
    """Acceptance rate of a draft's first token, by the length of the match that it follows."""

    def __init__(self) -> None:
        self._offered = [_ASSUMED] * (LONGEST + 1)
        self._accepted = [_ASSUMED] * (LONGEST + 1)

    def of(self, matched: int) -> float:
        """Expected acceptance rate of a draft's first token, 0..1."""
        return self._accepted[matched] / self._offered[matched]

    def learn(self, matched: int, accepted: bool) -> None:
        self._offered[matched] += 1.0
        self._accepted[matched] += accepted
        if self._offered[matched] > _HALVE_AT:
            self._offered[matched] *= 0.5
            self._accepted[matched] *= 0.5


class _PromptRollout:
    """Responses to one prompt in one rollout, the prompt itself the first of them."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[array[int]] = []  # per response, [length]
        self.links: list[array[int]] = []  # per response, [length]: previous place of the n-gram ending there, or -1
        self.latest: dict[int, int] = {}  # n-gram → place of its last token
        self.running = 0
        self.bytes = 0
        self.open(prompt)

    def open(self, head: Sequence[int]) -> int:
        """Begin a response with the prompt's end, which its first tokens are matched with; returns its number."""
        self.tokens.append(array("i"))
        self.links.append(array("q"))
        response = len(self.tokens) - 1
        self.extend(response, head)
        return response

    def extend(self, response: int, new: Iterable[int]) -> None:
        tokens = self.tokens[response]
        links = self.links[response]
        latest = self.latest
        tokens_before = len(tokens)
        ngrams_before = len(latest)
        base = response * _SPAN
        tokens.extend(new)
        for end in range(tokens_before, len(tokens)):
            if end < SHORTEST - 1:
                links.append(-1)
                continue
            gram = _gram(tokens, end)
            links.append(latest.get(gram, -1))
            latest[gram] = base + end
        self.bytes += (len(tokens) - tokens_before) * TOKEN_BYTES
        self.bytes += (len(latest) - ngrams_before) * NGRAM_BYTES

    def longest_match(self, context: array[int]) -> _Match | None:
        """The longest match of the end of `context`, of equally long ones the latest; None: there is none."""
        if len(context) < SHORTEST:
            return None
        best: _Match | None = None
        place = self.latest.get(_gram(context, len(context) - 1), -1)
        for _ in range(CANDIDATES):
            if place < 0:
                break
            response, end = divmod(place, _SPAN)
            tokens = self.tokens[response]
            if end + 1 < len(tokens):  # nothing follows the context's own last token: it does not match itself there
                length = _common_end(context, tokens, end)
                if best is None or length > best.length:
                    best = _Match(length, tokens, end + 1)
            place = self.links[response][end]
        return best


@dataclass
class _PromptHistory:
    """The latest two rollouts of one prompt, the latest last."""

    rollouts: list[_PromptRollout] = field(default_factory=list)
    policy: int = -1  # `NgramIndex._policy` when the latest rollout began


class _Request(NamedTuple):
    history: _PromptHistory
    rollout: _PromptRollout
    response: int


class NgramIndex:
    """N-grams of an engine's prompts; beyond `max_bytes` the oldest rollouts without a running request are dropped.

    Where that does not suffice, new tokens are no longer indexed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.trust = Trust()
        self._histories: OrderedDict[bytes, _PromptHistory] = OrderedDict()  # least recently used first
        self._requests: dict[str, _Request] = {}
        self._policy = 0  # number of the present one

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        """A request arrives; its response is indexed with the others of its prompt."""
        key = blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
        history = self._histories.setdefault(key, _PromptHistory())
        self._histories.move_to_end(key)
        if not history.rollouts or (history.policy != self._policy and not history.rollouts[-1].running):
            while len(history.rollouts) > 1:
                self.bytes -= history.rollouts.pop(0).bytes
            history.rollouts.append(_PromptRollout(prompt))
            history.policy = self._policy
            self.bytes += history.rollouts[-1].bytes
        rollout = history.rollouts[-1]
        before = rollout.bytes
        response = rollout.open(prompt[-LONGEST:])
        rollout.running += 1
        self.bytes += rollout.bytes - before
        self._requests[request] = _Request(history, rollout, response)

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        entry = self._requests.get(request)
        if entry is None:
            return
        before = entry.rollout.bytes
        entry.rollout.extend(entry.response, tokens)
        self.bytes += entry.rollout.bytes - before
        if self.bytes > self.max_bytes:
            self._forget_oldest()
            if self.bytes > self.max_bytes:  # only running responses are left: this one is indexed no further
                self.end(request)

    def end(self, request: str) -> None:
        """A request has finished or was aborted; its response stays in the index."""
        entry = self._requests.pop(request, None)
        if entry is not None:
            entry.rollout.running -= 1

    def propose(self, request: str, length: int, least: float = 0.0) -> NgramDraft | None:
        """A draft of up to `length` tokens; None where no match has an expected acceptance of at least `least`."""
        entry = self._requests.get(request)
        if entry is None or length < 1:
            return None
        context = entry.rollout.tokens[entry.response]
        best: _Match | None = None
        for rollout in reversed(entry.history.rollouts):
            match = rollout.longest_match(context)
            if match is not None and (best is None or match.length > best.length):
                best = match
        if best is None or self.trust.of(best.length) < least:
            return None
        return NgramDraft(best.tokens[best.after : best.after + length].tolist(), best.length)

    def new_policy(self) -> None:
        """The policy's weights changed: acceptance is counted anew; responses stay, for the next epoch."""
        self._policy += 1
        self.trust = Trust()

    def _forget_oldest(self) -> None:
        """Drop rollouts without a running request, least recently used prompts first, down to nine tenths."""
        for key in list(self._histories):
            history = self._histories[key]
            self.bytes -= sum(rollout.bytes for rollout in history.rollouts if not rollout.running)
            history.rollouts = [rollout for rollout in history.rollouts if rollout.running]
            if not history.rollouts:
                del self._histories[key]
            if self.bytes < 0.9 * self.max_bytes:
                return


def _gram(tokens: array[int], end: int) -> int:
    """The n-gram whose last token is at `end`, as one integer (token ids take 21 bits)."""
    return (tokens[end - 2] << 42) | (tokens[end - 1] << 21) | tokens[end]


def _common_end(context: array[int], tokens: array[int], end: int) -> int:
    """How many tokens up to `end` are the same as at the end of `context`, up to LONGEST."""
    length, last = SHORTEST, len(context) - 1
    most = min(LONGEST, len(context), end + 1)
    while length < most and tokens[end - length] == context[last - length]:
        length += 1
    return length
