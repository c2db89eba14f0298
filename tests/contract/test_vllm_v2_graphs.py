"""What vLLM's V2 model runner makes of its drafts' lengths and of the drafter's own: graphs, and the longest context.

The parts that decide are taken out of each release's text and run, for the releases whose V2 runner verl-tlt leaves on;
nothing here runs a graph.
"""

import ast
from itertools import groupby
from types import SimpleNamespace

import pytest
from releases import VLLM, sources
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import cudagraph_utils

from verl_tlt.drafter.policy import COMPUTED_ROPE
from verl_tlt.speculation.graph_rules import GRAPH_LENGTHS, V2_DRAFTS_FROM, draft_length_table
from verl_tlt.vllm_worker.cuda_graphs import captured_lengths

V2 = [version for version in VLLM if tuple(map(int, version.split(".")[:2])) >= V2_DRAFTS_FROM]
REQUESTS, LONGEST = 64, GRAPH_LENGTHS[-1]
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
UTILS = "vllm/v1/worker/gpu/cudagraph_utils.py"


def parts(root, path, *wanted):
    """The definitions of these names in a release's file, compiled in the installed module's namespace."""
    tree = ast.parse((root / path).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in wanted]
    later = {"groupby": groupby, "build_dynamic_sd_schedule_lookup": build_dynamic_sd_schedule_lookup}
    names = {**vars(cudagraph_utils), **later}
    exec(compile(ast.Module(found, []), path, "exec"), names)
    return names


def captured(root, table):
    """What the manager of a runner with `K_max = LONGEST` would capture, as `captured_lengths` looks at it."""
    names = parts(root, UTILS, "BatchExecutionDescriptor", "_init_candidates")
    speculative = SimpleNamespace(
        num_speculative_tokens_per_batch_size=table, uses_dynamic_speculative_decoding=lambda: table is not None
    )
    manager = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, decode_query_len=1 + LONGEST, max_num_reqs=REQUESTS,
        varlen_decode=False, lora_capture_cases=[0], _maybe_ubatch_twin=lambda _: None, _candidates={},
        _capture_descs={}, vllm_config=SimpleNamespace(
            speculative_config=speculative, num_speculative_tokens=LONGEST,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
    )  # fmt: skip
    names["_init_candidates"](manager)
    manager.graphs = {desc: None for descs in manager._capture_descs.values() for desc in descs}
    return manager


@pytest.fixture(params=V2, scope="module")
def root(request):
    return sources("vllm", request.param)


def test_every_arm_has_a_verify_graph_at_every_batch_with_the_table(root):
    manager = captured(root, draft_length_table(GRAPH_LENGTHS, REQUESTS))
    runner = SimpleNamespace(speculator=None, cudagraph_manager=manager)
    assert captured_lengths(runner, GRAPH_LENGTHS) == GRAPH_LENGTHS
    for batch in range(1, REQUESTS + 1):
        for k in GRAPH_LENGTHS:
            candidates = manager._candidates[batch * (1 + k), 0]
            assert any(c.uniform_token_count == 1 + k and c.num_reqs >= batch for c in candidates), (batch, k)


def test_without_the_table_the_longest_alone_has_one(root):
    runner = SimpleNamespace(speculator=None, cudagraph_manager=captured(root, None))
    assert captured_lengths(runner, GRAPH_LENGTHS) == (LONGEST,)


def test_draft_graphs_are_those_of_the_table_too(root):
    """Without one, 1 < K < K_max replays the graph that drafts K_max."""
    text = (root / "vllm/v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py").read_text()
    assert "for k in sorted(set(dense_schedule) - {0, 1}, reverse=True)" in text
    assert "speculative_config.num_speculative_tokens_per_batch_size" in text


def test_no_drafter_that_the_doctor_takes_shortens_the_policys_context(root):
    """From 0.33 on V2 cuts `max_model_len` to that of a drafter whose RoPE table it does not make longer."""
    limits = "def _limit_max_model_len_to_draft" in (root / "vllm/config/vllm.py").read_text()
    tree = ast.parse((root / "vllm/config/speculative.py").read_text())
    kept = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_CACHE_ONLY_ROPE_TYPES"]
    assert bool(kept) == limits
    for assignment in kept:  # of other types the doctor takes none that is shorter (`drafter.check.read_config`)
        assert set(COMPUTED_ROPE) <= eval(ast.unparse(assignment.value))
