"""What is captured, kept and drawn: caps, ages, and above all whether the long tail gets its share."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tail import long_tailed, share_by_decile

from verl_tlt.drafter import TrainingSequence
from verl_tlt.spot_trainer.buffer import KEPT_STEPS, Buffer
from verl_tlt.trainer.run_setup import held_out_share

BYTES = 8 + 2 * 4
"""Of a token: its id, and four states of one number each."""
ALL = {"most": 10**9, "fewest": 0, "draft": 1}
"""That is held out."""


def named(name, length, prompt_len=0, start=0):
    """A sequence whose tokens say which one it is."""
    aux, last = torch.zeros(length, 3, dtype=torch.bfloat16), torch.zeros(length, 1, dtype=torch.bfloat16)
    return TrainingSequence(torch.full((length,), name), prompt_len, aux, last, start)


def names(sequences):
    return [int(s.tokens[0]) for s in sequences]


def filled(lengths, *, step=1, held_out=0.0, prompt_len=0, **caps):
    """The i-th sequence is named i."""
    buffer = Buffer(**({"max_bytes": 10**12, "held_out": held_out} | caps))
    for i, length in enumerate(lengths):
        buffer.add(step, named(i, length, prompt_len))
    return buffer


def passes(buffer, epochs, budget, rng):
    """The micro-batches of a session."""
    buffer.begin_session(max_epochs=epochs)
    while not buffer.exhausted():
        yield buffer.sample_batch(rng, budget)


TWO_EACH = [(step, 10 * step + i, 15) for step in range(1, 11) for i in range(2)]


@pytest.mark.parametrize(
    ("caps", "arrivals", "kept"),
    [
        ({"max_bytes": 6 * 15 * BYTES + 1}, TWO_EACH, {80, 81, 90, 91, 100, 101}),
        ({}, TWO_EACH, {name for _, name, _ in TWO_EACH[-2 * KEPT_STEPS :]}),
        ({"max_bytes": 50 * BYTES}, [(1, 0, 10), (1, 1, 20), (2, 2, 51)], {0, 1}),  # alone above the cap
    ],
)
def test_full_buffers_drop_the_oldest_step(caps, arrivals, kept):
    """Arrivals are (step, name, tokens)."""
    buffer = filled([], **caps)
    for step, name, length in arrivals:
        buffer.add(step, named(name, length))
        assert buffer._nbytes <= caps.get("max_bytes", 10**12)
    assert set(names(buffer.sample_batch(random.Random(0), 1000))) == kept and len(buffer._items) == len(kept)


def test_what_is_held_out_is_not_counted_as_training_text():
    buffer = filled([100] * 40, held_out=0.25)
    held = sum(map(len, buffer.held_out(**ALL)))
    assert 0 < buffer.train_tokens == 4000 - held < 4000


def test_held_out_is_a_fixed_share():
    held = names(filled([50] * 4000, held_out=0.1).held_out(**ALL))
    assert len(held) == pytest.approx(400, abs=60)  # three standard deviations of a fair draw
    assert held == names(filled([50] * 4000, held_out=0.1).held_out(**ALL))


RUNS = st.fixed_dictionaries({
    "layout": st.sampled_from([(6, 4), (24, 4), (64, 8), (128, 16), (512, 16)]),  # prompts of a step, responses to each
    "steps": st.integers(2, 6), "known": st.sampled_from([24, 600, 10**6]), "captured": st.sampled_from([5, 100]),
    "room": st.sampled_from([40, 10**9]), "seed": st.integers(0, 2**32),
})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(RUNS)
def test_no_response_that_is_held_out_has_a_sibling_that_is_trained_on(run):
    """Whatever a run's layout is, and whichever responses are captured, and when.

    Prompts come again in later steps (`known` different ones), and old responses make room (`room`).
    """
    rng, (prompts, n) = random.Random(run["seed"]), run["layout"]
    share = held_out_share(prompts, 65_536, 4096)
    buffer = Buffer(max_bytes=run["room"] * BYTES, held_out=share)
    held, trained = set(), set()
    for step in range(run["steps"]):
        responses = [rng.randrange(run["known"]) for _ in range(prompts)] * n
        for prompt in rng.sample(responses, min(len(responses), run["captured"])):
            buffer.add(step, replace(named(prompt, 3), prompt=prompt))
        held |= set(names(buffer.held_out(**ALL)))
        trained |= set(names(buffer.sample_batch(rng, 10**6)))
    assert not held & trained


def test_a_budget_takes_some_of_enough_prompts_before_all_of_a_few():
    buffer = filled([], held_out=0.999999)
    for i in range(32):
        buffer.add(1, replace(named(i // 8, 40, 3), prompt=i // 8))
    chosen = names(buffer.held_out(200, fewest=3, draft=1))
    assert sorted(set(chosen)) == [1, 2, 3] and len(chosen) == 5 + 2


def test_held_out_prefers_the_newest_and_one_that_does_not_fit_lets_no_shorter_older_one_in():
    """Scores of a newest few would otherwise be of short responses."""
    buffer = filled([7], held_out=0.999999)  # the first prompt of all is trained on: it may stay the only one
    for step, length in ((1, 10), (2, 100), (3, 40), (4, 40)):
        buffer.add(step, named(step, length, prompt_len=3))
    buffer.add(5, named(5, 1))  # of one token there is nothing to judge
    assert [(s.start, len(s), s.prompt_len) for s in buffer.held_out(**ALL)][:2] == [(0, 40, 3)] * 2
    chosen = [names(buffer.held_out(most, 0, draft=1)) for most in (100, 170, 180)]
    assert chosen == [[4, 3], [4, 3, 2], [4, 3, 2, 1]]
    assert names(buffer.held_out(50, fewest=3, draft=1)) == [4, 3, 2]


def test_a_pass_draws_every_row_once_at_its_true_position():
    buffer, rng = filled([]), random.Random(5)
    lengths = long_tailed(60, rng, sigma=1.5)
    for i, length in enumerate(lengths):
        buffer.add(1, named(i, length, start=10 * i))
    seen = {i: np.zeros(n - 1, dtype=int) for i, n in enumerate(lengths)}
    for batch in passes(buffer, 1.0, 256, rng):
        assert 0 < sum(window.rows for window in batch) <= 256
        for window, name in zip(batch, names(batch), strict=True):
            begin = window.start - 10 * name
            seen[name][begin : begin + window.rows] += 1
    assert all(np.all(count == 1) for count in seen.values())
    assert buffer.epochs == pytest.approx(1.0)


def test_micro_batches_are_well_filled():
    rng = random.Random(6)
    batches = list(passes(filled(long_tailed(400, rng)), 3.0, 1024, rng))
    assert np.mean([sum(window.rows for window in batch) for batch in batches]) > 0.9 * 1024


@pytest.mark.parametrize("budget", [256, 2048])
def test_a_short_session_draws_the_longest_decile_in_proportion(budget):
    """However early a session stops: 300 sessions of a few micro-batches each."""
    rng = random.Random(7)
    lengths = long_tailed(100, rng)
    buffer = filled(lengths)
    drawn = np.zeros(100)
    for _ in range(300):
        buffer.begin_session(max_epochs=1.0)
        for _ in range(3):
            for window in buffer.sample_batch(rng, budget):
                drawn[int(window.tokens[0])] += len(window)
    shares, fair = share_by_decile(lengths, drawn), share_by_decile(lengths, lengths)
    assert shares[-1] == pytest.approx(fair[-1], rel=0.1)
    assert shares[0] == pytest.approx(fair[0], rel=0.35)


def test_pieces_of_pure_prompt_are_left_out():
    buffer = filled([1000], prompt_len=600)
    buffer.begin_session(max_epochs=1.0)
    windows = [w for _ in range(2) for w in buffer.sample_batch(random.Random(0), 250)]
    assert sorted((w.start, w.start + len(w), w.prompt_len) for w in windows) == [(499, 750, 101), (749, 1000, 0)]
    assert buffer.exhausted()  # the pass is over although 500 tokens of prompt were never drawn


def test_epochs_are_capped_and_counted_afresh_per_session():
    buffer, rng = filled([100] * 10), random.Random(0)
    for _ in range(2):
        assert len(list(passes(buffer, 1.5, 100, rng))) == 15
        assert buffer.epochs == pytest.approx(1.5)


def test_an_empty_buffer_is_exhausted_and_gives_nothing():
    buffer = filled([])
    assert buffer.exhausted() and buffer.sample_batch(random.Random(0), 100) == [] and buffer._nbytes == 0
