"""What graphs each draft length has on vLLM's V2 model runner, on each release's own code and without a GPU."""

import ast
from itertools import groupby
from types import SimpleNamespace

from releases import releases
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import cudagraph_utils

from verl_tlt.drafter.policy import COMPUTED_ROPE
from verl_tlt.speculation.graph_rules import GRAPH_LENGTHS, V2_DRAFTS_FROM, draft_length_table

SEQUENCES, LONGEST = 64, GRAPH_LENGTHS[-1]
v2_release = releases(V2_DRAFTS_FROM)


def captured(release, table):
    """What the manager of a runner with `K_max = LONGEST` would capture, in a release's own code."""
    later = {"groupby": groupby, "build_dynamic_sd_schedule_lookup": build_dynamic_sd_schedule_lookup}
    _, init_candidates = release.run(
        "vllm/v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor", "_init_candidates",
        around=vars(cudagraph_utils) | later,
    )  # fmt: skip
    speculative = SimpleNamespace(
        num_speculative_tokens_per_batch_size=table, uses_dynamic_speculative_decoding=lambda: table is not None
    )
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    manager = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, decode_query_len=1 + LONGEST, max_num_reqs=SEQUENCES,
        varlen_decode=False, lora_capture_cases=[0], _maybe_ubatch_twin=lambda _: None, _candidates={},
        _capture_descs={}, vllm_config=SimpleNamespace(
            speculative_config=speculative, num_speculative_tokens=LONGEST,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
    )  # fmt: skip
    init_candidates(manager)
    manager.graphs = {desc: None for descs in manager._capture_descs.values() for desc in descs}
    return manager


def full_lengths(manager):
    """The draft lengths whose decode steps have FULL graphs."""
    return {graph.uniform_token_count - 1 for graph in manager.graphs if graph.cg_mode.name == "FULL"}


def test_every_arm_has_a_verify_graph_at_every_batch_with_the_table(v2_release):
    manager = captured(v2_release, draft_length_table(GRAPH_LENGTHS, SEQUENCES))
    assert full_lengths(manager) == set(GRAPH_LENGTHS)
    for batch in range(1, SEQUENCES + 1):
        for k in GRAPH_LENGTHS:
            candidates = manager._candidates[batch * (1 + k), 0]
            assert any(c.uniform_token_count == 1 + k and c.num_reqs >= batch for c in candidates), (batch, k)


def test_without_the_table_the_longest_alone_has_one(v2_release):
    assert full_lengths(captured(v2_release, None)) == {LONGEST}


def test_draft_graphs_are_those_of_the_table_too(v2_release):
    """Without one, 1 < K < K_max replays the graph that drafts K_max."""
    text = v2_release.text("vllm/v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py")
    assert "for k in sorted(set(dense_schedule) - {0, 1}, reverse=True)" in text
    assert "speculative_config.num_speculative_tokens_per_batch_size" in text


def test_no_drafter_that_the_doctor_takes_shortens_the_policys_context(v2_release):
    """From 0.33 on V2 cuts `max_model_len` to that of a drafter whose RoPE table it does not make longer."""
    limits = "def _limit_max_model_len_to_draft" in v2_release.text("vllm/config/vllm.py")
    tree = v2_release.tree("vllm/config/speculative.py")
    kept = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_CACHE_ONLY_ROPE_TYPES"]
    assert bool(kept) == limits
    for assignment in kept:  # of other types the doctor takes none that is shorter (`drafter.check.read_config`)
        assert set(COMPUTED_ROPE) <= eval(ast.unparse(assignment.value))
