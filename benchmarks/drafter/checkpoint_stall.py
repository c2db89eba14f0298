"""How long a checkpoint keeps drafter training waiting: selective and asynchronous, against synchronous and full.

    python -m benchmarks.drafter.checkpoint_stall --out benchmarks/results/drafter_checkpoint.json

Full and synchronous: `torch.save` of the whole model (the policy's frozen embedding and head included) and the
optimizer, flushed to disk, while training waits. Selective and asynchronous: what the plugin's spot worker does;
training waits for a copy of the trained parameters and the optimizer in memory (`SpotLearner.snapshot`), a thread
writes them.
Turns alternate; every write is flushed. The stall is the time until the next micro-batch could begin.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.drafter.packing import sequences_of
from benchmarks.stored import store
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import build_drafter, pack, save_drafter, to_drafter_file
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import RolloutSampling
from verl_tlt.spot_worker.learner import SpotLearner


def learner(hidden: int, vocabulary: int, directory: Path) -> SpotLearner:
    """A spot learner of a policy of this size, after one step, so that the optimizer has its moments."""
    policy = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "vocab_size": vocabulary,
        "num_hidden_layers": 6, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "head_dim": 64, "intermediate_size": 3 * hidden, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(policy))
    model = build_drafter(policy, seed=0)
    file = DrafterFile(0, *to_drafter_file(model, "float32"))
    made = SpotLearner("a", TLTConfig(), str(directory), file, RolloutSampling(1.0, 1.0, -1), "cpu")
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.isnan().any():
                parameter.data = torch.empty(parameter.shape).normal_(0.0, 0.02)
    made.trainer.step(pack(sequences_of([32, 32], hidden, vocabulary)))
    return made


def full_and_synchronous(made: SpotLearner, target: Path) -> float:
    """Seconds of stall."""
    begin = time.perf_counter()
    with target.open("wb") as file:
        torch.save({"model": made.model.state_dict(), "optimizer": made.trainer.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def selective_and_asynchronous(made: SpotLearner, target: Path) -> tuple[float, float]:
    """(seconds of stall, seconds until it is on disk)."""
    begin = time.perf_counter()
    tensors, state = made.snapshot()
    stall = time.perf_counter() - begin
    arguments = {"training_state": state, "tensors": tensors}
    thread = threading.Thread(target=save_drafter, args=(made.model, target, {}), kwargs=arguments)
    thread.start()
    thread.join()
    return stall, time.perf_counter() - begin


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    made = learner(options.hidden, options.vocabulary, scratch)
    full: list[float] = []
    stalls: list[float] = []
    written: list[float] = []
    for turn in range(options.repeats + 1):
        a = full_and_synchronous(made, scratch / "full.pt")
        b, until = selective_and_asynchronous(made, scratch / "selective")
        if turn:  # the first of each allocates
            full.append(a)
            stalls.append(b)
            written.append(until)
            print(f"full, synchronous {a:.3f} s; selective, asynchronous {b:.3f} s ({until:.3f} s to disk)", flush=True)
    files = [path for path in (scratch / "selective").rglob("*") if path.is_file()]
    size = {
        "full_mb": round((scratch / "full.pt").stat().st_size / 1e6, 1),
        "selective_mb": round(sum(path.stat().st_size for path in files) / 1e6, 1),
    }
    shutil.rmtree(scratch)
    ratios = [a / b for a, b in zip(full, stalls, strict=True)]
    result = {
        "full_synchronous_s": [round(v, 4) for v in full],
        "selective_asynchronous_stall_s": [round(v, 4) for v in stalls],
        "selective_until_on_disk_s": [round(v, 4) for v in written],
        "ratio_median": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "size": size,
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
    }
    store(options.out, result)
    print(f"stall {result['ratio_median']}x shorter; {size}")


if __name__ == "__main__":
    main()
