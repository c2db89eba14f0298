"""Capturing the policy's states at rest: the same as hooks on one text see, whatever text lies beside it."""

import pytest
import torch
from tiny_policy import FAMILIES, VOCAB, make_policy, observe

from verl_tlt.drafter import Library, PolicyStates, Text, plan_epoch

LENGTHS = (9, 30, 4, 17, 30, 2)


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(2)
    return [Text(tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()), 2) for n in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_padded_texts_gives_each_its_own_states(family, texts):
    policy = make_policy(family)
    alone = [observe(policy, torch.tensor(t.tokens), t.prompt_len, layers=(0, 2, 3)) for t in texts]
    combined = PolicyStates(policy, (0, 2, 3))(texts)
    for one, other in zip(alone, combined, strict=True):
        assert torch.equal(one.tokens, other.tokens) and one.prompt_len == other.prompt_len
        torch.testing.assert_close(one.aux, other.aux, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.last, other.last, rtol=1e-4, atol=1e-5)


def test_a_library_keeps_what_its_memory_allows(texts):
    runs = []

    class Counting(PolicyStates):
        def __call__(self, texts):
            runs.append([len(t.tokens) for t in texts])
            return super().__call__(texts)

    states = Counting(make_policy(), (1, 2, 3))
    per_token = 4 * 32 * 4 + 8  # four states of 32 floats, and the token
    library = Library(states, texts, max_bytes=20 * per_token)
    first = library.get([1, 0, 2, 1])
    assert [len(s) for s in first] == [30, 9, 4, 30]
    assert library.nbytes == 13 * per_token  # the short ones fit, the long one does not
    runs.clear()
    again = library.get([2, 0, 1])
    assert runs == [[30]]
    assert torch.equal(again[0].aux, first[2].aux)


def test_an_epoch_has_every_row_once_within_the_budget():
    plan = plan_epoch(LENGTHS, 8, (0, 3))
    rows = [(s.number, t) for batch in plan for s in batch for t in range(s.begin, s.end - 1)]
    assert sorted(rows) == [(n, t) for n, length in enumerate(LENGTHS) for t in range(length - 1)]
    assert all(sum(s.end - s.begin - 1 for s in batch) <= 8 for batch in plan)
    assert plan == plan_epoch(LENGTHS, 8, (0, 3)) != plan_epoch(LENGTHS, 8, (0, 4))
