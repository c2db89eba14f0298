"""Step costs that a calibration might have measured."""

from collections.abc import Iterable, Mapping

from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyPoint, LatencyTable


def step_costs(rows: Mapping[int, Iterable[tuple[int, float]]]) -> LatencyTable:
    """(batch, seconds) by draft length, at `SHORT_CONTEXT` alone."""
    measured = [(batch, length, seconds) for length, row in rows.items() for batch, seconds in row]
    return LatencyTable(tuple(LatencyPoint(b, b * SHORT_CONTEXT, length, seconds) for b, length, seconds in measured))
