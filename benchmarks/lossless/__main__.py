"""Does a vLLM engine with speculation draw what the policy would? `python -m benchmarks.lossless`, on a CPU or a GPU.

Responses are drawn under each setting, and every token is judged by Hugging Face's forward pass of the same policy,
which knows nothing of vLLM, drafts or TLT. One row per engine and setting. See README.md here.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.parts import device_memory, of_clone
from benchmarks.lossless.drawing import filled
from benchmarks.lossless.exact import Exact, Sampling
from benchmarks.lossless.judged import FAILS, Judged
from benchmarks.lossless.tiny_policy import SMALL, build_drafter_dir, build_target
from benchmarks.stored import store
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.child_engine import run_job

SETTINGS = {
    "T=1": Sampling(),
    "T=0.7, top_p=0.9": Sampling(0.7, top_p=0.9),
    "T=1.3, top_k=8": Sampling(1.3, top_k=8),
    "penalties": Sampling(0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "stop strings": Sampling(),
    "structured output": Sampling(turns=((3, 7, 9, 11, 15), (7, 8, 9, 10, 15))),
}
STOPS, STRUCTURED = "stop strings", "structured output"
BLOCK = 32
"""Tokens of a block of KV cache: the least that vLLM's CPU backend takes from 0.31 on."""
PRESSURE = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 48}
"""Prompts in chunks, not everybody in every step, and (`engines`) cache for a few of them: requests are preempted."""
SABOTAGE = 0.1
"""Power is told for a sampler that takes the likeliest token instead of drawing, once in ten tokens."""


@dataclass(frozen=True)
class Row:
    engine: str
    setting: str
    responses: int
    tokens: int
    accepted: float
    """Draft tokens per verified draft."""
    p_places: float
    p_martingale: float
    power: float
    """Share of sabotaged copies of these tokens that the tests would have seen."""
    logprob_error: float
    """Largest difference between a returned log-probability and the judge's."""
    wrong_ends: int
    """Responses that do not end with the token that completes their first stop string, or at full length."""

    @property
    def passes(self) -> bool:
        """Whether a correct engine would do this, but for once in ten thousand rows."""
        return min(1.0, 2 * min(self.p_places, self.p_martingale)) >= FAILS and not self.wrong_ends


def end_of(tokens: Sequence[int], most: int, stops: Sequence[str], tokenizer: Any) -> int:
    """How many of a response's tokens there should be."""

    def stopped(count: int) -> bool:
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(tokens)):
        return most
    return next(count for count in range(1, len(tokens) + 1) if stopped(count))


def row_of(
    name: tuple[str, str], found: Mapping[str, Any], prompts: Sequence[Sequence[int]], sampling: Sampling,
    judge: Exact, most: int, tokenizer: Any,
) -> Row:  # fmt: skip
    """Judge what one engine drew under one setting (`child.work`)."""
    parts, errors, wrong = [], [0.0], 0
    stops = found["stops"]
    for prompt, responses in zip(prompts, found["responses"], strict=True):
        ends = [end_of(one["tokens"], most, stops, tokenizer) for one in responses]
        wrong += sum(end != len(one["tokens"]) for end, one in zip(ends, responses, strict=True))
        judged = judge.judge(list(prompt), filled([one["tokens"] for one in responses], most), sampling)
        kept = [min(end, len(one["tokens"])) for end, one in zip(ends, responses, strict=True)]
        part = judged.only((np.arange(most) < np.array(kept)[:, None]).ravel())
        theirs = [p for one, count in zip(responses, kept, strict=True) for p in one["logprobs"][:count]]
        errors += np.abs(part.log_prob - theirs)[np.isfinite(part.log_prob)].tolist()
        parts.append(part)
    tokens = Judged.of_all(parts)
    return Row(
        *name, responses=sum(map(len, found["responses"])), tokens=len(tokens.place),
        accepted=round(found["accepted"], 2), p_places=tokens.places(), p_martingale=tokens.martingale(),
        power=tokens.power(SABOTAGE), logprob_error=float(max(errors)), wrong_ends=wrong,
    )  # fmt: skip


# ---------------------------------------------------------------------- the command


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossless", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--policy", type=Path, help="a Hugging Face directory; else a tiny policy is made, with a drafter")
    add("--drafter", type=Path, help="an EAGLE-3 drafter of it; else what --engine-kwargs says")
    add("--engine-kwargs", type=json.loads, default={}, metavar="JSON", help="for vLLM, speculative_config included")
    add("--tlt", action="store_true", help="with what a rollout server of verl-tlt adds, and any K in any step")
    add("--draft-lengths", type=int, nargs="+", default=[3], metavar="K", help="of --drafter: an engine for each")
    add("--settings", nargs="+", choices=list(SETTINGS), help="else all that the policy allows")
    add("--draws", type=int, default=600, help="responses to each prompt")
    add("--tokens", type=int, default=12, help="in a response that nothing stops")
    add("--prompts", type=Path, help="one a line, read with the policy's tokenizer")
    add("--stop", nargs="+", help="stop strings; else one is taken that the policy often writes")
    add("--out", type=Path, help="JSON")
    asked = parser.parse_args()
    if asked.tlt and asked.policy and not asked.drafter:
        parser.error("--tlt needs --drafter: verl-tlt sets speculative_config itself.")
    return asked


def engines(asked: argparse.Namespace, policy: Path, drafter: Path | None, longest: int) -> Iterator[dict[str, Any]]:
    """What each engine is started with: every draft length, calm and under pressure."""
    given = asked.engine_kwargs
    whose = "verl-tlt" if asked.tlt else "vLLM"
    lengths = [0] if drafter is None or "speculative_config" in given else asked.draft_lengths
    for length in lengths:
        for pressed in (False, True):
            spare = 0 if not pressed else longest + 16
            arguments = {
                "model": str(policy), "dtype": "float32", "seed": 0, "logprobs_mode": "processed_logprobs",
                "disable_log_stats": False, **({"enforce_eager": True} if not device_memory() else {}),
                "max_num_seqs": 64, "max_model_len": longest + 16, "enable_prefix_caching": False,
                **({**PRESSURE, "num_gpu_blocks_override": 10 * -(-spare // BLOCK)} if pressed else {}), **given,
            }  # fmt: skip
            k = f", K={length}" if length and not asked.tlt else f", K to {length}" if length else ""
            yield {
                "name": f"{whose}{k}{', pressed' if pressed else ''}", "arguments": arguments,
                "drafter": None if drafter is None else str(drafter), "draft_length": length, "tlt": asked.tlt,
            }  # fmt: skip


def main() -> None:
    from transformers import AutoTokenizer

    asked = options()
    with tempfile.TemporaryDirectory(prefix="verl-tlt-lossless-") as scratch:
        directory, policy, drafter = Path(scratch), asked.policy, asked.drafter
        if policy is None:
            policy, drafter = directory / "policy", directory / "drafter"
            build_target(policy, vocab=SMALL)
            build_drafter_dir(drafter, policy, informed=True)
        tokenizer = AutoTokenizer.from_pretrained(policy)
        prompts = [[3, 14, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8]]
        if asked.prompts:
            prompts = [tokenizer.encode(line) for line in asked.prompts.read_text().splitlines() if line]
        print(
            "| engine | setting | tokens | accepted | p, places | p, martingale | power | log-prob error | wrong ends |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        rows = []
        for row in _rows(asked, directory, policy, drafter, prompts, tokenizer):
            rows.append(row)
            print(line(row), flush=True)
    if asked.out:
        store(asked.out, {"command": shlex.join(sys.argv[1:]), "rows": [asdict(row) for row in rows]})


def _rows(
    asked: argparse.Namespace,
    directory: Path,
    policy: Path,
    drafter: Path | None,
    prompts: Sequence[Sequence[int]],
    tokenizer: Any,
) -> Iterator[Row]:
    """Run the engines, one after the other, and judge each when it has ended."""
    names = asked.settings or [name for name in SETTINGS if asked.policy is None or name != STRUCTURED]
    settings = {name: asdict(SETTINGS[name]) for name in names}
    cuda = bool(device_memory())
    for kind in engines(asked, policy, drafter, max(map(len, prompts)) + asked.tokens):
        job = {
            **kind, "prompts": prompts, "draws": asked.draws, "tokens": asked.tokens, "settings": settings,
            "stops": {STOPS: asked.stop},
        }  # fmt: skip
        environment = of_clone({} if cuda else CPU_ENGINE)
        found = run_job("benchmarks.lossless.child", job, directory / "engine", environment)
        judge = Exact(policy, kind["arguments"]["dtype"], "cuda" if cuda else "cpu")
        for name in names:
            which = (kind["name"], name)
            yield row_of(which, found[name], prompts, SETTINGS[name], judge, asked.tokens, tokenizer)


def line(row: Row) -> str:
    told = "" if row.passes else " **differs**"
    return (
        f"| {row.engine} | {row.setting}{told} | {row.tokens} | {row.accepted} | {row.p_places:.2g} | "
        f"{row.p_martingale:.2g} | {row.power:.2f} | {row.logprob_error:.1g} | {row.wrong_ends} of {row.responses} |"
    )


if __name__ == "__main__":
    main()
