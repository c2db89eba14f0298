"""Every recipe as it is written: it composes, verl's validation and the doctor pass it, and it says what it needs.

Whether they also run, `make recipes-check` and tests/e2e/test_recipe_runs.py tell.
"""

import re
from pathlib import Path

import pytest

from recipes import check, memory, tables
from verl_tlt.checks.recipe import select

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
def configs():
    return tables.composed()


def test_the_tables_of_the_page_are_those_of_the_recipes(configs):
    assert tables.PAGE.read_text() == tables.render(tables.PAGE.read_text(), configs), "run `python -m recipes.tables`"
    same = [(name, key) for name, original in tables.ORIGINALS.items() for key, (there, _) in original.differs.items()
            if str(tables.here(configs[name], key)) == str(there)]  # fmt: skip
    assert not same, "nothing differs"


def test_a_recipe_whose_requests_do_not_fit_is_refused(configs):
    """GRPO with 200 thousand tokens of KV cache, DAPO with 256 requests at once, an actor that stays on the GPU."""
    fitting = {name: config.copy() for name, config in configs.items()}
    assert not any(memory.problems(config) for config in fitting.values())
    for name, key, value in (
        ("grpo_qwen3_8b", "gpu_memory_utilization", 0.6),
        ("dapo_qwen2.5_32b", "max_num_seqs", 256),
    ):
        fitting[name].actor_rollout_ref.rollout[key] = value
        (said,) = memory.problems(fitting[name])
        assert "actor_rollout_ref.rollout.max_num_seqs" in said
    crowded = fitting["ppo_qwen3_8b"]
    crowded.actor_rollout_ref.actor.fsdp_config.param_offload = False
    crowded.actor_rollout_ref.actor.fsdp_config.optimizer_offload = False
    crowded.critic.fsdp.optimizer_offload = False
    assert "80 GB" in memory.problems(crowded)[0]


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
