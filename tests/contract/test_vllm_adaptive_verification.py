"""VLLM's adaptive verification is not exact with drafts that are drawn from 0.30 to 0.32; verl-tlt refuses it
(`OWN_ARGUMENTS`), in 0.33 too, where it seems exact and nothing has run.

From 0.30 on, on the V2 model runner, `speculative_config.enable_adaptive_verification` verifies some drafts of a batch
and leaves out the others, whose tokens are drawn from the target. Lines of 0.32, in `vllm/v1/worker/gpu`:

* A draft's confidence is sigmoid(slope * logit(max q) + intercept), q being the distribution it is drawn from
  (`spec_decode/acceptance_estimator.py:277-310`). Its survival is the product of the confidences up to it.
* The drafts with the highest survival are verified, as many as a budget allows
  (`spec_decode/adaptive_verification.py:64-72`).
* The budget maximises (requests + sum of survivals) / cost (`:326-350`). It reads the survivals of the drafts made *one
  step before* those that it is for (`:266-274`, `:309`).
* Two drafts of one position, made in two steps, have the same noise: it depends on the request's seed, the position and
  the token (`sample/gumbel.py:191-200`). In 0.33 it depends on the drafter's pass too, of which a position's falls with
  every step, so that no noise comes again.

The first two are exact: what they look at is fixed before the draft's token is drawn. The last two together are not.
After a rejection, confidences of the step before know the noise of a position that is drafted again. So the budget
knows something of the token that it leaves out or has verified. Here this is computed for every outcome of a target and
a drafter with two tokens, whose next token depends on the last one. Nothing is sampled.
"""

from collections import defaultdict
from contextlib import nullcontext
from fractions import Fraction as F
from itertools import pairwise, product
from math import log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from releases import releases

TARGET = ((F(1, 3), F(2, 3)), (F(3, 4), F(1, 4)))  # [last token][token]
DRAFTER = ((F(9, 10), F(1, 10)), (F(2, 5), F(3, 5)))
K, LENGTH = 3, 4  # drafts of a step; tokens of a text
COSTS = (10.0, 18.0, 25.0, 25.0)  # of a step that verifies 0 to K drafts, with a graph for 1, 2 and 4 tokens
SLOPE, INTERCEPT = 0.5, -0.2  # that vLLM begins with
FIRST = (1.0,) * K  # what its budget reads of a new request


def noise():
    """(probability, the token after a 0, the token after a 1) for each noise of one position that makes a difference.

    Of two tokens Gumbel noise takes the first where a uniform number is below its probability.
    """
    cuts = sorted({F(0), F(1), *(row[0] for row in DRAFTER)})
    for low, high in pairwise(cuts):
        yield high - low, tuple(int(low >= row[0]) for row in DRAFTER)


def confidence(last):
    top = float(max(DRAFTER[last]))
    return 1 / (1 + np.exp(-(SLOPE * log(top / (1 - top)) + INTERCEPT)))


def budget(confidences):
    """How many drafts of a single request vLLM verifies."""
    survivals = np.cumprod(confidences)
    return int(np.argmax((1 + np.concatenate(([0.0], np.cumsum(survivals)))) / np.array(COSTS)))


# ---------------------------------------------------------------------- rules: how many of a step's drafts are verified


def leading(flags):
    return [*flags, False].index(False)


def all_of_them(drafts, before):
    return K


def as_vllm(drafts, before):
    return budget(before)


def by_their_distributions(drafts, before):
    return leading([confidence(last) > 0.6 for last in drafts[:K]])


def by_the_drawn_tokens(drafts, before):
    return leading([DRAFTER[last][token] > F(1, 2) for last, token in pairwise(drafts)])


def by_what_was_drawn_after(drafts, before):
    return leading([confidence(token) > 0.6 for token in drafts[1:]])


# ---------------------------------------------------------------------- every outcome


def drafted(last, at, noises, drawn, by_step):
    """(probability, K drafts with the token before them, noises) for each outcome of a drafter's passes.

    Noises are kept by position, or with `by_step` by position and the number of the pass.
    """
    outcomes = [(F(1), (last,), noises)]
    for step in range(K):
        place, longer = (at + step, step if by_step else 0), []
        for weight, tokens, known in outcomes:
            if not drawn:
                certain = DRAFTER[tokens[-1]].index(max(DRAFTER[tokens[-1]]))
                longer.append((weight, (*tokens, certain), known))
                continue
            given = dict(known)
            kinds = [(F(1), given[place])] if place in given else noise()
            for part, token_after in kinds:
                kept = (*known, (place, token_after)) if place not in given else known
                longer.append((weight * part, (*tokens, token_after[tokens[-1]]), kept))
        outcomes = longer
    return outcomes


def verified(drafts, count, drawn):
    """(probability, tokens) for each outcome of verifying the first `count` drafts by rejection sampling."""
    reached, said = F(1), ()
    for last, token in pairwise(drafts[: count + 1]):
        p = TARGET[last]
        q = DRAFTER[last] if drawn else tuple(F(t == token) for t in (0, 1))
        accepted = min(F(1), p[token] / q[token])
        left = [max(F(0), p[t] - q[t]) for t in (0, 1)]
        if accepted < 1:
            yield from ((reached * (1 - accepted) * left[t] / sum(left), (*said, t)) for t in (0, 1))
        reached, said = reached * accepted, (*said, token)
    yield from ((reached * TARGET[drafts[count]][t], (*said, t)) for t in (0, 1))


def law(rule, same_noise=True, drawn=True, by_step=False):
    """{text: probability} of a request whose first token before the text is 0."""
    found, running = defaultdict(F), {((0,), FIRST, ()): F(1)}
    while running:
        later = defaultdict(F)
        for (text, before, noises), probability in running.items():
            for made, drafts, known in drafted(text[-1], len(text), noises, drawn, by_step):
                for chance, tokens in verified(drafts, rule(drafts, before), drawn):
                    weight, longer = probability * made * chance, (text + tokens)[: LENGTH + 1]
                    if not weight:
                        continue
                    if len(longer) > LENGTH:
                        found[longer[1:]] += weight
                        continue
                    kept = tuple(pair for pair in known if same_noise and pair[0][0] >= len(longer))
                    later[longer, tuple(confidence(last) for last in drafts[:K]), kept] += weight
        running = later
    return dict(found)


def expected():
    found = {}
    for text in product((0, 1), repeat=LENGTH):
        found[text] = F(1)
        for last, token in zip((0, *text), text, strict=False):
            found[text] *= TARGET[last][token]
    return found


def distance(one, other):
    """Total variation."""
    return sum(abs(one[text] - other[text]) for text in one) / 2


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("rule", [all_of_them, by_their_distributions])
def test_what_is_known_before_a_draft_is_drawn_may_decide(rule, same_noise):
    assert law(rule, same_noise) == expected()


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("rule", [by_the_drawn_tokens, by_what_was_drawn_after])
def test_its_token_and_what_follows_it_may_not(rule, same_noise):
    assert distance(law(rule, same_noise), expected()) > F(1, 100)


def test_the_step_before_may_decide_if_every_step_has_noise_of_its_own():
    assert {budget(confidences) for confidences in product((confidence(0), confidence(1)), repeat=K)} == {0, K}
    assert law(as_vllm, same_noise=False) == expected()


def test_vllms_rule_is_not_exact_with_noise_of_the_position():
    found = law(as_vllm)
    assert sum(found.values()) == 1 and distance(found, expected()) > F(1, 100)


def test_it_is_exact_with_noise_of_position_and_pass():
    assert law(as_vllm, by_step=True) == expected()


@pytest.mark.parametrize("rule", [as_vllm, by_the_drawn_tokens, by_what_was_drawn_after])
def test_drafts_that_are_not_drawn_may_be_left_out_by_any_rule(rule):
    assert law(rule, drawn=False) == expected()


# ---------------------------------------------------------------------- vLLM's rule, in each release's own text


release = releases((0, 30))
MANAGER = "vllm/v1/worker/gpu/spec_decode/adaptive_verification.py"


AROUND = {"np": np, "torch": torch, "gpu_sync_allowed": nullcontext, "stream": lambda *_: nullcontext()}


class Confidences:
    """A buffer on the device and its copy on the host."""

    def __init__(self):
        self.gpu, self.np = torch.ones(1, K), np.ones((1, K), np.float32)

    def copy_to_cpu(self):
        self.np[:] = self.gpu.numpy()


def manager():
    """What vLLM's manager of one request keeps, as far as its text asks for it."""
    nothing = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    tokens = SimpleNamespace(np=np.array([5]))
    return SimpleNamespace(
        num_speculative_steps=K, num_bonus_tokens=1, _max_total_logits=100,
        req_states=SimpleNamespace(
            req_id_to_index={"a": 0}, num_computed_tokens_np=np.array([8]), prefill_len=tokens, device=None
        ),
        cost_tables=(np.zeros(2), np.array([0.0, *COSTS])),
        _stale_idx=0, _stale_confidences=[Confidences(), Confidences()], _copy_events=[nothing] * 2,
        _pending_resets=[], _confidence_probs=torch.ones(1, K),
        _copy_stream=SimpleNamespace(wait_stream=lambda _: None),
    )  # fmt: skip


def test_the_budget_is_of_the_step_before(release, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    record, tokens_of = release.run(MANAGER, "record_confidences", "get_num_tokens", around=AROUND)
    kept, before = manager(), FIRST
    batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([0]))
    for confidences in product((confidence(0), confidence(1)), repeat=K):
        # Of the drafts that the next step verifies.
        record(kept, torch.tensor([confidences], dtype=torch.float32), batch)
        assert tokens_of(kept, {"a": 1 + K}, {"a": [7] * K}) == 1 + budget(before)
        before = confidences


def test_within_the_budget_the_likeliest_are_verified(release):
    (assign,) = release.run(MANAGER, "_assign_draft_token_budget", around=AROUND)
    counts = torch.tensor([K, K], dtype=torch.int32)
    assign(torch.tensor([[0.5, 0.9, 0.9], [0.8, 0.7, 0.1]]), torch.tensor([0, 1]), counts, 3, K)
    assert counts.tolist() == [1, 2]  # survivals 0.5, 0.45, 0.41 and 0.8, 0.56, 0.06


def test_a_confidence_is_of_the_distribution_and_not_of_the_token(release):
    text = release.text("vllm/v1/worker/gpu/spec_decode/acceptance_estimator.py")
    assert "feature = -tl.log(complement_sumexp)" in text and "prob = tl.sigmoid(weight * feature + bias)" in text
    assert f"_INIT_SLOPE = {SLOPE}" in text and f"_INIT_BIAS = {INTERCEPT}" in text


def test_noise_of_drafts_is_of_the_position_and_from_0_33_on_of_the_pass(release):
    gumbel = release.text("vllm/v1/worker/gpu/sample/gumbel.py")
    keyed = ("gumbel_seed = tl.randint(seed, pos)", "u = murmur3_uniform32(seed, pos, keys)")  # 0.30, from 0.31 on
    assert "pos = pos + _DRAFT_NOISE_SALT" in gumbel and any(words in gumbel for words in keyed)
    mixed = "    if logits_cache_ptr is not None:\n        seed = spec_step_seed(seed, col)\n" in gumbel
    assert mixed == (release.version >= (0, 33))
    seeds = [
        line for line in release.text("vllm/v1/worker/gpu/sample/states.py").splitlines() if "self.seeds.np[" in line
    ]
    assert [line.strip() for line in seeds] == ["self.seeds.np[req_idx] = seed"], "once a request"


def test_it_is_off_unless_asked_for_and_counts_what_it_leaves_out_as_rejected(release):
    """No statistics of ours could tell a draft that was left out from one that was rejected."""
    config = release.text("vllm/config/speculative.py")
    assert (
        "enable_adaptive_verification: bool = False" in config and "self.enable_adaptive_verification =" not in config
    )
    scheduler = release.text("vllm/v1/core/sched/scheduler.py")
    assert "num_draft_tokens = len(scheduled_spec_token_ids)" in scheduler
    assert "num_rejected = num_draft_tokens - num_accepted" in scheduler
