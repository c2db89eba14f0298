"""What `verl_tlt.speculation.graph_rules` relies on, as arithmetic, against vLLM's own dispatcher: plain Python."""

import hashlib
import inspect
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1 import cudagraph_dispatcher
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from verl_tlt.compat.versions import installed, release
from verl_tlt.speculation.graph_rules import PLANS
from verl_tlt.vllm_worker.cuda_graphs import capture_every_arm

DISPATCHER = "51f632753af729aeee6ce4a802d9d74b64f22eef02a524f36e2a24b07ef0cf63"
"""SHA-256 of vllm/v1/cudagraph_dispatcher.py in the releases below: one rule for all of them."""
SAME_DISPATCHER = ((0, 24), (0, 26), (0, 28))
SEQUENCES = 64


def capture_sizes(max_num_seqs, longest, largest=512):
    """Token counts that vLLM captures by default with K_max = `longest`.

    Args:
        max_num_seqs: requests in a batch at most.
        longest: K_max.
        largest: vLLM's own limit (`VllmConfig._set_cudagraph_sizes`; also bounded by `max_num_batched_tokens`).
    """
    width = 1 + longest
    most = min(max_num_seqs * width * 2, largest)
    sizes = [1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)]
    rounded = {-(-size // width) * width for size in sizes if size <= most}
    return sorted(size for size in rounded if size <= most) or [width]


def graph_for(batch, draft_length, longest, sizes, max_num_seqs, full=()):
    """(mode, tokens computed with padding) of a pure decode step under `cudagraph_mode=FULL_AND_PIECEWISE`.

    Args:
        batch: requests, each with `1 + draft_length` tokens.
        draft_length: K that the step verifies.
        longest: K_max.
        sizes: captured token counts, ascending.
        max_num_seqs: requests in a batch at most.
        full: further draft lengths with FULL graphs (`capture_every_arm`).
    """
    width = 1 + draft_length
    tokens = batch * width
    padded = next((size for size in sizes if size >= tokens), 0)
    if not padded:
        return "eager", tokens
    has_full = draft_length == longest or draft_length in full
    return ("FULL" if has_full and padded <= width * max_num_seqs else "PIECEWISE"), padded


class Runner:
    """As much of a V1 model runner as the shim touches, with vLLM's own methods where they need no device."""

    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)

    def __init__(self, longest):
        sizes = capture_sizes(SEQUENCES, longest)
        compilation = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, is_attention_compiled_piecewise=lambda: True,
            max_cudagraph_capture_size=sizes[-1], cudagraph_capture_sizes=sizes, compile_sizes=None, mode=3,
            splitting_ops=[],
        )  # fmt: skip
        config = SimpleNamespace(
            compilation_config=compilation, num_speculative_tokens=longest, lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        )  # fmt: skip
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.uniform_decode_query_len = 1 + longest
        self.sizes, self.captured = sizes, []

    def _determine_batch_execution_and_padding(
        self, num_tokens, num_reqs, max_num_scheduled_tokens, force_uniform_decode=None
    ):
        uniform = self._is_uniform_decode(
            max_num_scheduled_tokens=max_num_scheduled_tokens, uniform_decode_query_len=self.uniform_decode_query_len,
            num_tokens=num_tokens, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode,
        )  # fmt: skip
        return self.cudagraph_dispatcher.dispatch(num_tokens, uniform)

    def _warmup_and_capture(self, desc, cudagraph_runtime_mode):
        """As `_dummy_run`: a batch of the present width, which must lead back to the graph that is captured."""
        width = self.uniform_decode_query_len if desc.uniform else desc.num_tokens
        mode, found = self._determine_batch_execution_and_padding(
            num_tokens=desc.num_tokens, num_reqs=-(-desc.num_tokens // width), max_num_scheduled_tokens=width,
            force_uniform_decode=desc.uniform,
        )  # fmt: skip
        assert (mode, found.num_tokens, found.num_reqs) == (cudagraph_runtime_mode, desc.num_tokens, desc.num_reqs)
        self.captured.append((mode.name, desc))

    def start(self):
        """Keys, then graphs, in vLLM's order."""
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            CUDAGraphMode.FULL_AND_PIECEWISE, self.uniform_decode_query_len
        )
        for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
            for desc in descs:
                self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)

    def step(self, batch, draft_length):
        """(mode, padded tokens) of a decode step."""
        width = 1 + draft_length
        mode, desc = self._determine_batch_execution_and_padding(
            num_tokens=batch * width, num_reqs=batch, max_num_scheduled_tokens=width
        )
        return "eager" if mode == CUDAGraphMode.NONE else mode.name, desc.num_tokens


def arms_of(longest):
    return [k for k in (0, 1, 3, 7) if k <= longest]


def test_arms_divide_every_captured_size():
    for plan in PLANS:
        for size in capture_sizes(256, plan.arms[-1]):
            assert all(size % (1 + k) == 0 for k in plan.arms)


def test_memory_is_not_multiplied_by_arms():
    # Rounding leaves fewer sizes than vLLM captures without a drafter.
    assert len(capture_sizes(256, 7)) <= len(capture_sizes(256, 3)) <= len(capture_sizes(256, 0))


def test_the_rules_were_read_off_this_dispatcher():
    assert {plan.first for plan in PLANS} >= set(SAME_DISPATCHER)
    if release(installed("vllm"))[:2] in SAME_DISPATCHER:
        assert hashlib.sha256(inspect.getsource(cudagraph_dispatcher).encode()).hexdigest() == DISPATCHER


@pytest.mark.parametrize("longest", [1, 3, 7])
@pytest.mark.parametrize("every_arm", [False, True])
def test_each_step_runs_on_the_graph_that_the_rules_say(longest, every_arm):
    runner = Runner(longest)
    if every_arm:
        capture_every_arm(runner, arms_of(longest))
    runner.start()
    full = arms_of(longest) if every_arm else ()
    for batch in range(1, SEQUENCES + 1):
        for k in range(longest + 1):
            assert runner.step(batch, k) == graph_for(batch, k, longest, runner.sizes, SEQUENCES, full), (batch, k)


@pytest.mark.parametrize("longest", [3, 7])
def test_with_the_shim_every_arm_has_a_full_graph_at_every_batch(longest):
    runner = Runner(longest)
    capture_every_arm(runner, arms_of(longest))
    runner.start()
    within = [(b, k) for b in range(1, SEQUENCES + 1) for k in arms_of(longest) if b * (1 + k) <= runner.sizes[-1]]
    assert len(within) >= 3 * SEQUENCES
    assert {runner.step(b, k)[0] for b, k in within} == {"FULL"}
    # Not more than one more set of each kind: sizes that the width's batch cannot fill are left out.
    stock = Runner(longest)
    stock.start()
    assert len(runner.captured) <= len(stock.captured) + len(arms_of(longest)) * len(runner.sizes)


def test_a_mixed_batch_is_not_taken_for_a_decode_step():
    runner = Runner(3)
    capture_every_arm(runner, (0, 1, 3))
    runner.start()
    mode, _ = runner._determine_batch_execution_and_padding(num_tokens=9, num_reqs=8, max_num_scheduled_tokens=2)
    assert mode == CUDAGraphMode.PIECEWISE
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == 4


def test_other_graph_modes_are_left_alone():
    runner, stock = Runner(3), Runner(3)
    capture_every_arm(runner, (0, 1, 3))
    for one in (runner, stock):
        one.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE, 4)
    assert runner.cudagraph_dispatcher.cudagraph_keys == stock.cudagraph_dispatcher.cudagraph_keys


def test_the_shim_knows_the_installed_runner():
    source = inspect.getsource(GPUModelRunner)
    assert "self.uniform_decode_query_len = 1 + self.num_spec_tokens" in source
    assert "max_query_len = self.uniform_decode_query_len if uniform_decode else num_tokens" in source
    calls = source.split("self._determine_batch_execution_and_padding(")[1:]
    assert all(call.lstrip().startswith("num_tokens=") for call in calls)  # by keyword, as the shim reads them
    with pytest.raises(RuntimeError, match="TLT_FULL_GRAPHS=1 does not know this vLLM: its runner has no cudagr"):
        capture_every_arm(SimpleNamespace(), (0, 1))
