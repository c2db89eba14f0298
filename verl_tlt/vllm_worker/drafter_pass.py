"""The drafter's pass in a vLLM worker: left out of steps that draft nothing (OFF), and contained where it fails.

A step without the pass leaves a hole in the drafter's KV cache. So switch only an engine without requests, and reset
its prefix cache before it drafts again. Such a step takes as long as in an engine without a drafter, except with CUDA
graphs of vLLM's V1 model runner, whose FULL graphs are for the longest draft alone. From vLLM 0.32 on the V2 model
runner serves (tests/contract/test_vllm_v2_runner.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)


class NoProposals:
    """The proposer of an engine that drafts n-grams alone: vLLM's `custom_class` proposer, which proposes nothing."""

    def __init__(self, vllm_config: VllmConfig) -> None: ...

    def load_model(self, target: torch.nn.Module) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_args: object, **_kwargs: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


def certain_drafts(proposer: SpecDecodeBaseProposer, batch: int, draft_length: int) -> torch.Tensor:
    """Drafts as `propose` returns them, int64 [batch, K], without a pass: token 0 everywhere; none at K=0.

    Without probabilities vLLM verifies a draft as one that was certain, which is exact for any token.
    """
    proposer._last_draft_probs = None  # else the sampler would pair old probabilities with these drafts
    proposer.num_speculative_tokens = draft_length
    return torch.zeros(batch, draft_length, dtype=torch.int64, device=proposer.device)


def _asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """(number of requests, K) that a call of V1's `propose` asks for."""
    draft_length = args[0] if args else kwargs["num_speculative_tokens"]
    return kwargs["common_attn_metadata"].batch_size(), draft_length


class ContainedPass:
    """A drafter's pass (V1's `propose`) whose first exception ends drafting in this worker, not the engine.

    No pass runs after it. Loading a drafter, and switching drafting on, fail with what it was, so the rollout server
    has the engine draft nothing from the next weight sync on. Until then `certain_drafts` are verified.
    """

    def __init__(self, proposer: SpecDecodeBaseProposer) -> None:
        self.failure = ""
        self._proposer = proposer
        self._propose = proposer.propose

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.failure:
            try:
                return self._propose(*args, **kwargs)
            except Exception as error:
                self.failure = f"the drafter's pass failed with {type(error).__name__}: {error}"
                logger.error("The drafter's pass failed; this engine drafts nothing any more.", exc_info=error)
        return certain_drafts(self._proposer, *_asked(args, kwargs))


# Changes vllm: patches/README.md#a-drafters-pass-that-fails-ends-no-engine
def contain(runner: GPUModelRunner | V2ModelRunner, vllm_config: VllmConfig) -> ContainedPass | None:
    """Contain the drafter's pass; None where an exception in it has to end the engine, as it does in stock vLLM.

    * On several ranks: the others wait in a collective operation of the pass, or would take the next one for it.
    * On the V2 model runner: its verification reads the drafts' logits from a buffer that the pass left unfinished.
    * In an engine of `verl-tlt evaluate`, which has vLLM's own scheduler: its figures would be of no drafter.
    """
    of_a_run = "tlt" in (vllm_config.additional_config or {})
    if hasattr(runner, "speculator") or vllm_config.parallel_config.world_size > 1 or not of_a_run:
        return None
    contained = ContainedPass(runner.drafter)
    runner.drafter.propose = contained
    return contained


# Changes vllm: patches/README.md#a-drafter-counts-positions-from-the-start-of-its-sequence
def count_positions(proposer: SpecDecodeBaseProposer, vllm_config: VllmConfig) -> None:
    """Give an EAGLE-3 head of a policy with M-RoPE each token's place in its sequence as position, as it is trained.

    vLLM's V1 runner gives it one of the policy's three positions, which is smaller behind an image. From that position
    it computes which slots of the KV cache the second and later drafts of a step are written to.
    """
    if proposer.uses_mrope or not vllm_config.model_config.uses_mrope:
        return
    set_inputs = proposer.set_inputs_first_pass

    def run(*, target_positions: torch.Tensor, cad: CommonAttentionMetadata, **inputs: Any) -> object:
        starts = cad.query_start_loc[:-1]
        lengths = cad.query_start_loc.diff()
        tokens = target_positions.shape[-1]
        requests = torch.repeat_interleave(lengths, output_size=tokens)  # number of each token's request
        computed_before = cad.seq_lens - lengths  # tokens of each request before this step
        places = torch.arange(tokens, device=requests.device) + (computed_before - starts)[requests]
        return set_inputs(target_positions=places.expand(3, -1), cad=cad, **inputs)  # vLLM takes the first of three

    proposer.set_inputs_first_pass = run


# Changes vllm: patches/README.md#no-drafter-pass-in-a-rollout-that-is-off
def set_drafting(runner: GPUModelRunner | V2ModelRunner, enabled: bool) -> None:
    """Run or skip the drafter's own pass in steps that draft nothing."""
    is_v2 = hasattr(runner, "speculator")
    proposer = runner.speculator if is_v2 else runner.drafter
    if isinstance(proposer, NoProposals):
        return
    if not hasattr(proposer, "tlt_drafting"):
        (_make_v2_skippable if is_v2 else _make_v1_skippable)(runner, proposer)
    proposer.tlt_drafting = enabled


def _make_v1_skippable(runner: GPUModelRunner, proposer: SpecDecodeBaseProposer) -> None:
    """Skip `propose` at K=0 while `proposer.tlt_drafting` is False, and what the runner prepares for it.

    With async scheduling the next step takes its tokens from the preparation, so that stays.
    """
    propose = proposer.propose
    prepare_and_propose = runner.propose_draft_token_ids

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        batch, draft_length = _asked(args, kwargs)
        if proposer.tlt_drafting or draft_length > 0:
            return propose(*args, **kwargs)
        return certain_drafts(proposer, batch, 0)

    def prepare_and_run(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> torch.Tensor:
        if proposer.tlt_drafting or scheduler_output.num_spec_tokens_to_schedule > 0:
            return prepare_and_propose(scheduler_output, *args, **kwargs)
        runner._draft_probs = runner._draft_prob_req_ids = None
        return certain_drafts(proposer, len(runner.input_batch.req_ids), 0)

    proposer.propose = run
    if not runner.use_async_scheduling:
        runner.propose_draft_token_ids = prepare_and_run


def _make_v2_skippable(runner: V2ModelRunner, speculator: EagleSpeculator) -> None:
    """Skip `propose` at K=0 while `speculator.tlt_drafting` is False, except in dummy runs (profiling, warm-up).

    Before 0.32 this runner drafts K_max whatever is asked, so K is read from the scheduler's output. The rows that are
    not drafted, int64 [num_reqs, K_max], are zeros, which nothing verifies.
    """
    execute = runner.execute_model
    propose = speculator.propose
    draft_length = 0  # of the step that is executed

    def execute_model(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
        nonlocal draft_length
        draft_length = scheduler_output.num_spec_tokens_to_schedule
        return execute(scheduler_output, *args, **kwargs)

    def run(input_batch: InputBatch, *args: object, **kwargs: object) -> torch.Tensor:
        if speculator.tlt_drafting or draft_length > 0 or kwargs.get("dummy_run"):
            return propose(input_batch, *args, **kwargs)
        with torch.inference_mode():  # as `propose`
            return speculator.draft_tokens[: input_batch.num_reqs].zero_()

    runner.execute_model = execute_model
    speculator.propose = run
