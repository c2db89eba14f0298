"""Every recipe as it is written: it composes, verl's validation and the doctor pass it, and it says what it needs.

Whether they also run, `make recipes-check` and tests/e2e/test_recipe_runs.py tell.
"""

import re
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


def test_every_shell_file_is_checked_and_is_run_or_differs_in_sizes_only_from_one_that_is():
    assert {path.stem for path in FILES} == set(check.RECIPES)
    source = (RECIPES.parent / "tests" / "e2e" / "test_recipe_runs.py").read_text()
    runs = {name for name in check.RECIPES if f'["{name}"]' in source}
    for recipe in [r for r in check.RECIPES.values() if r.name not in runs]:
        assert any(check.same_run(recipe, check.RECIPES[name]) for name in sorted(runs)), recipe.name


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs_and_all_of_tlt_is_in_its_last_lines(path):
    text = path.read_text()
    header = text.partition("set -euo pipefail")[0]
    assert all(re.search(rf"^# {field}: ", header, re.MULTILINE) for field in ("Hardware", "Data", "Watch"))
    assert len(header.splitlines()) <= 14 and len(text.splitlines()) <= 45
    *stock, last = text.rstrip().splitlines()
    assert last.strip() == '"$@"' and "exec python -m verl.trainer.main_ppo" in text
    tlt = [i for i, line in enumerate(stock) if re.search(r"\btlt\b[.=]", line) and not line.startswith("#")]
    assert tlt and tlt == list(range(len(stock) - len(tlt), len(stock))) and len(tlt) <= 3
