"""What requests ask for, and a drafter that goes off and on under them, with the families whose layers differ.

Llama with a head of its own; Llama with the embedding for a head and a scaled RoPE; Qwen2, whose attention has biases.
"""

import dataclasses

import pytest
from draws import CASES, HOT, draw, p_values, swaps_and_pauses
from shared_engines import part_of

from benchmarks.lossless.exact import Exact
from benchmarks.lossless.judged import FAILS
from benchmarks.lossless.tiny_policy import SMALL, build_drafter_dir, build_target

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

DRAWS = 400


@pytest.fixture(scope="module", params=["llama", "llamatied", "qwen2"])
def family(request, models):
    """Name of a family's small models, which are there."""
    name = f"{request.param}-small"
    root = models["target"].parent
    target, good, bad = (root / part_of(name, part) for part in ("target", "good", "bad"))
    if not target.exists():
        build_target(target, request.param, SMALL)
        build_drafter_dir(good, target, informed=True)
    if not bad.exists():
        build_drafter_dir(bad, target, informed=False)
    models.update({path.name: path for path in (target, good, bad)})
    return name


@pytest.fixture(scope="module")
def exact(models, family):
    return Exact(models[part_of(family, "target")])


@pytest.mark.parametrize("case", CASES)
def test_what_requests_ask_for_in_every_family(engine_of, exact, family, case):
    sampling, asked = CASES[case]
    with engine_of("good", family=family, max_num_seqs=64, policy="policies:rand") as engine:
        chi, martingale = p_values(exact, draw(engine, sampling, DRAWS, **asked), sampling)
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[0] > DRAWS
    assert chi > FAILS and martingale > FAILS


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_swaps_and_pauses_in_every_family(engine_of, exact, models, family, temperature):
    sampling = dataclasses.replace(HOT, temperature=temperature)
    drafters = [str(models[part_of(family, part)] / "model.safetensors") for part in ("good", "bad")]
    with engine_of("good", family=family, max_num_seqs=64, policy="policies:rand") as engine:
        swaps_and_pauses(engine, drafters)
        chi, martingale = p_values(exact, draw(engine, sampling, DRAWS), sampling)
        stats = engine.scheduler.tlt.stats()
    assert chi > FAILS and martingale > FAILS
    assert all(stats.steps_by_draft_length[k] > 5 for k in (-1, 0, 1, 2, 3))
