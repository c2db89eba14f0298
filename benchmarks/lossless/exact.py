"""What a model's distribution is exactly, from Hugging Face's forward pass; and counts of outputs against it.

`Exact.judge` places each token in its distribution, for the tests in `judged`. The chi-square test here counts whole
outputs against their probabilities, enumerated by a tree over all of them: it sees any wrong frequency in the first few
tokens, and nothing beyond; it needs a small vocabulary.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lossless.judged import Judged

AT_ONCE = 1 << 25
"""Log-probabilities held at a time."""
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
        if self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty:
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
            forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            forbidden[list(self.turns[i % len(self.turns)])] = False
            logits[:, i, forbidden] = -torch.inf
        return logits

    def ended(self, outputs: torch.Tensor) -> torch.Tensor:
        """[n, length]: whether there is a stop token, or all of a stop string, before each position."""
        stops = torch.isin(outputs, outputs.new_tensor(self.stop_token_ids))
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
    return (outputs[:, end - len(word) : end] == outputs.new_tensor(word)).all(-1)


class Exact:
    """A target model as Hugging Face computes it."""

    def __init__(self, path: Path, dtype: str = "float32", device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        nested = AutoConfig.from_pretrained(path).sub_configs  # a language model inside of one that sees
        kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
        self.model = kind.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(device)

    @torch.no_grad()
    def log_probs(self, prompt: list[int], outputs: Any, sampling: Sampling | None) -> torch.Tensor:
        """Distribution [n, length, vocab] of each token of `outputs` [n, length] given the prompt and those before it;
        sampling None: the raw model's.
        """
        outputs = torch.as_tensor(outputs).long().to(self.model.device)
        ids = torch.cat([outputs.new_tensor(prompt).expand(len(outputs), -1), outputs], 1)  # [n, prompt + length]
        kept = outputs.shape[1] + 1  # those of a long prompt would take gigabytes with a real vocabulary
        chunks = torch.split(ids, 256)
        logits = torch.cat([self.model(chunk, logits_to_keep=kept).logits[:, :-1].float() for chunk in chunks])
        sampling = sampling or Sampling()
        log_probs = sampling.log_probs(sampling.penalised(logits, prompt, outputs))
        ended = sampling.ended(outputs)
        log_probs[ended] = -torch.inf
        log_probs[..., AFTER_THE_END][ended] = 0.0
        return log_probs

    def of_tokens(self, prompt: list[int], output: list[int], sampling: Sampling | None) -> list[float]:
        log_probs = self.log_probs(prompt, [output], sampling)[0]
        return log_probs.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()

    def judge(self, prompt: list[int], outputs: np.ndarray, sampling: Sampling) -> Judged:
        """Where each token of `outputs` [n, length] lies in its distribution; flat, row by row."""
        width = outputs.shape[1] * self.model.config.get_text_config().vocab_size
        parts = np.array_split(outputs, math.ceil(len(outputs) * width / AT_ONCE))
        # Of each prompt its own: where the policy is nearly sure, places are these numbers, and must not come again.
        numbers = torch.Generator().manual_seed(zlib.crc32(np.array(prompt, dtype=np.int64).tobytes()))
        return Judged.of_all([self._judge(prompt, part, sampling, numbers) for part in parts])

    def _judge(self, prompt: list[int], outputs: np.ndarray, sampling: Sampling, numbers: torch.Generator) -> Judged:
        log_probs = self.log_probs(prompt, outputs, sampling).double().cpu()
        drawn = log_probs.gather(-1, torch.as_tensor(outputs).long()[..., None])  # [n, length, 1]
        finite, p = log_probs.clamp(min=-1e4), log_probs.exp()  # p log p = 0 where p = 0
        mean, square = (p * finite).sum(-1), (p * finite**2).sum(-1)
        likelier = torch.where(log_probs > drawn, p, 0.0).sum(-1)
        equal = torch.where(log_probs == drawn, p, 0.0).sum(-1)
        place = likelier + equal * torch.rand(likelier.shape, generator=numbers)
        position = torch.arange(outputs.shape[1]).expand(place.shape)
        fields = (drawn[..., 0], mean, square - mean**2, place, log_probs.amax(-1), position)
        return Judged(*(field.numpy().ravel() for field in fields))

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
