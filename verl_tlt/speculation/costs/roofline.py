"""A fitted roofline of an engine step's seconds, with the drafter's passes added.

    T = overhead + ((weights·read + kv·KV tokens)^p + (token·batch·(K+1))^p)^(1/p)
        + sync + first + pass·(K-1) + request·batch·K

A decoding step reads weights and KV cache or computes over the verified tokens, whichever takes longer (p is the
sharpness of that maximum), and runs the drafter: one pass that keeps its KV cache complete (also at K=0, not when OFF),
one output head for the first draft token, one pass more for each further one. A mixture of experts reads the part of
its weights that the step's batch·(K+1) tokens use together (`weights_read`); a dense policy reads all.

Every coefficient is positive, so the roofline rises with batch, KV tokens and K; every coefficient starts from a usual
value, so that two measurements already extrapolate. The fit is a few damped Gauss-Newton steps on the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_SHARE = np.array([0.15, 0.60, 0.15, 0.30, 0.03, 0.03, 0.06, 0.01])
"""Usual share of one step's latency: overhead, weights, KV, tokens; sync, first, pass, requests."""
_SPREAD = np.array([1.0, 0.7, 1.0, 1.2, 1.0, 1.0, 0.7, 1.0, 0.5])
"""Standard deviation of the logarithm of each coefficient around the usual; the last is p."""
_USUAL_KNEE = 200.0
"""Tokens at which a step is usually as much compute as memory."""
_USUAL_KV = 8192.0
"""Fewest KV tokens at which a step spends the usual share on them; a calibration has far fewer."""
_CONTEXTS = 8.0
"""Longest over shortest context per request from which on the KV coefficient is fitted. A calibration has one context:
the cost of its KV tokens cannot be separated from that of its batch."""
_FIXED = 1e9
"""Weight of the usual value for a coefficient that is not fitted."""
_ASIDE = 1e-5
"""Step of the central differences, in logarithms of coefficients."""
_NOISE = 0.03
"""Relative error of a measurement worth one vote."""

Params = npt.NDArray[np.float64]


def weights_read(active_share: float, tokens: Any) -> Any:
    """Share of a policy's weights that so many tokens (number or array) use, where one uses `active_share` of them."""
    return 1.0 - (1.0 - active_share) ** tokens


class Roofline:
    """The nine positive coefficients and the seconds they give; `active_share`: share of the weights one token uses."""

    def __init__(self, active_share: float = 1.0) -> None:
        self._active_share = active_share
        self._prior: Params | None = None
        self._log: Params = np.zeros(9)
        self._unpack()

    @classmethod
    def known(cls, coefficients: Sequence[float], active_share: float = 1.0) -> Roofline:
        """A roofline whose coefficients are given, above 0: those of the formula above from left to right, then p."""
        made = cls(active_share)
        made._log = made._prior = np.log(np.asarray(coefficients))
        made._unpack()
        return made

    @property
    def ready(self) -> bool:
        return self._prior is not None

    def start(self, batch: float, kv_tokens: float, seconds: float) -> None:
        """Set the usual coefficients from one measured step."""
        usual = np.empty(9)
        usual[:8] = _SHARE * seconds
        read = weights_read(self._active_share, max(batch, 1.0))
        usual[1] /= read
        usual[2] /= max(kv_tokens, _USUAL_KV)
        usual[3] /= max(batch, _USUAL_KNEE * _SHARE[3]) * read / self._active_share
        usual[7] /= max(batch, 1.0)
        usual[8] = 2.0
        self._prior = np.log(usual)
        self._log = self._prior.copy()
        self._unpack()

    def seconds(self, batch: float, kv_tokens: float, draft_length: int) -> float:
        return self.by_length(batch, kv_tokens, (draft_length,))[0]

    def by_length(self, batch: float, kv_tokens: float, lengths: Sequence[int]) -> list[float]:
        """`seconds` for several draft lengths at one load."""
        reads = [weights_read(self._active_share, batch * (max(k, 0) + 1)) for k in lengths]
        return [_seconds(self._values, batch, kv_tokens, k, read) for k, read in zip(lengths, reads, strict=True)]

    def fit(
        self,
        rows: Sequence[tuple[float, float, int]],
        seconds: Sequence[float],
        votes: Sequence[float],
        iterations: int = 3,
    ) -> None:
        """Refit from the last coefficients, in so many Gauss-Newton steps: few suffice.

        `rows` are (batch, KV tokens, K), `seconds` their latencies, `votes` how many measurements each stands for.
        """
        table = np.asarray(rows, dtype=np.float64)  # [n, 3]
        target = np.log(np.asarray(seconds))  # [n]
        # A robust (Cauchy-weighted) fit; the prior bounds how far the data can move it.
        weight = np.asarray(votes) / _NOISE**2
        contexts = np.maximum(table[:, 1] / table[:, 0], 1.0)
        pull = 1.0 / _SPREAD**2
        read = weights_read(self._active_share, table[:, 0] * (np.maximum(table[:, 2], 0.0) + 1.0))  # [n]
        if contexts.max() < _CONTEXTS * contexts.min():
            pull[2] = _FIXED
        for _ in range(iterations):
            self._log = _step(self._log, self._prior, table, read, target, weight, pull)
        self._unpack()

    def _unpack(self) -> None:
        self._values: list[float] = np.exp(self._log).tolist()


def _step(
    log: Params, prior: Params | None, table: Params, read: Params, target: Params, weight: Params, pull: Params
) -> Params:
    """One damped, robust Gauss-Newton step towards the most probable coefficients."""
    value = _log_seconds(log, table, read)  # [n]
    slope = np.empty((len(table), 9))
    for column in range(9):
        aside = _ASIDE * (np.arange(9) == column)
        above, below = _log_seconds(log + aside, table, read), _log_seconds(log - aside, table, read)
        slope[:, column] = (above - below) / (2.0 * _ASIDE)
    error = target - value  # [n]
    robust = weight / (1.0 + (error / 0.15) ** 2)
    gram = slope.T @ (slope * robust[:, None])
    right = slope.T @ (robust * error) + pull * ((log if prior is None else prior) - log)
    gram[np.diag_indices(9)] += pull + 0.05 * np.diag(gram)
    new = log + np.clip(np.linalg.solve(gram, right), -1.0, 1.0)
    new[8] = np.clip(new[8], 0.0, math.log(8.0))
    return new


def _log_seconds(log: Params, table: Params, read: Params) -> Params:
    """Log seconds of each row (batch, KV tokens, K), [n], with its `weights_read`."""
    batch, kv_tokens, k = table.T
    logs: Params = np.log(_seconds(np.exp(log), batch, kv_tokens, k, read))
    return logs


def _seconds(coefficients: Iterable[float], batch: Any, kv_tokens: Any, k: Any, read: Any) -> Any:
    """The formula at the top of this file, for numbers or arrays of them; `read` is `weights_read`."""
    overhead, weights, kv, token, sync, first, further, request, p = coefficients
    drafts = k * (k > 0)
    memory, compute = weights * read + kv * kv_tokens, token * batch * (drafts + 1.0)
    drafter = sync * (k >= 0) + first * (k > 0) + further * (drafts - 1.0) * (drafts > 1) + request * batch * drafts
    return overhead + (memory**p + compute**p) ** (1.0 / p) + drafter
