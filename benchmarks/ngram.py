"""What n-gram drafts cost and bring: the index by batch size, and a real engine on the toy task without any drafter.

    python -m verl_tlt.toy.assets ASSETS --width small
    python benchmarks/ngram.py ASSETS/policy-small ASSETS/train.parquet

The first table is the time the index adds to one engine step on the scheduler's thread, for made responses of which a
given share is said by a sibling too. The second decodes groups of 8 responses per prompt at temperature 1, as GRPO
does, with stock vLLM and with `tlt.speculation.source=ngram`, twice each so that the second visit has the first to
quote. On a CPU vLLM schedules synchronously anyway: what giving up async scheduling costs on a GPU is not in here.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_tlt.rollout.ngram import NgramIndex

BATCHES, GROUP, STEPS = (1, 16, 64, 256), 8, 400


def index_cost(batch: int, shared: float, draft_length: int = 3) -> list[float]:
    """Seconds that each of STEPS engine steps of `batch` requests spends in the index."""
    rng = random.Random(0)
    index = NgramIndex(max_bytes=1 << 30)
    spoken = [[rng.randrange(30_000) for _ in range(STEPS)] for _ in range(-(-batch // GROUP))]
    names = [f"request-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        index.begin(name, [i // GROUP] * 32)
    seconds = []
    for step in range(STEPS):
        tokens = [[spoken[i // GROUP][step] if rng.random() < shared else rng.randrange(30_000)] for i in range(batch)]
        start = time.perf_counter()
        for name, new in zip(names, tokens, strict=True):
            index.extend(name, new)
        for name in names:
            index.propose(name, draft_length)
        seconds.append(time.perf_counter() - start)
    return seconds


def prompts_of(path: Path, count: int, policy: Path) -> list[dict[str, list[int]]]:
    """The first `count` prompts of a verl data file, as token ids."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = pandas.read_parquet(path)["prompt"][:count]
    made = [tokenizer.apply_chat_template(list(row), add_generation_prompt=True, return_dict=False) for row in rows]
    return [{"prompt_token_ids": list(ids)} for ids in made]


def decode(policy: Path, prompts: list[dict[str, list[int]]], source: str | None, draft_length: int) -> None:
    """Decode every prompt GROUP times, two visits, and print tokens per second and per request-step."""
    from vllm import LLM, SamplingParams

    from verl_tlt.config import TLTConfig
    from verl_tlt.rollout.settings import engine_kwargs

    arguments: dict[str, Any] = dict(
        model=str(policy), dtype="bfloat16", enforce_eager=True, max_model_len=1152, max_num_seqs=32, seed=0,
        distributed_executor_backend="uni",
    )  # fmt: skip
    if source:
        settings = {"source": source, "policy": "fixed", "max_draft_length": draft_length}
        tlt = TLTConfig.from_dict({"speculation": settings})
        arguments |= engine_kwargs(tlt, "", SimpleNamespace(enforce_eager=True), {})
    llm = LLM(**arguments)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=1.0, max_tokens=1024, detokenize=False)
    for visit in (1, 2):
        start = time.perf_counter()
        outputs = llm.generate([p for p in prompts for _ in range(GROUP)], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        line = f"{source or 'stock':6} visit {visit}: {tokens:6d} tokens, {tokens / seconds:7.0f} tok/s"
        if source:
            stats = scheduler.tlt.stats(reset=True)
            drafts = scheduler.tlt_ngram.summary()
            line += f", {stats['produced'] / stats['rows']:.2f} tokens a request-step, {drafts}"
            scheduler.tlt_ngram.policy_changed()
        print(line, flush=True)
    llm.llm_engine.engine_core.engine_core.shutdown()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path, nargs="?", help="a policy directory; without it only the index is timed")
    parser.add_argument("data", type=Path, nargs="?", help="a verl parquet file with prompts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draft-length", type=int, default=3)
    options = parser.parse_args()
    print("batch   shared   median us   us a request")
    for shared in (0.0, 0.9):
        for batch in BATCHES:
            median = statistics.median(index_cost(batch, shared)) * 1e6
            print(f"{batch:5d}   {shared:6.1f}   {median:9.0f}   {median / batch:12.2f}")
    if options.policy:
        os.environ |= {"VERL_PLATFORM": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        prompts = prompts_of(options.data, options.prompts, options.policy)
        for source in (None, "ngram"):
            decode(options.policy, prompts, source, options.draft_length)


if __name__ == "__main__":
    main()
