"""OFF in a vLLM worker: a step that drafts nothing does without the drafter's own pass.

Such a step then costs what it costs in an engine that has no drafter, and the drafter's KV cache has a hole: so switch
only an engine without requests, and reset its prefix cache before it drafts again. vLLM has two model runners: V1, and
V2, which serves from vLLM 0.32 on (tests/contract/test_vllm_v2_runner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class NoProposals:
    """The proposer of an engine that drafts n-grams alone: vLLM's `custom_class` proposer, which proposes nothing."""

    def __init__(self, vllm_config: VllmConfig) -> None: ...

    def load_model(self, target: torch.nn.Module) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_args: object, **_kwargs: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


# Changes vllm: patches/README.md#no-drafter-pass-in-a-rollout-that-is-off
def set_drafting(runner: GPUModelRunner | V2ModelRunner, enabled: bool) -> None:
    """Run or skip the drafter's own pass in steps that draft nothing."""
    is_v2 = hasattr(runner, "speculator")
    proposer = runner.speculator if is_v2 else getattr(runner, "drafter", None)
    if proposer is None or isinstance(proposer, NoProposals):  # the former on a pipeline stage without the drafter
        return
    if not hasattr(proposer, "tlt_drafting"):
        (_make_v2_skippable if is_v2 else _make_v1_skippable)(runner, proposer)
    proposer.tlt_drafting = enabled


def _make_v1_skippable(runner: GPUModelRunner, proposer: SpecDecodeBaseProposer) -> None:
    """Skip `propose` at K=0 while `proposer.tlt_drafting` is False, and what the runner prepares for it.

    With async scheduling the next step takes its tokens from the preparation, so that stays.
    """
    propose, prepare_and_propose = proposer.propose, runner.propose_draft_token_ids

    def nothing_drafted(batch: int) -> torch.Tensor:
        """As `propose` at K=0: no drafts, int64 [batch, 0]."""
        proposer._last_draft_probs = None  # else the sampler would pair old probabilities with no drafts
        proposer.num_speculative_tokens = 0
        return torch.empty(batch, 0, dtype=torch.int64, device=proposer.device)

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        draft_length = args[0] if args else kwargs["num_speculative_tokens"]
        if proposer.tlt_drafting or draft_length > 0:
            return propose(*args, **kwargs)
        return nothing_drafted(kwargs["common_attn_metadata"].batch_size())

    def prepare_and_run(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> torch.Tensor:
        if proposer.tlt_drafting or scheduler_output.num_spec_tokens_to_schedule > 0:
            return prepare_and_propose(scheduler_output, *args, **kwargs)
        runner._draft_probs = runner._draft_prob_req_ids = None
        return nothing_drafted(len(runner.input_batch.req_ids))

    proposer.propose = run
    if not runner.use_async_scheduling:
        runner.propose_draft_token_ids = prepare_and_run


def _make_v2_skippable(runner: V2ModelRunner, speculator: EagleSpeculator) -> None:
    """Skip `propose` at K=0 while `speculator.tlt_drafting` is False, except in dummy runs (profiling, warm-up).

    Before 0.32 this runner drafts K_max whatever is asked, so K is read from the scheduler's output. The rows that are
    not drafted, int64 [num_reqs, K_max], are zeros, which nothing verifies.
    """
    execute, propose, draft_length = runner.execute_model, speculator.propose, 0

    def execute_model(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
        nonlocal draft_length
        draft_length = scheduler_output.num_spec_tokens_to_schedule
        return execute(scheduler_output, *args, **kwargs)

    def run(input_batch: InputBatch, *args: object, **kwargs: object) -> torch.Tensor:
        if speculator.tlt_drafting or draft_length > 0 or kwargs.get("dummy_run"):
            return propose(input_batch, *args, **kwargs)
        with torch.inference_mode():  # as `propose`
            return speculator.draft_tokens[: input_batch.num_reqs].zero_()

    runner.execute_model, speculator.propose = execute_model, run
