"""The toy's verifiable reward, in the form of verl's `reward.custom_reward_function`."""

from typing import Any

from tests.toy.task import is_correct


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """1.0 for a complete and right answer after the first `=`, else 0.0.

    verl decodes without special tokens, so `<eos>` is usually gone; an answer cut off by the length limit lacks
    digits.
    """
    return float(is_correct(solution_str.split(), ground_truth.split()))
