"""OFF on vLLM's V2 model runner: a step that drafts nothing does without the drafter's own pass.

What is relied on is the same in vLLM 0.24 to 0.32 (tests/contract/test_vllm_v2_runner.py). `sample_tokens` calls
`speculator.propose` once, with the batch first, and copies the rows that come back into the requests' draft tokens,
where the next step finds as many as the scheduler asks it to verify; OFF asks for none. Rows are views of the
speculator's own buffer, int64 [num_reqs, K_max]. Whatever else the speculator keeps is written anew in each pass. Dummy
runs (profiling, warm-up) say `dummy_run=True`; graphs are captured without `propose`.

Releases differ in the length that is drafted: K_max whatever is asked before 0.32, then what the scheduler asks for. At
length 0 that one, too, runs the drafter over the step's tokens to keep its KV cache complete. So the length is read
where all releases have it, in the step that the scheduler sends. A runner that was changed is left alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

RUNNER_SAYS = {
    "execute_model": ("scheduler_output: SchedulerOutput",),
    "sample_tokens": (
        "draft_tokens = self.speculator.propose(",
        "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens",
    ),
    "_dummy_run": ("self.speculator.propose(", "dummy_run=True"),
}
"""What methods of the model runner must say."""
PROPOSE_SAYS = ("dummy_run: bool = False", "num_reqs = input_batch.num_reqs", "return self.draft_tokens[:num_reqs]")
"""What the speculator's `propose` must say."""


def set_drafting(runner: Any, enabled: bool) -> str | None:
    """Whether the drafter's own pass runs in steps that draft nothing (`TLTWorkerExtension.tlt_set_drafting`).

    Args:
        runner: vLLM's V2 model runner; its `speculator` is None on a pipeline stage without the drafter.
        enabled: as said. A step that drafts has its pass in any case.

    Returns:
        Why no pass can be skipped here; None: done.
    """
    speculator = runner.speculator
    if speculator is None:
        return None
    if not hasattr(speculator, "tlt_drafting"):
        if enabled:
            return None
        if reason := unknown(type(runner), type(speculator)):
            return f"{reason}, so the drafter's pass is not skipped; set VLLM_USE_V2_MODEL_RUNNER=0."
        _make_skippable(runner, speculator)
    speculator.tlt_drafting = enabled
    return None


def unknown(runner: type, speculator: type) -> str | None:
    """Why `_make_skippable` would not know what it does with these two classes; None: it does."""
    parts = [(runner, name, said) for name, said in RUNNER_SAYS.items()] + [(speculator, "propose", PROPOSE_SAYS)]
    for owner, name, said in parts:
        try:
            text = inspect.getsource(getattr(owner, name))
        except (AttributeError, OSError, TypeError) as error:
            return f"vLLM's V2 model runner is another one ({error})"
        if any(words not in text for words in said):
            return f"{owner.__name__}.{name} of vLLM's V2 model runner is not the one of 0.24 to 0.32"
    return None


def _make_skippable(runner: Any, speculator: Any) -> None:
    """Wrap the speculator's `propose`; nothing is done in it at K=0 while `speculator.tlt_drafting` is False.

    A step that drafts must not be skipped, whatever the switch says: the rejection sampler would pair zeros with the
    probabilities of drafts of long ago.
    """
    execute, propose, draft_length = runner.execute_model, speculator.propose, 0

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal draft_length
        draft_length = scheduler_output.num_spec_tokens_to_schedule
        return execute(scheduler_output, *args, **kwargs)

    def run(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if speculator.tlt_drafting or draft_length > 0 or kwargs.get("dummy_run"):
            return propose(input_batch, *args, **kwargs)
        with torch.inference_mode():  # as `propose`
            return speculator.draft_tokens[: input_batch.num_reqs].zero_()

    runner.execute_model, speculator.propose = execute_model, run
