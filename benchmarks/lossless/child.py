"""The process of one engine: it draws what every setting asks for, and ends, so that the judge has the device."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.lossless.drawing import draw, parameters
from benchmarks.lossless.exact import Sampling
from verl_tlt.commands.child_engine import serve_job
from verl_tlt.speculation.types import Policy

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput


ANY_LENGTH = "benchmarks.lossless.child:AnyLength"


class AnyLength(Policy):
    """Chooses any draft length in any step, which stresses the engine more than a good choice would."""

    def __init__(self, lengths: Sequence[int], largest_batch: int) -> None:
        self._arms, self._random = lengths, random.Random(largest_batch)

    def choose(self, batch: int) -> int:
        return self._random.choice(self._arms)


def engine_arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments: the user's, with an EAGLE-3 drafter, and for `tlt` with what a rollout server adds."""
    from verl_tlt.config import TLTConfig
    from verl_tlt.drafter.policy import read_model_config
    from verl_tlt.server.engine_arguments import engine_kwargs, speculative_config
    from verl_tlt.speculation.graph_rules import is_hybrid

    arguments, drafter, length = dict(asked["arguments"]), asked["drafter"], asked["draft_length"]
    if drafter is None:
        return arguments
    if not asked["tlt"]:
        return {"speculative_config": speculative_config(drafter, length), **arguments}
    tlt = TLTConfig.from_dict({"speculation": {"max_draft_length": length, "policy": ANY_LENGTH}})
    eager = bool(arguments.get("enforce_eager"))
    hybrid = is_hybrid(read_model_config(arguments["model"]))
    ours = engine_kwargs(tlt, drafter, SimpleNamespace(enforce_eager=eager), arguments, hybrid=hybrid)
    return {**arguments, **ours, "worker_extension_cls": "verl_tlt.vllm_worker.extension.TLTWorkerExtension"}


def verified(llm: LLM) -> tuple[float, float]:
    """Drafts verified, and draft tokens accepted, since the engine began."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts, accepted = (found.get(f"vllm:spec_decode_num_{what}") for what in ("drafts", "accepted_tokens"))
    return (float(drafts.value), float(accepted.value)) if drafts and accepted else (0.0, 0.0)


def often(written: Sequence[Sequence[int]], tokenizer: Any) -> str:
    """The text of the token that most responses have beyond their first two."""
    counts: dict[str, int] = {}
    for one in written:
        for text in {tokenizer.decode([token], skip_special_tokens=True) for token in one[2:]}:
            counts[text] = counts.get(text, 0) + 1
    return max((text for text in counts if text.strip()), key=lambda text: counts[text])


def responses(llm: LLM, asked: Mapping[str, Any]) -> dict[str, Any]:
    """By setting: tokens and log-probabilities of its responses, its stop strings, draft tokens accepted per draft."""
    found = {}
    for name, setting in asked["settings"].items():
        sampling = Sampling(**setting)
        stops: list[str] = []
        if name in asked["stops"]:
            plain = draw(llm, asked["prompts"], [parameters(sampling, asked["tokens"])] * 20)
            written = [one.token_ids for completions in plain for one in completions]
            stops = asked["stops"][name] or [often(written, llm.get_tokenizer())]
        params = parameters(sampling, asked["tokens"], logprobs=0, **({"stop": stops} if stops else {}))
        before = verified(llm)
        drawn = draw(llm, asked["prompts"], [params] * asked["draws"])
        drafts, accepted = (now - then for now, then in zip(verified(llm), before, strict=True))
        found[name] = {
            "stops": stops,
            "accepted": accepted / drafts if drafts else 0.0,
            "responses": [[_said(one) for one in completions] for completions in drawn],
        }
    return found


def _said(one: CompletionOutput) -> dict[str, Any]:
    pairs = zip(one.logprobs or (), one.token_ids, strict=True)
    return {"tokens": list(one.token_ids), "logprobs": [row[token].logprob for row, token in pairs]}


def work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.v1.engine.output_processor import OutputProcessor

    from verl_tlt.server.engine_arguments import engine_environment
    from verl_tlt.server.stop_strings import end_at_stop_strings

    if asked["tlt"]:
        os.environ.update(engine_environment())
        end_at_stop_strings(OutputProcessor)
    return responses(LLM(**engine_arguments(asked)), asked)


if __name__ == "__main__":
    serve_job(work)
