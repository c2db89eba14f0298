"""Are two samples of one distribution? No model of it is needed, so each device and dtype is compared with itself."""

from collections import Counter
from typing import Any

from scipy.stats import chi2_contingency

LEAST = 10
"""Outputs seen less often than this in both samples together are counted as one."""


def compare(one: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """Two samples of outputs of one length: a test for each place's token, and for each two tokens side by side.

    `p` of all together is the least of theirs, times their number (Bonferroni).
    """
    tests = {}
    for width, name in ((1, "token"), (2, "pair")):
        for i in range(len(one[0]) - width + 1):
            parts = [[row[i : i + width] for row in sample] for sample in (one, other)]
            tests[f"{name} {i}"] = chi_square(*parts)
    return {"p": min(1.0, len(tests) * min(test["p"] for test in tests.values())), "tests": tests}


def chi_square(one: list[list[int]], other: list[list[int]]) -> dict[str, float]:
    """Whether two samples of outputs are of one distribution: chi-square, its degrees of freedom, and p."""
    a, b = Counter(map(tuple, one)), Counter(map(tuple, other))
    cells = [(a[x], b[x]) for x in a.keys() | b.keys() if a[x] + b[x] >= LEAST]
    cells.append((len(one) - sum(n for n, _ in cells), len(other) - sum(n for _, n in cells)))  # all the rare ones
    found = chi2_contingency([cell for cell in cells if sum(cell)], correction=False)
    return {"chi_square": round(float(found.statistic), 3), "freedom": int(found.dof), "p": float(found.pvalue)}
