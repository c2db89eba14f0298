"""Hybrid policies (linear attention beside attention): the same tokens whatever K does, and the right probabilities.

vLLM computes them in 16 bits, so the measure is an engine of the same policy without speculation: how far the
log-probabilities it tells are from transformers' in float32. Each fault is silent without verl-tlt's change.
"""

import families
import pytest
import torch
from draws import HOT, HOTTER, draw, p_values
from greedy import K_MAX, choose, decode, near, stays_the_same
from shared_engines import part_of

from benchmarks.lossless.exact import Exact
from benchmarks.lossless.judged import FAILS
from benchmarks.lossless.tiny_policy import SMALL, build_drafter_dir

pytestmark = pytest.mark.engine

LONGEST = {"max_draft_length": K_MAX}
TIGHT = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 256}
"""So few tokens a step that rows go without drafts and requests sit out steps."""
STATE, SENSITIVE = 45.0, 400.0
"""How much recurrent states count: enough to show in log-probabilities, and in draws from 16 tokens."""
STATEFUL = "stateful-"
"""Before a family's name: other policies of it than those of the other tests."""
NEEDS_VISION = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe")
FAMILIES = ["qwen3_next", *(pytest.param(family, marks=pytest.mark.heavy) for family in NEEDS_VISION)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, models):
    """A family with its tiny policies, which are there."""
    if request.param in NEEDS_VISION:
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it: run by `make test-vision`")
    own = f"{STATEFUL}{request.param}"
    for name, vocab, state in ((own, 512, STATE), (f"{own}-small", SMALL, SENSITIVE)):
        target, good, bad = (models["target"].parent / part_of(name, part) for part in ("target", "good", "bad"))
        if not target.exists():
            families.build_family(target, request.param, vocab, state)
            build_drafter_dir(good, target, informed=True)
            build_drafter_dir(bad, target, informed=False)
        models.update({path.name: path for path in (target, good, bad)})
    return own


@pytest.fixture(scope="module")
def start(engine_of, family):
    """An engine of the family's policy."""

    def of(drafter, name=family, **more):
        if family.removeprefix(STATEFUL) in families.NESTED:
            more["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        drafting = {"speculation": LONGEST} if drafter else {}
        return engine_of(
            drafter, family=name, dtype="bfloat16", mamba_ssm_cache_dtype="float32", **{**drafting, **more}
        )

    return of


@pytest.fixture(scope="module")
def trained(models, family):
    """The policy after an update, by the names that an actor has for its weights: a layer's experts are one tensor."""
    path = models["target"].parent / f"{family}-trained"
    model = families.build_family(path, family.removeprefix(STATEFUL), 512, STATE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.copy_((weight * (1.0 + 0.2 * torch.rand(weight.shape))).bfloat16())
    model.save_pretrained(path)
    return path, {name: weight.bfloat16() for name, weight in model.state_dict().items()}


@pytest.fixture(scope="module")
def exact_by_size(models, family, trained):
    """Read before an engine starts: vLLM then has transformers read configs of Qwen3.5 with a class of its own."""
    paths = (models[part_of(family, "target")], models[part_of(f"{family}-small", "target")], trained[0])
    return [Exact(path) for path in paths]


@pytest.fixture(scope="module")
def exact(exact_by_size):
    return exact_by_size[0]


@pytest.fixture(scope="module")
def without_speculation(start, exact):
    """How far off an engine is that drafts nothing: (mean, largest)."""
    with start(None) as engine:
        return decode(engine, exact)[1]


def test_the_same_tokens_whatever_k_does(start, exact, without_speculation, models, family):
    with start("good") as engine:
        _, accepted = stays_the_same(engine, exact, without_speculation, models[part_of(family, "bad")])
        assert accepted > 100


def test_without_the_change_on_the_cpu_a_shorter_draft_is_wrong(start, exact, without_speculation):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    with start("good") as engine:
        choose(engine, 3)
        engine.patch.setattr(gdn_attention, "_spec_forward", gdn_attention._spec_forward.__wrapped__)
        assert decode(engine, exact)[1][0] > 4 * without_speculation[0]


def test_a_weight_sync_brings_every_layer(engine_of, start, exact_by_size, without_speculation, trained):
    with start("good") as engine:
        choose(engine, 0, 1, 3, 7)
        stale = decode(engine, exact_by_size[2])[1]
        engine.rpc("_update_weights", list(trained[1].items()), None, True)
        assert engine.llm.reset_prefix_cache()
        off = decode(engine, exact_by_size[2])[1]
    engine_of.close()  # whoever asks for this engine again gets one with the first policy
    assert near(off, without_speculation) and stale[0] > 4 * off[0], (stale, off, without_speculation)


@pytest.fixture
def pressed(start):
    """An engine with a tight token budget, K in 1, 3, 7; `without`: decode rows without drafts in steps with some."""
    with start("good", **TIGHT) as engine:
        choose(engine, 1, 3, 7)
        runner, inner, engine.without = engine.runner, engine.runner.execute_model, 0

        def watch(output, *args, **kwargs):
            cached = output.scheduled_cached_reqs
            rows = [
                request
                for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if computed >= runner.requests[request].num_prompt_tokens
            ]
            drafted = sum(request in output.scheduled_spec_decode_tokens for request in rows)
            engine.without += len(rows) - drafted if drafted else 0
            return inner(output, *args, **kwargs)

        engine.patch.setattr(runner, "execute_model", watch)
        yield engine


def test_rows_that_go_without_drafts(pressed, exact, without_speculation):
    _, off = decode(pressed, exact)
    assert pressed.without >= 5
    assert near(off, without_speculation), off


@pytest.mark.parametrize("change", ["_build_attention_metadata", "_update_states"])
def test_without_a_change_those_rows_are_wrong(pressed, exact, without_speculation, change):
    """Else vLLM has caught up: see hybrid_states.py."""
    pressed.patch.delattr(pressed.runner, change)  # the class's own method is there again
    assert decode(pressed, exact)[1][1] > 4 * without_speculation[1]


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_draws_have_the_policys_distribution(start, exact_by_size, family, broken):
    """With recurrent states that count: chi-square over the first tokens alone misses the fault."""
    exact, hot = exact_by_size[1], HOTTER if family.endswith("moe") else HOT
    with start("good", name=f"{family}-small", max_num_seqs=64) as engine:
        choose(engine, 0, 1, 3, 7)
        if broken:
            engine.patch.delattr(engine.runner, "_build_attention_metadata")
        chi, martingale = p_values(exact, draw(engine, hot, 400), hot)
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[0] > 400
    assert (martingale < FAILS) == broken, (chi, martingale)
    assert broken or chi > FAILS
