"""Training: it learns, stops when told, resumes to the bit, and a bad step changes nothing."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from tiny_policy import drafter_of, same_state

from verl_tlt.drafter.checkpoint import load_training_state, save_drafter
from verl_tlt.drafter.data import TrainingSequence, batches, from_numpy16, pack, to_numpy16
from verl_tlt.drafter.train import DrafterTrainer, train_until
from verl_tlt.errors import DrafterError


def stream(sequences, budget=48):
    return batches(itertools.cycle(sequences), budget)


def test_a_position_is_unrolled_once_drafts_reach_it(drafter, sequences):
    trainer = DrafterTrainer(drafter, learning_rate=3e-3, ttt_steps=2)
    batch, seen = pack(sequences), []
    while len(seen) < 200 and (not seen or len(seen[-1]) == 1):
        seen.append(trainer.step(batch).acc_by_position)
    assert len(seen) > 8 and len(seen[-1]) == 2
    assert max(seen[0]) < 0.5 < seen[-2][0]
    summary = train_until(trainer, stream(sequences), lambda: trainer.steps >= len(seen) + 20)
    assert (summary.steps, summary.stopped, summary.skipped) == (20, True, 0)
    assert len(trainer.step(batch).acc_by_position) == 2, "it has as many as it was asked for"
    state = trainer.state()
    older = {key: value for key, value in state.items() if key != "passes"}
    for saved, asked in ((state, 2), (older, 2), (state, 1)):
        again = DrafterTrainer(drafter, ttt_steps=asked)
        again.load_state(saved)
        assert len(again.step(batch).acc_by_position) == asked


def test_only_own_parameters_move_and_warm_up_is_linear(drafter, sequences):
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer = DrafterTrainer(drafter, learning_rate=1e-3, warmup_steps=4)
    rates = []
    for _ in range(5):
        trainer.step(pack(sequences))
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trainer.parameters), name


def test_resume_is_bit_exact(policy, sequences, tmp_path):
    def fresh():
        return DrafterTrainer(drafter_of(policy, seed=1), warmup_steps=6, ttt_steps=2)

    straight = fresh()
    train_until(straight, stream(sequences), lambda: straight.steps >= 4)
    save_drafter(straight.model, tmp_path / "half", {}, training_state=straight.state())
    train_until(straight, stream(sequences), lambda: straight.steps >= 9)

    resumed = fresh()
    resumed.load_state(load_training_state(tmp_path / "half"))
    assert resumed.steps == 4
    train_until(resumed, stream(sequences), lambda: resumed.steps >= 9)
    state = resumed.state()
    assert same_state(straight.state(), state)
    resumed.load_state({**state, "optimizer": {"state": {}}})  # as one is saved that took no step
    assert not resumed.state()["optimizer"]["state"][0]["exp_avg"].any()


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_changes_nothing(drafter, sequences, poison):
    trainer = DrafterTrainer(drafter)
    trainer.step(pack(sequences))
    bad = TrainingSequence(sequences[0].tokens, 5, sequences[0].aux.clone(), sequences[0].last)
    if poison == "loss":
        bad.aux[7] = torch.nan
    else:
        hook = drafter.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = copy.deepcopy(trainer.state())
    result = trainer.step(pack([bad]))
    assert result.skipped and (trainer.skipped, trainer.steps) == (1, 1)
    assert math.isfinite(result.loss) == (poison == "gradient")
    assert same_state(before, trainer.state())
    if poison == "gradient":
        hook.remove()
    assert not trainer.step(pack(sequences)).skipped


def test_the_end_of_the_data_ends_a_session(drafter, sequences):
    trainer, batch = DrafterTrainer(drafter, ttt_steps=1, warmup_steps=4), pack(sequences)
    summary = train_until(trainer, itertools.repeat(batch, 3), lambda: False)
    assert (summary.steps, summary.tokens, summary.stopped) == (3, 3 * batch.tokens, False)
    nothing = train_until(trainer, [], lambda: False)
    assert nothing.steps == 0 and math.isnan(nothing.loss)


def test_prompts_alone_teach_nothing(drafter, sequences):
    prompt = sequences[1].window(0, 8)
    with pytest.raises(ValueError, match="in a row"):
        train_until(DrafterTrainer(drafter), itertools.repeat(pack([prompt])), lambda: False)


def test_cloned_parameters_are_loaded_and_stay_as_they_are(policy, drafter, sequences):
    trainer = DrafterTrainer(drafter)
    trainer.step(pack(sequences))
    cloned = trainer.cloned_parameters()
    before = copy.deepcopy(cloned)
    other = DrafterTrainer(drafter_of(policy, seed=9))
    other.load_parameters(cloned)
    assert all(torch.equal(other.parameters[n], before[n]) for n in before)
    for one in (trainer, other):
        one.step(pack(sequences))
    assert all(torch.equal(cloned[n], before[n]) for n in before), "they are no views of either drafter"
    with pytest.raises(DrafterError, match=r"fc\.weight"):
        other.load_parameters({n: v for n, v in cloned.items() if n != "fc.weight"})
    with pytest.raises(DrafterError, match=r"norm\.weight is \[3\]"):
        other.load_parameters({**cloned, "norm.weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("average", {"norm.weight": torch.zeros(3)}, r"norm\.weight is \[3\]"),
        ("parameters", {"norm.weight": torch.full((32,), torch.nan)}, r"norm\.weight holds NaN or infinity"),
        ("optimizer", {"state": 3}, "no training state"),
        ("optimizer", {"state": {0: {"exp_avg": torch.zeros(1)}}}, "moments are not those of the drafter"),
        ("steps", math.nan, "no training state"),
    ],
)
def test_what_is_no_state_of_this_drafter_is_refused_and_nothing_changes(drafter, sequences, key, value, said):
    trainer = DrafterTrainer(drafter)
    trainer.step(pack(sequences))
    before = copy.deepcopy(trainer.state())
    changed = before[key] | value if isinstance(value, dict) else value
    with pytest.raises(DrafterError, match=said):
        trainer.load_state({**before, key: changed})
    assert same_state(before, trainer.state())


@pytest.mark.parametrize("trained", [False, True])
def test_the_average_follows_a_new_drafter_and_stays_with_a_trained_one(drafter, sequences, trained):
    trainer = DrafterTrainer(drafter, ttt_steps=1, warmup_steps=1, trained=trained)
    start = trainer.cloned_parameters()
    for _ in range(6):
        trainer.step(pack(sequences))
    weights, averages = trainer.cloned_parameters(), trainer.averages()

    def distance(other):
        return sum(float(((weights[name] - other[name]) ** 2).sum()) for name in weights) ** 0.5

    behind, moved = distance(averages), distance(start)
    assert behind < 0.3 * moved if not trained else behind > 0.8 * moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_arrays_round_trip(dtype):
    tensor = torch.randn(5, 3).to(dtype)
    array = to_numpy16(tensor)
    assert array.dtype == (np.uint16 if dtype == torch.bfloat16 else np.float16)
    assert torch.equal(from_numpy16(array), tensor)
    array.flags.writeable = False
    assert torch.equal(from_numpy16(array), tensor)
    assert torch.equal(from_numpy16(to_numpy16(torch.ones(2))), torch.ones(2, dtype=torch.bfloat16))
