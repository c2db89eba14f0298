"""What bounds the draft length of an engine, whatever its policy chooses."""

from typing import NamedTuple


class Limits(NamedTuple):
    """What bounds the draft length of an engine, whatever is wanted."""

    lengths: tuple[int, ...]  # draft lengths, ascending from 0
    token_limit: int = 0  # tokens of the largest step with a CUDA graph; 0: there are no graphs
    rows: int = 0  # most tokens that a step of a larger batch may verify; 0: no limit

    def fitting(self, wanted: int, batch: int) -> int:
        """The longest draft length up to `wanted` whose step is small enough; 0 if there is none.

        A step is small enough if it has a CUDA graph. Where the batch is too large for any graph, it is small enough
        if it verifies at most `rows` tokens.
        """
        tokens = self.token_limit if batch <= self.token_limit else self.rows
        longest = self.lengths[-1]
        if tokens:
            longest = tokens // max(batch, 1) - 1  # each request's step has 1 + K tokens
        return max((k for k in self.lengths if k <= min(wanted, longest)), default=0)


def context_limit(positions: int, longest_draft: int, behind: int) -> int:
    """Tokens of context above which a draft may not fit into a drafter with so many positions.

    The contexts that are known are those at the start of the step that was `behind` steps before. Since then each step
    may have accepted a whole draft; the coming step verifies one, and another is made after it.
    """
    return positions - (behind + 2) * (longest_draft + 1)
