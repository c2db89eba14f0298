"""A policy's own MTP head served by an engine as verl starts it: from dummy weights, asleep between rollouts.

The checkpoint's head drafts from the start on. Neither a weight sync of verl's, which has no tensor of the head, nor a
reload of the head changes the other's weights; and whatever the head knows and K does, tokens are the policy's.
"""

import pytest
from drafter_bits import fingerprint, holds, live_fingerprint
from draws import HOT, HOTTER, draw, p_values
from families import HYBRID, NESTED
from greedy import K_MAX, choose, decode, stays_the_same
from mtp_policies import build_mtp_policy, save_head
from safetensors.torch import load_file
from shared_engines import part_of

from benchmarks.lossless.exact import Exact
from benchmarks.lossless.judged import FAILS
from benchmarks.lossless.tiny_policy import SMALL, V

pytestmark = pytest.mark.engine

LONGEST = {"max_draft_length": K_MAX}
STATE, SENSITIVE = 30.0, 400.0
"""How much recurrent states count, if there are any: in log-probabilities, and in draws from 16 tokens."""
FAMILIES = ["mimo", *(pytest.param(family, marks=pytest.mark.heavy) for family in ("qwen3_5_text", "qwen3_5_moe"))]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, models):
    """A family's name; its policies and heads are there."""
    if request.param in HYBRID:
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it: run by `make test-vision`")
    root, own = models["target"].parent, f"mtp-{request.param}"
    for name, vocab, state in ((own, V, STATE), (f"{own}-small", SMALL, SENSITIVE)):
        target, good, bad = (root / part_of(name, part) for part in ("target", "good", "bad"))
        head = build_mtp_policy(target, request.param, vocab, state)
        save_head(good, head)
        save_head(bad, head, noise=True)
        models.update({path.name: path for path in (target, good, bad)})
    return own


@pytest.fixture(scope="module")
def exact(models, family):
    """The policies as transformers computes them, by name; read before an engine starts."""
    return {name: Exact(models[part_of(name, "target")]) for name in (family, f"{family}-small")}


@pytest.fixture(scope="module")
def start(engine_of, models, family):
    """An engine of a policy; with a drafter as verl's server starts it."""

    def of(drafter="good", name=family, **more):
        hybrid = {"mamba_ssm_cache_dtype": "float32"} if family.removeprefix("mtp-") in HYBRID else {}
        if family.removeprefix("mtp-") in NESTED:
            more["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        ours = {"method": "mtp", "speculation": LONGEST, "load_format": "dummy", "enable_sleep_mode": True}
        return engine_of(drafter, family=name, dtype="bfloat16", **hybrid, **{**(ours if drafter else {}), **more})

    return of


def sync(engine, target):
    """Verl's weight sync: the policy's tensors, without those of its MTP head."""
    policy = {name: t for name, t in load_file(target / "model.safetensors").items() if "mtp" not in name}
    engine.rpc("_update_weights", list(policy.items()), None, True)


def wake(engine, target, head=None):
    """Sleep as verl does, which loses all weights, and come back; what the load of a head answered, in verl's order."""
    engine.llm.sleep(level=2)
    engine.llm.wake_up(tags=["weights"])
    sync(engine, target)
    answer = head and engine.rpc("tlt_load_drafter", str(head / "model.safetensors"))
    assert answer is None
    engine.llm.wake_up(tags=["kv_cache"])
    assert engine.llm.reset_prefix_cache()
    return answer


def accept_length(engine):
    """Tokens per verified draft of K_MAX, in greedy decoding."""
    choose(engine, K_MAX)
    engine.scheduler.tlt.stats(reset=True)
    engine.generate(8, 48)
    stats = engine.scheduler.tlt.stats(reset=True)
    assert stats.num_drafts > 0
    return 1 + sum(stats.num_accepted_tokens_per_pos) / stats.num_drafts


def test_the_checkpoints_head_drafts_from_the_start_and_comes_back_after_sleep(start, models, family):
    target, good, bad = (models[part_of(family, part)] for part in ("target", "good", "bad"))
    with start() as engine:
        fresh = live_fingerprint(engine)
        loaded = engine.rpc("tlt_load_drafter", str(good / "model.safetensors"))
        assert loaded is None
        assert live_fingerprint(engine) == fresh, "the checkpoint's, though the policy is a dummy"
        assert holds(engine, good / "model.safetensors")
        sync(engine, target)
        whole, policy = live_fingerprint(engine), fingerprint(engine.runner.get_model().state_dict())
        healthy = accept_length(engine)
        assert whole == fresh and healthy > 1.3
        wake(engine, target)
        assert live_fingerprint(engine) != fresh and accept_length(engine) < 1.1
        wake(engine, target, bad)
        assert holds(engine, bad / "model.safetensors") and not holds(engine, good / "model.safetensors")
        wake(engine, target, good)
        assert live_fingerprint(engine) == fresh
        engine.rpc("tlt_set_drafting", True)
        engine.scheduler.tlt.control(drafting=True)
        assert accept_length(engine) == pytest.approx(healthy, abs=0.02)
        assert fingerprint(engine.runner.get_model().state_dict()) == policy


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True, scope="module")
def test_experts_that_a_kernel_has_reordered_are_refused(start, models, family):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    with start() as engine:
        before = live_fingerprint(engine)
        experts = next(m for m in engine.runner.drafter.model.modules() if hasattr(m, "w13_weight"))
        engine.patch.setattr(experts.quant_method, "unquantized_backend", UnquantizedMoeBackend.FLASHINFER_CUTLASS)
        answer = engine.rpc("tlt_load_drafter", str(models[part_of(family, "bad")] / "model.safetensors"))
        assert "rollout.engine_kwargs.vllm.moe_backend=triton" in answer, answer
        assert live_fingerprint(engine) == before


@pytest.fixture(scope="module", autouse=True)
def without_speculation(start, exact, family):
    """(tokens, how far off log-probabilities are) of an engine that drafts nothing; before all others share one."""
    with start(None) as engine:
        return decode(engine, exact[family])


def test_the_same_tokens_whatever_k_and_the_head_do(start, exact, without_speculation, models, family):
    stock, reference = without_speculation
    with start() as engine:
        sync(engine, models[part_of(family, "target")])
        first, _ = stays_the_same(engine, exact[family], reference, models[part_of(family, "bad")])
        assert first == stock or family.removeprefix("mtp-") in HYBRID, "which have another kernel in 16 bits"


def test_draws_have_the_policys_distribution(start, exact, models, family):
    name = f"{family}-small"
    with start(name=name, max_num_seqs=64) as engine:
        sync(engine, models[part_of(name, "target")])
        choose(engine, 0, 1, 3, 7)
        hot = HOTTER if "moe" in family else HOT
        chi, martingale = p_values(exact[name], draw(engine, hot, 400), hot)
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[0] > 400
        assert min(chi, martingale) > FAILS, (chi, martingale)
