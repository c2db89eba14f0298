"""Makes a real language model into a policy, with prompts and a reward: SmolLM2-135M-Instruct and word problems.

    python -m benchmarks.real_policy    # downloads 93 MB; .cache/real keeps policy and prompts
    export $(python -m verl_cpu.environment)
    python -m benchmarks.real_policy --measure 64 --out benchmarks/results/real_policy_reward.json

`--measure` has vLLM answer that many training prompts once, at temperature 1, and says how many answers are right.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.real_policy.job import LONGEST_RESPONSE, PLACE, real_assets
from benchmarks.stored import store
from demo.toy.assets import Assets


def measure(assets: Assets, count: int, work: Path) -> dict[str, Any]:
    """How many answers are right, and how long they are; `work` keeps them."""
    import pyarrow.parquet as pq

    from benchmarks.real_policy.problems import compute_score
    from verl_tlt.commands.console import make_console
    from verl_tlt.commands.options import EngineOptions
    from verl_tlt.commands.warmup.engine import Stage, generate, generation_job, make_bars
    from verl_tlt.commands.warmup.prompts import load_tokenizer, read_for

    options = EngineOptions(model=assets.policy, response_length=LONGEST_RESPONSE, device="cpu")
    prompts, tokenizer = read_for(options, [assets.train], count), load_tokenizer(assets.policy)
    with make_bars(make_console()) as bars:
        job = generation_job(options, prompts.tokens)
        responses, _ = generate(job, work, Stage(bars, "generate", "starting vLLM"))
    rows = {str(row["prompt"]): row for row in pq.read_table(assets.train).to_pylist()}  # equal prompts once
    right = 0.0
    for row, response in zip(rows.values(), responses, strict=False):
        text = tokenizer.decode(response.tokens, skip_special_tokens=True)
        right += compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
    tokens = [len(response.tokens) for response in responses]
    return {"responses": len(tokens), "right": right / len(tokens), "tokens": sum(tokens), "longest": max(tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PLACE)
    parser.add_argument("--measure", type=int, metavar="N")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    assets = real_assets(options.folder)
    print(json.dumps(dataclasses.asdict(assets), default=str, indent=2))
    if options.measure:
        found = measure(assets, options.measure, options.folder / "measured")
        print(json.dumps(found, indent=1))
        if options.out:
            store(options.out, found)


if __name__ == "__main__":
    main()
