"""What a model's distribution is exactly, from Hugging Face's forward pass, and two tests of tokens against it.

* Chi-square: counts of whole outputs against their probabilities, enumerated by a tree over all of them. Sees any
  wrong frequency in the first few tokens, and nothing beyond.
* Martingale: the sum of log p(token) + entropy(p) over every sampled token. Each term has mean 0 given what came before
  if, and as far as log p can tell only if, the token was drawn from p; variances add up. Sees a small bias that lasts
  over long outputs, as a sampler has that accepts too willingly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPAND = 60.0
"""An output prefix expected this often is split by its next token; each expected leaf then holds several counts."""
LEAST = 5.0
"""Leaves expected less often than this are counted together with their siblings (chi-square's usual rule)."""


AFTER_THE_END = 0
"""Stands for the tokens behind a stop token, which are none."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters that shape a distribution, by the names of vLLM's `SamplingParams`; `top_k` 0: all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """As tokens."""
    stop: tuple[tuple[int, ...], ...] = ()
    """Stop strings, as the tokens that spell them in the one way there is."""
    turns: tuple[tuple[int, ...], ...] = ()
    """Structured output: the tokens allowed at each position, over and over."""

    def penalised(self, logits: torch.Tensor, prompt: list[int], outputs: torch.Tensor) -> torch.Tensor:
        """Logits [n, length, vocab] after what depends on the tokens so far (`outputs` [n, length]): penalties, bad
        words, and stop tokens before their time.
        """
        chosen = torch.nn.functional.one_hot(outputs, logits.shape[-1])  # [n, length, vocab]
        before = chosen.cumsum(1) - chosen  # how often each token is in the output before each position
        seen = before > 0
        seen[..., prompt] = True
        scale = torch.where(logits > 0, 1.0 / self.repetition_penalty, self.repetition_penalty)
        logits = torch.where(seen, logits * scale, logits)
        logits = logits - self.frequency_penalty * before - self.presence_penalty * (before > 0)
        logits[:, : self.min_tokens, list(self.stop_token_ids)] = -torch.inf
        for *begun, last in self.bad_words:
            for i in range(len(begun), logits.shape[1]):
                logits[_said(outputs, begun, i), i, last] = -torch.inf
        for i in range(logits.shape[1] if self.turns else 0):
            forbidden = torch.ones(logits.shape[-1], dtype=torch.bool)
            forbidden[list(self.turns[i % len(self.turns)])] = False
            logits[:, i, forbidden] = -torch.inf
        return logits

    def ended(self, outputs: torch.Tensor) -> torch.Tensor:
        """[n, length]: whether there is a stop token, or all of a stop string, before each position."""
        stops = torch.isin(outputs, torch.tensor(self.stop_token_ids, dtype=outputs.dtype))
        for word in self.stop:
            for i in range(len(word), outputs.shape[1] + 1):
                stops[:, i - 1] |= _said(outputs, word, i)
        return stops.cumsum(1) > stops.long()

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., vocab] of the tokens kept, -inf for others: top-k, then top-p over what is left."""
        logits = logits / self.temperature
        order = logits.argsort(dim=-1, descending=True)
        ranked = logits.gather(-1, order)  # [..., vocab], best first
        if self.top_k:
            ranked[..., self.top_k :] = -torch.inf
        if self.top_p < 1.0:
            probs = ranked.softmax(-1)
            before = probs.cumsum(-1) - probs  # probability of everything ranked higher
            ranked[before >= self.top_p] = -torch.inf
        return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked).log_softmax(-1)


def _said(outputs: torch.Tensor, word: Sequence[int], end: int) -> torch.Tensor:
    """[n]: whether the tokens of `outputs` [n, length] before position `end` are those of `word`."""
    return (outputs[:, end - len(word) : end] == torch.tensor(word, dtype=torch.long)).all(-1)


class Exact:
    """A target model as Hugging Face computes it."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(self, prompt: list[int], outputs: Any, sampling: Sampling | None) -> torch.Tensor:
        """Distribution [n, length, vocab] of each token of `outputs` [n, length] given the prompt and those before it;
        sampling None: the raw model's.
        """
        outputs = torch.as_tensor(outputs).long()
        ids = torch.cat([torch.tensor(prompt).expand(len(outputs), -1), outputs], 1)  # [n, prompt + length]
        logits = torch.cat([self.model(chunk).logits[:, len(prompt) - 1 : -1] for chunk in ids.split(256)])
        sampling = sampling or Sampling()
        log_probs = sampling.log_probs(sampling.penalised(logits, prompt, outputs))
        ended = sampling.ended(outputs)
        log_probs[ended] = -torch.inf
        log_probs[..., AFTER_THE_END][ended] = 0.0
        return log_probs

    def of_tokens(self, prompt: list[int], output: list[int], sampling: Sampling | None) -> list[float]:
        """Log-probability of each token of one output."""
        log_probs = self.log_probs(prompt, [output], sampling)[0]
        return log_probs.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()

    def martingale(self, prompt: list[int], outputs: np.ndarray, sampling: Sampling) -> float:
        """p-value of `outputs` [n, length] by the martingale test."""
        log_probs = self.log_probs(prompt, outputs, sampling).double()
        drawn = log_probs.gather(-1, torch.as_tensor(outputs)[..., None])[..., 0]
        if not torch.isfinite(drawn).all():
            return 0.0  # a token that cannot be
        finite = log_probs.clamp(min=-1e4)  # p log p = 0 where p = 0
        p = log_probs.exp()
        mean, square = (p * finite).sum(-1), (p * finite**2).sum(-1)
        z = (drawn - mean).sum() / (square - mean**2).sum().sqrt()
        return math.erfc(abs(float(z)) / math.sqrt(2.0))

    def stops(self, prompt: list[int], outputs: np.ndarray, sampling: Sampling) -> float:
        """p-value of how many `outputs` [n, length] end at each token, against their chance given what came before.

        Sees a token judged by a wrong count of those before it, which a test over all tokens hardly does.
        """
        chance = self.log_probs(prompt, outputs, sampling).double().exp()[..., list(sampling.stop_token_ids)].sum(-1)
        ended = torch.isin(torch.as_tensor(outputs), torch.tensor(sampling.stop_token_ids)).double()  # [n, length]
        variance = (chance * (1 - chance)).sum(0)
        possible = variance > 0
        z = ((ended - chance).sum(0)[possible] / variance[possible].sqrt()).abs().max()
        return min(1.0, int(possible.sum()) * math.erfc(float(z) / math.sqrt(2.0)))

    def chi_square(self, prompt: list[int], outputs: np.ndarray, sampling: Sampling) -> tuple[float, int]:
        """(p-value, cells) of `outputs` [n, length] by the chi-square test over all outputs of that length."""
        from scipy.stats import chi2

        expected: list[float] = []
        counted: list[int] = []
        # Prefixes of equal length with how often they should be there, and which samples have them.
        level: list[tuple[list[int], float, np.ndarray]] = [([], float(len(outputs)), outputs)]
        for depth in range(outputs.shape[1]):
            prefixes = torch.tensor([prefix for prefix, _, _ in level]).reshape(len(level), depth).long()
            extended = torch.cat([prefixes, torch.zeros(len(level), 1, dtype=torch.long)], 1)
            following = self.log_probs(prompt, extended, sampling)[:, -1].exp().double().numpy()  # [prefixes, vocab]
            deeper: list[tuple[list[int], float, np.ndarray]] = []
            for (prefix, weight, rows), probs in zip(level, following, strict=True):
                rest, rest_count = 0.0, 0
                for token, p in enumerate(probs):
                    expects, having = weight * p, rows[rows[:, depth] == token]
                    if expects >= EXPAND and depth + 1 < outputs.shape[1]:
                        deeper.append(([*prefix, token], expects, having))
                    elif expects >= LEAST:
                        expected.append(expects)
                        counted.append(len(having))
                    else:
                        rest, rest_count = rest + expects, rest_count + len(having)
                        if p == 0.0 and len(having):
                            return 0.0, len(expected)  # a token that cannot be
                if rest > 0.0:
                    expected.append(rest)
                    counted.append(rest_count)
            level = deeper
            if not level:
                break
        e, c = np.array(expected), np.array(counted)
        small = e < LEAST  # leftovers of single prefixes, pooled over all
        if small.any():
            e, c = np.append(e[~small], e[small].sum()), np.append(c[~small], c[small].sum())
        return float(chi2.sf(((c - e) ** 2 / e).sum(), len(e) - 1)), len(e)
