"""What a comparison trains: the toy, or a real language model (`benchmarks.real_policy`), with recipe and heads."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.e2e.arms import LONGEST, Heads
from benchmarks.e2e.heads import BENCH_PROMPTS, BENCH_SEED, NAMES, WARM, Head, home_of, prepare
from benchmarks.real_policy.head import DRAFT_LENGTH, DRAFT_VOCAB, real_head
from benchmarks.real_policy.job import real_assets, real_overrides
from benchmarks.toy_job import toy_overrides
from demo.machine import find_dtype
from demo.toy.assets import Assets, build_assets, demo_width
from verl_tlt.commands.compare.plan import TLT

REAL_ARMS = ("vllm-3", "vllm-3-lost", "tlt-fresh", TLT)


@dataclass(frozen=True)
class Subject:
    """A policy, its prompts, and the heads that arms start from."""

    assets: Assets
    heads: Heads
    warm: Head
    overrides: tuple[str, ...]
    """Of the demo's recipe, whatever the arm."""
    tlt: tuple[str, ...] = ()
    """Of it where the arm has TLT."""
    longest: int = LONGEST
    """Draft length."""
    arms: tuple[str, ...] = ()
    """Those that there are beside stock; none named: all."""


def toy(folder: Path, work: Path) -> Subject:
    """The toy; `folder` keeps its heads, `work` policy and prompts."""
    assets = build_assets(work / "assets", width=demo_width(find_dtype()), train_rows=BENCH_PROMPTS, seed=BENCH_SEED)
    heads = Heads(*(home_of(folder, name) / "drafter" for name in NAMES))
    return Subject(assets, heads, prepare(folder, WARM), toy_overrides(assets))


def real(folder: Path) -> Subject:
    """SmolLM2-135M-Instruct; `folder` keeps all of it. It has one head, the warmed-up one."""
    assets, warm = real_assets(folder), real_head(folder)
    overrides = (*toy_overrides(assets), *real_overrides(assets))
    shape = (f"tlt.drafter.vocab={DRAFT_VOCAB}", "tlt.drafter.intermediate_size=null", "tlt.drafter.batch_tokens=1024")
    return Subject(assets, Heads(*[warm.drafter] * 3), warm, overrides, shape, DRAFT_LENGTH, REAL_ARMS)
