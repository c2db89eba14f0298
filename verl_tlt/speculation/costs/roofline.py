"""The shape of an engine step's latency: a roofline with a drafter on top, fitted to what was measured.

    T = overhead + ((weights + kv·KV tokens)^p + (token·batch·(K+1))^p)^(1/p)
        + sync + first + pass·(K-1) + request·batch·K

A decoding step reads weights and KV cache or computes over the verified tokens, whichever takes longer (p says how
sharply), and runs the drafter: one pass that keeps its KV in step (also at K=0, not when OFF), one output head for the
first draft token, one pass more for each further one. Every coefficient is positive, so the shape can only rise with
batch, KV tokens and K; every coefficient starts from what is usual, so that two measurements already extrapolate
sensibly. The fit is a few damped Gauss-Newton steps on the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SHARE = np.array([0.15, 0.60, 0.15, 0.30, 0.03, 0.03, 0.06, 0.01])
"""Usual share of one step's latency: overhead, weights, KV, tokens; sync, first, pass, requests."""
_SPREAD = np.array([1.0, 0.7, 1.0, 1.2, 1.0, 1.0, 0.7, 1.0, 0.5])
"""How far from usual the logarithm of each coefficient may be (one standard deviation); the last is p."""
_USUAL_KNEE = 200.0
"""Tokens at which a step is usually as much compute as memory."""
_USUAL_KV = 8192.0
"""KV tokens on which a step usually spends their share, at least; a calibration has far fewer."""
_CONTEXTS = 8.0
"""Longest over shortest context per request from which on the KV coefficient is fitted. A calibration has
one context: its KV tokens cannot be told from its batch, and all of the batch's cost could be laid to them."""
_FIXED = 1e9
"""Pull towards the usual that nothing overcomes."""
_NOISE = 0.03
"""Relative error of a measurement worth one vote."""

Params = npt.NDArray[np.float64]


class Roofline:
    """Latency by shape: nine positive coefficients."""

    def __init__(self) -> None:
        self._prior: Params | None = None
        self._log: Params = np.zeros(9)
        self._unpack()

    @property
    def ready(self) -> bool:
        """Whether `start` was called."""
        return self._prior is not None

    def start(self, batch: float, kv_tokens: float, seconds: float) -> None:
        """Set the usual coefficients from one measured step."""
        usual = np.empty(9)
        usual[:8] = _SHARE * seconds
        usual[2] /= max(kv_tokens, _USUAL_KV)
        usual[3] /= max(batch, _USUAL_KNEE * _SHARE[3])
        usual[7] /= max(batch, 1.0)
        usual[8] = 2.0
        self._prior = np.log(usual)
        self._log = self._prior.copy()
        self._unpack()

    def seconds(self, batch: float, kv_tokens: float, draft_length: int) -> float:
        """Latency of one steady step."""
        compute, drafter = self.part(batch, draft_length)
        return self.join(self.memory(kv_tokens), compute, drafter)

    def memory(self, kv_tokens: float) -> float:
        """The memory term to the power of p."""
        return float((self._weights + self._kv * kv_tokens) ** self._p)

    def part(self, batch: float, draft_length: int) -> tuple[float, float]:
        """The compute term to the power of p, and everything outside the roofline; neither depends on KV tokens."""
        k = draft_length if draft_length > 0 else 0
        outside = self._overhead
        if draft_length >= 0:
            outside += self._sync
        if k > 0:
            outside += self._first + self._pass * (k - 1) + self._request * batch * k
        return float((self._token * batch * (k + 1)) ** self._p), outside

    def join(self, memory: float, compute: float, outside: float) -> float:
        """Seconds from `memory` and `part`."""
        return float((memory + compute) ** self._root) + outside

    def fit(
        self,
        rows: Sequence[tuple[float, float, int]],
        seconds: Sequence[float],
        votes: Sequence[float],
        iterations: int = 3,
    ) -> None:
        """Refit from the last coefficients.

        Args:
            rows: (batch, KV tokens, K) per measurement.
            seconds: latency of each.
            votes: how many measurements each stands for.
            iterations: Gauss-Newton steps; few suffice because the last fit is the start.
        """
        if self._prior is None:
            self.start(rows[0][0], rows[0][1], seconds[0])
        table = np.asarray(rows, dtype=np.float64)  # [n, 3]
        target = np.log(np.asarray(seconds))  # [n]
        # Cauchy weights below tell stalls apart; the votes of all rows together stay within what the prior can bear.
        weight = np.asarray(votes) / _NOISE**2
        contexts = np.maximum(table[:, 1] / table[:, 0], 1.0)
        pull = 1.0 / _SPREAD**2
        if contexts.max() < _CONTEXTS * contexts.min():
            pull[2] = _FIXED
        for _ in range(iterations):
            self._log = _step(self._log, self._prior, table, target, weight, pull)
        self._unpack()

    def _unpack(self) -> None:
        values = [float(x) for x in np.exp(self._log)]
        self._overhead, self._weights, self._kv, self._token = values[:4]
        self._sync, self._first, self._pass, self._request, self._p = values[4:]
        self._root = 1.0 / self._p


def _step(log: Params, prior: Params | None, table: Params, target: Params, weight: Params, pull: Params) -> Params:
    """One damped, robust Gauss-Newton step towards the most probable coefficients."""
    value, slope = _evaluate(log, table)  # [n], [n, 9]
    error = target - np.log(value)  # [n]
    robust = weight / (1.0 + (error / 0.15) ** 2)
    jacobian = slope / value[:, None]  # [n, 9] of log seconds
    gram = jacobian.T @ (jacobian * robust[:, None])
    right = jacobian.T @ (robust * error) + pull * ((log if prior is None else prior) - log)
    gram[np.diag_indices(9)] += pull + 0.05 * np.diag(gram)
    new = log + np.clip(np.linalg.solve(gram, right), -1.0, 1.0)
    new[8] = np.clip(new[8], 0.0, math.log(8.0))
    return new


def _evaluate(log: Params, table: Params) -> tuple[Params, Params]:
    """Seconds of each row and their derivatives by the log coefficients, [n] and [n, 9]."""
    o, w, r, t, s, f, d, q, p = np.exp(log)
    batch, kv, k = table[:, 0], table[:, 1], table[:, 2]
    drafts = np.maximum(k, 0.0)
    memory, compute = w + r * kv, t * batch * (drafts + 1.0)
    powers = memory**p, compute**p
    total = powers[0] + powers[1]
    roof = total ** (1.0 / p)
    by_memory, by_compute = (memory / roof) ** (p - 1.0), (compute / roof) ** (p - 1.0)
    mixed = (powers[0] * np.log(memory) + powers[1] * np.log(compute)) / total
    slope = np.empty((len(table), 9))
    slope[:, 0] = o
    slope[:, 1] = by_memory * w
    slope[:, 2] = by_memory * r * kv
    slope[:, 3] = by_compute * compute
    slope[:, 4] = s * (k >= 0)
    slope[:, 5] = f * (k > 0)
    slope[:, 6] = d * np.maximum(k - 1.0, 0.0)
    slope[:, 7] = q * batch * drafts
    slope[:, 8] = roof * (mixed - np.log(total) / p)
    value = o + roof + slope[:, 4] + slope[:, 5] + slope[:, 6] + slope[:, 7]
    return value, slope
