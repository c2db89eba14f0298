"""Responses drawn from a vLLM engine, all in flight together, with whatever a `Sampling` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lossless.exact import AFTER_THE_END, Sampling
from benchmarks.lossless.tiny_policy import SMALL, spell

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput


def parameters(sampling: Sampling, tokens: int, **more: Any) -> SamplingParams:
    """vLLM's, for responses of `tokens` if nothing stops them; `stop` and `turns` are spelled as by the tiny policy."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = asdict(sampling)
    forbidden = [list(word) for word in asked.pop("bad_words")]
    stop, turns = ([_spelled(words) for words in asked.pop(name)] for name in ("stop", "turns"))
    if turns:
        regex = "".join(f"[{turns[i % len(turns)]}]" for i in range(tokens))
        asked["structured_outputs"] = StructuredOutputsParams(regex=regex)
    asked |= {"max_tokens": tokens, "ignore_eos": True, "stop": stop, "stop_token_ids": list(sampling.stop_token_ids)}
    asked |= more
    made = SamplingParams(**asked, detokenize=bool(asked["stop"]))
    made._bad_words_token_ids = forbidden  # what vLLM makes of `bad_words`, which need a tokenizer
    return made


def _spelled(tokens: Sequence[int]) -> str:
    return "".join(spell(token, SMALL) for token in tokens)


def draw(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[CompletionOutput]]:
    """Completions of each prompt; every element of `params` is asked of each."""
    requests = [{"prompt_token_ids": list(prompt)} for _ in params for prompt in prompts]
    asked = [one for one in params for _ in prompts]
    outputs = llm.generate(requests, asked, use_tqdm=False)
    return [[one for output in outputs[i :: len(prompts)] for one in output.outputs] for i in range(len(prompts))]


def filled(responses: Sequence[Sequence[int]], tokens: int) -> np.ndarray:
    """[n, tokens] of responses that may have ended before."""
    rows = np.full((len(responses), tokens), AFTER_THE_END)
    for row, response in zip(rows, responses, strict=True):
        row[: len(response)] = response
    return rows
