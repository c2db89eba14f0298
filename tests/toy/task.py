"""The toy's task: column addition with the working written out, then re-checks, with a heavy tail of lengths.

A prompt gives two numbers digit by digit, lowest first. A response writes one tagged line per column, then
re-checks some columns in random order, counting down, and ends with the answer::

    prompt    <bos> x0 7 x1 4 + y0 5 y1 2 |
    columns   x0 7 y0 5 > z0 2   x1 4 y1 2 : z1 7          `>` a carry leaves the column, `:` one enters it
    checks    ? 0 2 x1 4 y1 2 : z1 7   ? 0 1 x0 7 y0 5 > z0 2 x1 4 y1 2 : z1 7
    answer    = z0 2 z1 7 z2 0 <eos>

A check starts at a random column and follows the carry, so its length depends on the digits: nothing in the text
repeats at a fixed distance, and the chance that a drafted token is accepted does not depend on where the draft began.
The number of checks is log-normal: most responses are short, the longest of 32 is six to ten times the median, as
in reasoning models. The demonstrations contain slips, a wrong digit written in a column; checks are right, and
the last digit written for a column counts. So longer working does help, and reinforcement learning has something to
remove.

Only the standard library: the reward, the tokenizer, training and the tests all read this file.
"""

import random
from dataclasses import dataclass

MAX_DIGITS = 12
MAX_CHECKS = 80
MAX_RESPONSE = 1400
"""Longest worked response in tokens, `<eos>` included."""
SLIP = 0.03
"""Share of first-pass columns that a demonstration gets wrong."""

PAD, BOS, EOS, NEWLINE, IM_END = "<pad>", "<bos>", "<eos>", "\n", "<|im_end|>"
ADD, SOLVE, CARRY_IN, CARRY_OUT, CHECK, ANSWER = "+", "|", ":", ">", "?", "="

# "\n" and "<|im_end|>" never occur in the task: verl's continuous-token builder for Qwen asks for them.
TOKENS: tuple[str, ...] = (
    *(PAD, BOS, EOS, NEWLINE, IM_END),
    *(ADD, SOLVE, CARRY_IN, CARRY_OUT, CHECK, ANSWER),
    *(str(d) for d in range(10)),
    *(f"x{i}" for i in range(MAX_DIGITS)),
    *(f"y{i}" for i in range(MAX_DIGITS)),
    *(f"z{i}" for i in range(MAX_DIGITS + 1)),
    *(f"<unused{i}>" for i in range(6)),
)
TOKEN_ID: dict[str, int] = {token: i for i, token in enumerate(TOKENS)}

_DIGIT_WEIGHTS = (6, 6, 6, 5, 5, 4, 3, 3, 2, 2, 2, 2)  # how often a problem has 1, 2, ... 12 digits
_CHECKS_MU, _CHECKS_SIGMA = 1.4, 1.4  # log of the number of checks: median 4, one in forty above 60
_CHECK_COLUMNS = 3  # a check follows a carry no further than this


@dataclass(frozen=True)
class Problem:
    """Two numbers with the same count of digits, lowest digit first."""

    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def digits(self) -> int:
        """Columns to add."""
        return len(self.a)


def sample_problem(rng: random.Random, max_digits: int = MAX_DIGITS) -> Problem:
    """A random problem of 1..max_digits columns; short ones are more frequent."""
    n = rng.choices(range(1, max_digits + 1), _DIGIT_WEIGHTS[:max_digits])[0]
    return Problem(tuple(rng.randrange(10) for _ in range(n)), tuple(rng.randrange(10) for _ in range(n)))


def prompt_tokens(problem: Problem) -> list[str]:
    """The question, `<bos>` to `|`: 4 tokens per column and 3 more."""
    first = [t for i, d in enumerate(problem.a) for t in (f"x{i}", str(d))]
    second = [t for i, d in enumerate(problem.b) for t in (f"y{i}", str(d))]
    return [BOS, *first, ADD, *second, SOLVE]


def answer_tokens(problem: Problem) -> list[str]:
    """What has to follow `=`: every digit of the sum with its tag, lowest first, the last carry included."""
    columns = _columns(problem)
    digits = [*(s for _, s, _ in columns), columns[-1][2]]
    return [t for i, d in enumerate(digits) for t in (f"z{i}", str(d))]


def sample_response(problem: Problem, rng: random.Random) -> list[str]:
    """One demonstration, `<eos>` included: at most MAX_RESPONSE tokens.

    Args:
        problem: what to solve.
        rng: source of the slips, of the number of checks and of where they start.
    """
    columns = _columns(problem)
    text: list[str] = []
    digits = [s for _, s, _ in columns]
    for i, (_, s, _) in enumerate(columns):
        digits[i] = (s + rng.randrange(1, 10)) % 10 if rng.random() < SLIP else s
        text += _column_tokens(problem, columns, i, digits[i])
    closing = 2 * problem.digits + 4  # `=`, the answer, `<eos>`
    checks = _sample_checks(problem, columns, rng, MAX_RESPONSE - len(text) - closing)
    for left, check in zip(range(len(checks), 0, -1), checks, strict=True):
        text += [CHECK, str(left // 10), str(left % 10)]
        for i in check:
            digits[i] = columns[i][1]
            text += _column_tokens(problem, columns, i, digits[i])
    answer = [t for i, d in enumerate([*digits, columns[-1][2]]) for t in (f"z{i}", str(d))]
    return [*text, ANSWER, *answer, EOS]


def sample_length(problem: Problem, rng: random.Random) -> int:
    """How many tokens one response to `problem` takes: a draw from the task's own distribution."""
    return len(sample_response(problem, rng))


def is_correct(response: list[str], answer: list[str]) -> bool:
    """Whether the text after the first `=` is `answer`: up to `<eos>`, a further check or answer, or the end."""
    if ANSWER not in response:
        return False
    tail = response[response.index(ANSWER) + 1 :]
    stops = [tail.index(stop) for stop in (EOS, CHECK, ANSWER) if stop in tail]
    return tail[: min(stops, default=len(tail))] == answer


def _columns(problem: Problem) -> list[tuple[int, int, int]]:
    """Per column (carry in, digit of the sum, carry out)."""
    columns, carry = [], 0
    for p, q in zip(problem.a, problem.b, strict=True):
        total = p + q + carry
        columns.append((carry, total % 10, total // 10))
        carry = total // 10
    return columns


def _column_tokens(problem: Problem, columns: list[tuple[int, int, int]], i: int, digit: int) -> list[str]:
    carry_in, _, carry_out = columns[i]
    marks = [CARRY_IN] * carry_in + [CARRY_OUT] * carry_out
    return [f"x{i}", str(problem.a[i]), f"y{i}", str(problem.b[i]), *marks, f"z{i}", str(digit)]


def _sample_checks(problem: Problem, columns: list[tuple[int, int, int]], rng: random.Random, room: int) -> list[range]:
    """The column ranges of all checks, as many as fit into `room` tokens."""
    wanted = min(MAX_CHECKS, int(rng.lognormvariate(_CHECKS_MU, _CHECKS_SIGMA)))
    checks: list[range] = []
    for _ in range(wanted):
        start = end = rng.randrange(problem.digits)
        while columns[end][2] and end + 1 < problem.digits and end - start + 1 < _CHECK_COLUMNS:
            end += 1
        span = range(start, end + 1)
        room -= 3 + sum(6 + columns[i][0] + columns[i][2] for i in span)
        if room < 0:
            break
        checks.append(span)
    return checks
