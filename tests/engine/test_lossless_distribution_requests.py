"""Whatever requests ask for and whatever happens while they run, outputs have exactly the target's distribution."""

import dataclasses

import pytest
import torch
from draws import CASES, CAUGHT, HOT, PROMPTS, STRUCTURED, draw, exact_models, p_values, swaps_and_pauses
from safetensors.torch import load_file, save_file
from tiny_engine import sampled

from benchmarks.lossless.exact import Sampling
from benchmarks.lossless.judged import FAILS
from verl_tlt.engine_core import scheduler

pytestmark = pytest.mark.engine

DRAWS = 400
SMALL = {"family": "qwen3-small", "max_num_seqs": 64}
STOPS = (2, 5, 11)  # vLLM hides the end token (2) before `min_tokens` whether a request stops there or not


@pytest.fixture(scope="module")
def exact(models):
    return exact_models(models)["qwen3"]


@pytest.mark.parametrize("case", CASES)
def test_what_requests_ask_for(engine_of, exact, case):
    sampling, asked = CASES[case]
    with engine_of("good", policy="policies:rand", **SMALL) as engine:
        engine.end_at_stop_strings()
        chi, martingale = p_values(exact, draw(engine, sampling, DRAWS, **asked), sampling)
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[0] > DRAWS
    assert chi > FAILS and martingale > FAILS


@pytest.mark.parametrize("across", [False, True], ids=["as it is", "drafts across the boundary"])
def test_least_length_and_stop_tokens(engine_of, exact, across):
    """With K=2 the fourth token, which may be the last, stands behind the first draft of its request."""
    sampling = Sampling(min_tokens=3, stop_token_ids=STOPS)
    with engine_of("good", policy="policies:rand", **SMALL) as engine:
        engine.scheduler.tlt.control(force_k=2)
        if across:
            engine.patch.setattr(scheduler, "verified_inexactly", lambda _: False)
        draws = draw(engine, sampling, 4 * DRAWS if across else 2 * DRAWS)
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[1] > 20
    ends = min(exact.stops(list(prompt), found, sampling) for prompt, found in zip(PROMPTS, draws, strict=True))
    if across:
        assert ends < CAUGHT, "vLLM counts right around min_tokens now: no need to abstain"
    else:
        chi, martingale = p_values(exact, draws, sampling)
        assert ends > FAILS and chi > FAILS and martingale > FAILS


@pytest.mark.parametrize("drafted", [False, True], ids=["as it is", "drafted"])
def test_structured_output(engine_of, exact, drafted):
    """Many a draft would hold what the grammar forbids. After the first prompt it shows: chi-square had p = 2e-18."""
    first = PROMPTS[:1]
    with engine_of("good", policy="policies:longest", **SMALL) as engine:
        if drafted:
            engine.patch.setattr(scheduler, "verified_inexactly", lambda _: False)
        chi, martingale = p_values(exact, draw(engine, STRUCTURED, 2400, prompts=first), STRUCTURED, first)
    if drafted:
        assert chi < CAUGHT, "vLLM no longer cuts drafts by what was drawn: no need to abstain"
    else:
        assert chi > FAILS and martingale > FAILS


@pytest.fixture(scope="module")
def worse(models, tmp_path_factory):
    """A drafter that is right less often than the good one."""
    path = tmp_path_factory.mktemp("worse") / "model.safetensors"
    tensors = load_file(models["qwen3-small-good"] / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    save_file({n: t + 0.3 * t.std() * torch.randn(t.shape, generator=noise) for n, t in tensors.items()}, path)
    return str(path)


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.heavy), 1.3])
def test_what_happens_while_they_run(engine_of, exact, models, worse, temperature):
    """Drafters are swapped, the drafter goes off and on, others come and are aborted; K is anything."""
    sampling = dataclasses.replace(HOT, temperature=temperature)
    drafters = (str(models["qwen3-small-good"] / "model.safetensors"), worse)
    with engine_of("good", policy="policies:rand", **SMALL) as engine:
        vllm_engine = engine.llm.llm_engine

        def strangers(step):
            if step % 6 == 1:
                stranger = sampled(200, temperature=temperature)
                vllm_engine.add_request(f"{10**6 + step}", {"prompt_token_ids": [1, 2, 3]}, stranger)
            if step % 6 == 5:
                vllm_engine.abort_request([f"{10**6 + step - 4}"], internal=False)

        swaps_and_pauses(engine, drafters, strangers)
        outputs = draw(engine, sampling, DRAWS)
        for request in list(vllm_engine.output_processor.external_req_ids):
            vllm_engine.abort_request([request], internal=False)
        chi, martingale = p_values(exact, outputs, sampling)
        stats = engine.scheduler.tlt.stats()
    assert chi > FAILS and martingale > FAILS
    assert all(stats.steps_by_draft_length[k] > 5 for k in (-1, 0, 1, 2, 3))
    assert stats.num_accepted_tokens_per_pos[0] > DRAWS


def as_drawn(engine):
    """Notes what was drafted, and wherever something else is verified, or verified with other probabilities.

    So K cannot depend on what it drafted: every token that was drafted is verified.

    Returns:
        (requests for which it was so, requests compared), a name per draft; filled while the engine runs.
    """
    runner, scheduler = engine.runner, engine.scheduler
    propose, verify, schedule = runner.drafter.propose, runner.rejection_sampler.forward, scheduler.schedule
    drawn, wrong, compared = {}, [], []

    def noted(*args, **kwargs):
        tokens = propose(*args, **kwargs)
        probs = runner.drafter._last_draft_probs
        drawn.clear()
        if probs is not None:
            drawn.update(zip(runner.input_batch.req_ids, zip(tokens.tolist(), probs.clone(), strict=True), strict=True))
        return tokens

    def scheduled(*args):
        output = schedule(*args)
        for request in output.num_scheduled_tokens.keys() & drawn.keys():
            if output.scheduled_spec_decode_tokens.get(request) != drawn[request][0]:
                wrong.append(request)
        return output

    def checked(metadata, probs, *rest):
        start = 0
        for request, width in zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True):
            rows = slice(start, start := start + width)
            if width:
                tokens, theirs = drawn[request]
                compared.append(request)
                if metadata.draft_token_ids[rows].tolist() != tokens[:width] or not torch.equal(
                    probs[rows], theirs[:width]
                ):
                    wrong.append(request)
        return verify(metadata, probs, *rest)

    engine.patch.setattr(runner.drafter, "propose", noted)
    engine.patch.setattr(runner.rejection_sampler, "forward", checked)
    engine.patch.setattr(scheduler, "schedule", scheduled)
    return wrong, compared


def off_for_one_request(engine):
    """Two rows of draft probabilities, of one request or of two, are exchanged."""
    draft_probs = engine.runner._get_spec_decode_draft_probs

    def off(metadata):
        probs = draft_probs(metadata)
        if probs is not None and len(probs) > 9:
            probs[[4, 5]] = probs[[5, 4]]
        return probs

    engine.patch.setattr(engine.runner, "_get_spec_decode_draft_probs", off)


def odd_drafts_cut_for_all(engine):
    """A K that peeks: nobody's draft is verified where the first request's first token has an odd number."""
    update = engine.scheduler.update_draft_token_ids

    def peek(drafts):
        rows = drafts.draft_token_ids
        if rows and rows[0] and rows[0][0] % 2:
            for row in rows:
                row.clear()
        update(drafts)

    engine.patch.setattr(engine.scheduler, "update_draft_token_ids", peek)


@pytest.mark.parametrize("sabotage", [None, off_for_one_request, odd_drafts_cut_for_all])
def test_every_draft_is_verified_whole_and_with_the_probabilities_it_was_drawn_with(engine_of, sabotage):
    """Looked up for each request: what is wrong for one in sixty is not seen in the distribution of all."""
    with engine_of("good", policy="policies:rand", **SMALL) as engine:
        if sabotage:
            sabotage(engine)
        wrong, compared = as_drawn(engine)
        draw(engine, HOT, 200)
    assert len(compared) > 200
    assert bool(wrong) == (sabotage is not None)


def test_a_greedy_token_behind_the_draft_is_caught(engine_of, exact):
    """The token behind a draft that was accepted whole is the likeliest one."""
    with engine_of("good", policy="policies:longest", **SMALL) as engine:
        sampler = engine.runner.rejection_sampler.sampler
        sample = sampler.forward

        def greedy(logits, sampling_metadata, predict_bonus_token=False, **kwargs):
            if predict_bonus_token:
                best = logits.argmax(-1, keepdim=True)
                logits = torch.full_like(logits, -1e4).scatter(-1, best, 0.0)
            return sample(logits, sampling_metadata, predict_bonus_token=predict_bonus_token, **kwargs)

        engine.patch.setattr(sampler, "forward", greedy)
        _, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    assert martingale < CAUGHT
