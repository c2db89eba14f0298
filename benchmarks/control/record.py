"""Records what a step costs on a real vLLM CPU engine: long-tailed batches draining from 64 requests, K after K.

    python benchmarks/control/record.py --out benchmarks/control/recorded_cpu.json

The target is the wide toy policy (40M parameters in bfloat16), the drafter a random head on it: latency does not
depend on what the weights know. The result is a latency table that `replay.py --table` takes as the true cost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VERL_PLATFORM="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

LONGEST_DRAFT = 7


def start_engine(directory: Path, batch: int) -> Any:
    """An in-process engine under TLT's scheduler, drafting 0..7 tokens with a random head."""
    from vllm import LLM

    from verl_tlt.config import TLTConfig
    from verl_tlt.drafter import FrozenParts, build_drafter, refresh_frozen, save_drafter
    from verl_tlt.rollout.settings import engine_kwargs
    from verl_tlt.toy.assets import build_assets

    assets = build_assets(directory, width="wide", train_rows=1, val_rows=1)
    drafter = build_drafter(assets.policy, aux_layers=assets.aux_layers, seed=0)
    refresh_frozen(drafter, FrozenParts.from_policy_dir(assets.policy))
    save_drafter(drafter, directory / "drafter", {"made for": "benchmarks"})
    config = TLTConfig.from_dict({"speculation": {"max_draft_length": LONGEST_DRAFT, "policy": "off"}})
    return LLM(
        model=str(assets.policy),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        seed=0,
        max_model_len=512,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        **engine_kwargs(config, str(directory / "drafter"), SimpleNamespace(enforce_eager=True), {}),
    )


def drain(llm: Any, batch: int, rng: random.Random) -> None:
    """One long-tailed batch, decoded to the end."""
    from vllm import SamplingParams

    lengths = [min(140, max(8, round(rng.lognormvariate(3.2, 0.7)))) for _ in range(batch)]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    prompts = [{"prompt_token_ids": [rng.randrange(5, 30) for _ in range(16)]} for _ in range(batch)]
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batch", type=int, default=64, help="requests at the start of each drain")
    parser.add_argument("--passes", type=int, default=2, help="drains per draft length, interleaved")
    options = parser.parse_args()
    from verl_tlt.simulate.recorded import recording, step_records

    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TLT_TRACE_DIR"] = scratch
        llm = start_engine(Path(scratch), options.batch)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        drain(llm, 2, random.Random(0))
        for turn in range(options.passes):
            for k in range(LONGEST_DRAFT + 1):
                scheduler.tlt.control(force_k=k)
                drain(llm, options.batch, random.Random(turn))
        scheduler.shutdown()
        trace = Path(scratch) / "engine-0.jsonl"
        found = recording(step_records(trace.read_text().splitlines()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {"points": found.table.to_list(), "jitter": round(found.jitter, 4)}
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(found.table.points)} points, jitter {found.jitter:.3f}, written to {options.out}")


if __name__ == "__main__":
    main()
