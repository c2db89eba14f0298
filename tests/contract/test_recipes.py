"""Every recipe as it is written: it composes, and verl's validation and the doctor pass it.

Whether they also run, `make recipes-check` and tests/e2e/test_recipe_runs.py tell.
"""

from pathlib import Path

import pytest

from recipes import check

RECIPES = Path(__file__).parents[2] / "recipes"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
FILES = sorted(path for path in RECIPES.glob("*.sh"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The data files recipes name, empty."""
    path = tmp_path_factory.mktemp("data")
    check.touch_data(path)
    return path


@pytest.mark.parametrize(
    ("expression", "said"),
    [("12 * (3 + 4)", "84"), ("16234.56 * 12", "194814.72"), ("1234567 + 1", "1234568"),
     ("-1 / 4", "-0.25"), ("1 / 0", "error"), ("__import__('os').getpid()", "error"),
     ("9 ** 9 ** 9", "error"), ("'a' * 10 ** 9", "error"), ("(" * 201, "error"), ("x", "error")],
)  # fmt: skip
def test_the_calculator_works_out_plain_arithmetic_and_nothing_else(expression, said):
    from recipes.calculator_tool import calculate

    assert getattr(calculate, "__wrapped__", calculate)(expression).startswith(said)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_composes_and_can_run(data, path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check.problems(check.RECIPES[path.stem], data) == []


def test_32_rows_of_one_problem_are_32_answers(data):
    """In verl's V1 trainer `do_sample` decides nothing, and at temperature 0, its default, they are one answer."""
    given = [check.captured(recipe, {"DATA": str(data)}) for recipe in check.RECIPES.values()]
    on_aime = [said for said in map(assigned, given) if "aime" in said["data.val_files"]]
    assert len(on_aime) == 7
    for said in on_aime:
        assert float(said[f"{VALIDATION}.temperature"]) > 0
        assert said.get(f"{VALIDATION}.n", "1") == "1"


def assigned(words):
    """Values by their dotted keys."""
    return dict(word.lstrip("+").split("=", 1) for word in words)
