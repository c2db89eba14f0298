"""What graphs each draft length has, on vLLM's own code and without a GPU.

Of each release the parts that `vllm_worker.cuda_graphs` relies on are taken out of its source text and run. V1: the
dispatcher, how a batch is looked up in it, the capture of a graph, and the beginning of the dummy run that a capture
consists of. V2, in releases whose V2 runner verl-tlt leaves on: which graphs it would capture.
"""

import __future__

import ast
import logging
import textwrap
from contextlib import nullcontext
from itertools import groupby
from types import SimpleNamespace

import pytest
from releases import Release, releases
from vllm.config import CUDAGraphMode
from vllm.v1 import cudagraph_dispatcher
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import cudagraph_utils

from verl_tlt.drafter.policy import COMPUTED_ROPE
from verl_tlt.speculation.graph_rules import FULL_GRAPHS, GRAPH_LENGTHS, V2_DRAFTS_FROM, draft_length_table
from verl_tlt.vllm_worker.cuda_graphs import (
    KNOWN,
    SAYS,
    capture_every_length,
    captured_lengths,
    digest,
    prepare_capture,
)

SEQUENCES, LONGEST = 64, GRAPH_LENGTHS[-1]
RUNNER, DISPATCHER = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/cudagraph_dispatcher.py"
release, v2_release = releases(), releases(V2_DRAFTS_FROM)


def capture_sizes(max_num_seqs, longest, largest=512):
    """Token counts that vLLM captures by default with K_max = `longest` (`VllmConfig._set_cudagraph_sizes`)."""
    width = 1 + longest
    most = min(max_num_seqs * width * 2, largest)
    sizes = [1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)]
    rounded = {-(-size // width) * width for size in sizes if size <= most}
    return sorted(size for size in rounded if size <= most) or [width]


def graph_for(batch, draft_length, longest, sizes, max_num_seqs, full=()):
    """(mode, tokens computed with padding) of a pure decode step under `cudagraph_mode=FULL_AND_PIECEWISE`; `full`:
    further draft lengths with FULL graphs (`capture_every_length`)."""
    width = 1 + draft_length
    tokens = batch * width
    padded = next((size for size in sizes if size >= tokens), 0)
    if not padded:
        return "eager", tokens
    has_full = draft_length == longest or draft_length in full
    return ("FULL" if has_full and padded <= width * max_num_seqs else "PIECEWISE"), padded


# ---------------------------------------------------------------------- a runner of vLLM's own text

NO_DEVICE = SimpleNamespace(
    accelerator=SimpleNamespace(synchronize=lambda: None),
    profiler=SimpleNamespace(record_function=lambda name: nullcontext()),
)
"""As much of torch as a capture asks for before it begins."""


def texts(release):
    """{name: source} of what the shim wraps and relies on."""
    files = {name: DISPATCHER if name == "CudagraphDispatcher" else RUNNER for name in (*KNOWN, *SAYS)}
    return {name: release.source(file, name) for name, file in files.items()}


def compiled(source, cut_at=None, then=""):
    """A function of vLLM's text, in the installed modules' namespace; with `cut_at`, its body up to that statement."""
    (node,) = ast.parse(textwrap.dedent(source)).body
    node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) == "staticmethod"]
    if cut_at:
        last = next(i for i, s in enumerate(node.body) if ast.unparse(s).startswith(cut_at))
        node.body = [*node.body[: last + 1], *ast.parse(then).body]
    module = ast.fix_missing_locations(ast.Module([node], []))
    names = {**vars(cudagraph_dispatcher), **vars(gpu_model_runner), "torch": NO_DEVICE}
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<vllm>", "exec", flags=flags, dont_inherit=True), names)
    return names[node.name]


def runner_class(release):
    text, names = texts(release), {**vars(cudagraph_dispatcher)}
    exec(text.pop("CudagraphDispatcher"), names)
    # Up to the point where the capture would begin: by then it must have found the graph it is to make.
    captures = "self.captured.append((cudagraph_runtime_mode.name, batch_desc))"
    dummy = compiled(text.pop("_dummy_run"), "if cudagraph_runtime_mode is None", captures)
    methods = {name: compiled(source) for name, source in text.items()}
    return type("Runner", (Made,), {"dispatcher": names["CudagraphDispatcher"], "_dummy_run": dummy, **methods})


class Made:
    """What those methods look at, of a runner that decodes `SEQUENCES` requests at most."""

    def __init__(self, longest):
        self.sizes, self.captured = capture_sizes(SEQUENCES, longest), []
        scheduler = SimpleNamespace(max_num_seqs=SEQUENCES)
        self.compilation_config = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, is_attention_compiled_piecewise=lambda: True,
            max_cudagraph_capture_size=self.sizes[-1], cudagraph_capture_sizes=self.sizes, compile_sizes=None, mode=3,
            splitting_ops=[], pass_config=SimpleNamespace(enable_sp=False), cudagraph_num_of_warmups=1,
        )  # fmt: skip
        self.parallel_config = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1)
        self.model_config = SimpleNamespace(
            is_encoder_decoder=False, multimodal_config=None, is_hybrid=False, use_mla=False, has_inner_state=False,
            enforce_eager=False,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            compilation_config=self.compilation_config, num_speculative_tokens=longest, lora_config=None,
            scheduler_config=scheduler, parallel_config=self.parallel_config, model_config=self.model_config,
            observability_config=SimpleNamespace(cudagraph_metrics=False),
        )  # fmt: skip
        self.scheduler_config, self.max_num_tokens = scheduler, 8192
        self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        self.cudagraph_dispatcher = self.dispatcher(self.vllm_config)
        self.uniform_decode_query_len = 1 + longest

    def _pad_for_sequence_parallelism(self, tokens):
        return tokens

    def start(self, resolved):
        """Keys, then graphs, in vLLM's order; `resolved`: the mode that its attention backend can capture."""
        self.cudagraph_dispatcher.initialize_cudagraph_keys(resolved, self.uniform_decode_query_len)
        for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
            for desc in descs:
                self.captured.clear()
                self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
                # The warm-up runs without a graph; then the very one that was to be captured is found.
                assert [name for name, _ in self.captured] == ["NONE", mode.name]
                found = self.captured[-1][1]
                assert all(getattr(found, f) == getattr(desc, f) for f in ("num_tokens", "num_reqs", "uniform"))

    def step(self, batch, draft_length, width=None, tokens=None):
        """(mode, padded tokens) of a decode step, looked up as `execute_model` does."""
        width = width or 1 + draft_length
        mode, desc, *_ = self._determine_batch_execution_and_padding(
            num_tokens=tokens or batch * width, num_reqs=batch, num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=width, use_cascade_attn=False, num_encoder_reqs=0,
        )  # fmt: skip
        return "eager" if mode == CUDAGraphMode.NONE else mode.name, desc.num_tokens


@pytest.fixture(scope="module")
def runner_of(release):
    cls = runner_class(release)

    def make(longest, arms=(), mode=CUDAGraphMode.FULL_AND_PIECEWISE):
        runner = cls(longest)
        if arms:
            capture_every_length(runner, arms)
        runner.start(mode)
        runner.sizes = runner.compilation_config.cudagraph_capture_sizes
        return runner

    return make


def arms_of(longest):
    return [k for k in GRAPH_LENGTHS if k <= longest]


# ---------------------------------------------------------------------- the rules


@pytest.mark.parametrize("longest", [1, 3, 7])
@pytest.mark.parametrize("every_length", [False, True])
def test_each_step_runs_on_the_graph_that_the_rules_say(runner_of, longest, every_length):
    full = arms_of(longest) if every_length else ()
    runner = runner_of(longest, full)
    for batch in range(1, SEQUENCES + 1):
        for k in range(longest + 1):
            assert runner.step(batch, k) == graph_for(batch, k, longest, runner.sizes, SEQUENCES, full), (batch, k)


@pytest.mark.parametrize("longest", [3, 7])
def test_with_the_shim_every_arm_has_a_full_graph_at_every_batch(runner_of, longest):
    runner, stock = runner_of(longest, arms_of(longest)), runner_of(longest)
    within = [(b, k) for b in range(1, SEQUENCES + 1) for k in arms_of(longest) if b * (1 + k) <= runner.sizes[-1]]
    assert len(within) >= 3 * SEQUENCES
    assert {runner.step(b, k)[0] for b, k in within} == {"FULL"}
    # Not more than one more set of each kind, and the few small sizes.
    graphs, without = (sum(len(d) for _, d in r.cudagraph_dispatcher.get_capture_descs()) for r in (runner, stock))
    assert without < graphs <= without + len(arms_of(longest)) * len(runner.sizes)


@pytest.mark.parametrize("longest", [3, 7])
def test_a_step_without_a_draft_runs_on_the_graph_that_stock_would_take(runner_of, longest):
    """OFF and K=0 at every batch, against the same release's runner without any drafter."""
    ours, stock = runner_of(longest, arms_of(longest)), runner_of(0)
    for batch in range(1, SEQUENCES + 1):
        assert ours.step(batch, 0) == stock.step(batch, 0) and ours.step(batch, 0)[0] == "FULL", batch
    assert runner_of(longest).step(1, 0) == ("PIECEWISE", 1 + longest), "what the shim is for"


@pytest.mark.parametrize(
    ("mode", "given", "captured"),
    [
        ("FULL_AND_PIECEWISE", (0, 1, 3), (0, 1, 3)),
        ("FULL_AND_PIECEWISE", (), (3,)),
        ("FULL_DECODE_ONLY", (0, 1, 3), (0, 1, 3)),
        ("FULL", (0, 1, 3), (0, 1, 3)),  # one set for any mix of lengths
        ("PIECEWISE", (0, 1, 3), ()),  # such as FlashInfer's without TensorRT-LLM, whatever was asked for
        ("NONE", (0, 1, 3), None),
    ],
)
def test_arms_are_reported_by_what_was_captured(runner_of, mode, given, captured):
    assert captured_lengths(runner_of(3, given, CUDAGraphMode[mode]), (0, 1, 3)) == captured


def test_a_mixed_batch_is_not_taken_for_a_decode_step(runner_of):
    runner = runner_of(3, (0, 1, 3))
    assert runner.step(8, 1, tokens=9)[0] == "PIECEWISE"
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == 4


def test_other_graph_modes_are_left_alone(runner_of):
    runner, stock = runner_of(3, (0, 1, 3)), runner_of(3)
    for one in (runner, stock):
        one.compilation_config.cudagraph_capture_sizes = [4, 8]
        one.cudagraph_dispatcher.cudagraph_keys = {CUDAGraphMode.PIECEWISE: set(), CUDAGraphMode.FULL: set()}
        one.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE, 4)
    assert runner.cudagraph_dispatcher.cudagraph_keys == stock.cudagraph_dispatcher.cudagraph_keys


def test_widths_that_do_not_divide_each_other_share_no_small_size(runner_of):
    """Ten tokens a request: five and two do not divide each other, and a padded batch must be whole requests."""
    runner = runner_of(9, (0, 1, 4, 9))
    for batch in range(1, 9):
        for k in (0, 1, 4, 9):
            mode, tokens = runner.step(batch, k)
            assert mode == "FULL" and tokens % (1 + k) == 0


# ---------------------------------------------------------------------- which runner is known


def test_the_shim_knows_the_runner_of_each_release(release):
    text = texts(release)
    assert {name: digest(text[name]) for name, known in KNOWN.items() if digest(text[name]) not in known} == {}
    for name, said in SAYS.items():
        assert all(words in text[name] for words in said), name
    # By keyword, as the shim reads them.
    source = release.text(RUNNER)
    assert "self.uniform_decode_query_len = 1 + self.num_spec_tokens" in source
    calls = source.split("self._determine_batch_execution_and_padding(")[1:]
    assert len(calls) == 2 and all(call.lstrip().startswith("num_tokens=") for call in calls)


def test_a_docstring_changes_no_digest_and_anything_else_does():
    text = Release(None).source(RUNNER, "_is_uniform_decode")
    assert digest(text.replace("Checks if", "Whether")) == digest(text)
    assert digest(text.replace("num_tokens ==", "num_tokens >=")) != digest(text)


@pytest.fixture
def installed_runner():
    """vLLM's own class, without a device behind it, and the configuration it would have."""
    made = runner_class(Release(None))(3)
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    runner.cudagraph_dispatcher = cudagraph_dispatcher.CudagraphDispatcher(made.vllm_config)
    runner.uniform_decode_query_len = 4
    return runner, made.vllm_config


ARMS = [0, 1, 3]


@pytest.mark.parametrize("somebody", [None, "says no", "computes eagerly"])
def test_every_arm_is_captured_unless_somebody_says_no(installed_runner, monkeypatch, somebody):
    runner, config = installed_runner
    if somebody == "says no":
        monkeypatch.setenv(FULL_GRAPHS, "0")
    config.model_config.enforce_eager = somebody == "computes eagerly"
    prepare_capture(runner, config, ARMS)
    assert ("_warmup_and_capture" in vars(runner)) == (somebody is None)
    assert captured_lengths(runner, ARMS) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("another", "vLLM's _determine_batch_execution_and_padding is not the one of 0.24 to 0.33"),
        ("hybrid", "the policy is not made of plain attention alone"),
        ("no dispatcher", "vLLM's model runner is another one"),
    ],
)
def test_an_unknown_runner_is_left_alone_with_one_line_in_the_log(installed_runner, caplog, monkeypatch, change, why):
    monkeypatch.setattr(logging.getLogger("verl_tlt"), "propagate", True)  # a trainer's set-up turns it off
    caplog.set_level(logging.INFO, logger="verl_tlt")  # libraries change the levels of the root's handlers
    runner, config = installed_runner
    config.model_config.is_hybrid = change == "hybrid"
    like = gpu_model_runner.GPUModelRunner
    if change == "another":
        runner.__class__ = type("Changed", (like,), {"_determine_batch_execution_and_padding": like._is_uniform_decode})
    if change == "no dispatcher":
        runner = SimpleNamespace()
    prepare_capture(runner, config, ARMS)
    (line,) = caplog.messages
    assert line.startswith("Only drafts of 3 tokens have FULL CUDA graphs") and why in line
    assert "_warmup_and_capture" not in vars(runner)


# ---------------------------------------------------------------------- V2


def captured(release, table):
    """What the manager of a runner with `K_max = LONGEST` would capture, as `captured_lengths` looks at it."""
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


def test_every_arm_has_a_verify_graph_at_every_batch_with_the_table(v2_release):
    manager = captured(v2_release, draft_length_table(GRAPH_LENGTHS, SEQUENCES))
    runner = SimpleNamespace(speculator=None, cudagraph_manager=manager)
    assert captured_lengths(runner, GRAPH_LENGTHS) == GRAPH_LENGTHS
    for batch in range(1, SEQUENCES + 1):
        for k in GRAPH_LENGTHS:
            candidates = manager._candidates[batch * (1 + k), 0]
            assert any(c.uniform_token_count == 1 + k and c.num_reqs >= batch for c in candidates), (batch, k)


def test_without_the_table_the_longest_alone_has_one(v2_release):
    runner = SimpleNamespace(speculator=None, cudagraph_manager=captured(v2_release, None))
    assert captured_lengths(runner, GRAPH_LENGTHS) == (LONGEST,)


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
