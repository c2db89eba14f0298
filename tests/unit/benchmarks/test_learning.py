"""The comparison of heads: how a run's checks become seconds, and what the recipes change."""

import math

import pytest
import torch

from benchmarks.drafter.corpora import Corpus
from benchmarks.drafter.learning import new_trainer, pooled, seconds_to
from benchmarks.drafter.recipes import BASE, RECIPES, _orthogonal
from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.drafter import TrainingSequence, pack

HIDDEN = 256


def checks(*lengths):
    return [{"seconds": 10.0 * (i + 1), "steps": i + 1, "7": length} for i, length in enumerate(lengths)]


def test_the_time_to_an_accept_length_lies_between_two_checks():
    assert seconds_to(checks(2.0, 4.0), 3.0) == 15.0
    assert seconds_to(checks(2.0, 4.0), 1.5) == 5.0  # a head begins at 1
    assert seconds_to(checks(2.0, 4.0), 5.0) == math.inf


def test_seeds_are_paired_with_those_of_base():
    everyone = {("base", 0): checks(2.0, 3.0), ("base", 1): checks(2.0, 5.0)}
    row = pooled({0: checks(3.0, 6.0), 1: checks(3.0, 5.0), 2: checks(9.0, 9.0)}, everyone)
    assert row["seeds"] == 3 and row["longer"][0] == 0.5
    assert row["faster"][0] == pytest.approx(math.sqrt(2.0), abs=1e-3)  # twice as fast, and as fast
    slower = pooled({0: checks(1.5, 2.0), 1: checks(1.5, 2.0)}, everyone)
    assert slower["faster"] == [1.0, 1.0, 1.0] and slower["longer"][0] < 0.0


@pytest.fixture
def sequence():
    generator = torch.Generator().manual_seed(0)
    return TrainingSequence(
        torch.randint(3, 60, (20,), generator=generator), 4,
        torch.randn(20, 3 * HIDDEN, generator=generator), torch.randn(20, HIDDEN, generator=generator),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["base", "mtp", "both norms", "init tied", "muon"])
def test_a_recipe_makes_a_head_that_learns(name, sequence):
    trainer = new_trainer(Corpus(SHIPPED_POLICY, [], []), RECIPES[name], 0)
    losses = [trainer.step(pack([sequence])).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert trainer.model.config.norm_output == ("norm_output" in RECIPES[name].norms)


def test_each_recipe_differs_from_its_end_in_one_thing():
    for name, recipe in RECIPES.items():
        if name.startswith(("token, ", "mtp, grow")):
            continue  # several at once
        end = RECIPES["mtp"] if name.startswith("mtp") else BASE
        changed = {key for key in vars(end) if getattr(recipe, key) != getattr(end, key)} - {"passes"}
        assert len(changed) <= 1 or name == "mtp, not mixed", name


def test_muons_update_has_singular_values_near_one():
    found = torch.linalg.svdvals(_orthogonal(torch.randn(12, 30)))
    assert found.min() > 0.5 and found.max() < 1.5
