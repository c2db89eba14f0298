"""Every recipe as it is written: it composes, and verl's validation and the doctor pass it.

Whether they also run, `make recipes-check` and tests/e2e/test_recipe_runs.py tell.
"""

from pathlib import Path

import pytest

from recipes import check
from verl_tlt.checks.recipe import compose, select

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(path for path in RECIPES.glob("*.sh"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The data files recipes name, empty."""
    path = tmp_path_factory.mktemp("data")
    check.touch_data(path)
    return path


@pytest.mark.parametrize(
    ("expression", "said"),
    [("12 * (3 + 4)", "84"), ("-1 / 4", "-0.25"), ("1 / 0", "error"), ("__import__('os').getpid()", "error"),
     ("9 ** 9 ** 9", "error"), ("'a' * 10 ** 9", "error"), ("(" * 201, "error"), ("x", "error")],
)  # fmt: skip
def test_the_calculator_works_out_plain_arithmetic_and_nothing_else(expression, said):
    from recipes.calculator_tool import calculate

    assert getattr(calculate, "__wrapped__", calculate)(expression).startswith(said)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_composes_and_can_run(data, path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check.problems(check.RECIPES[path.stem], data) == []


@pytest.fixture(scope="module")
def configs(data):
    """The config of every recipe as it is written."""
    return {
        name: compose(check.captured(recipe, {"DATA": str(data)}), "ppo_trainer")
        for name, recipe in check.RECIPES.items()
    }


def test_32_rows_of_one_problem_are_32_answers(configs):
    """In verl's V1 trainer `do_sample` decides nothing, and at temperature 0, its default, they are one answer."""
    on_aime = [config for config in configs.values() if "aime" in str(config.data.val_files)]
    assert len(on_aime) == 7
    for config in on_aime:
        assert select(config, "actor_rollout_ref.rollout.val_kwargs.temperature") > 0
        assert select(config, "actor_rollout_ref.rollout.val_kwargs.n") == 1
