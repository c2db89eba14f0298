"""`verl-tlt simulate`: a made-up run, step by step, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_tlt.errors import TLTError
from verl_tlt.simulate.costs import PRESETS, CostModel, TableCost
from verl_tlt.simulate.idle_time import Spot
from verl_tlt.simulate.replica import EngineSpec
from verl_tlt.simulate.run import Drafter, Rest, Scenario, StepResult, simulate, total_ratios
from verl_tlt.simulate.workload import Distribution, LogNormal, Recorded
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies.factory import make_policy


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command, by name; the command says what each is."""

    replicas: int
    requests: int
    steps: int
    median: float
    sigma: float
    longest: int
    lengths: Path | None
    prompt: int
    cost: str
    arms: str
    policy: str
    max_num_seqs: int
    acceptance: tuple[float, ...]
    start: tuple[float, ...]
    learning_tokens: float
    fade: float
    train_tokens_s: float
    rest_s: float
    overhead_s: float
    seed: int


def simulate_run(settings: Settings, jobs: int, out: Path | None, console: Console) -> list[StepResult]:
    """Simulate, and print a row a step.

    Raises:
        TLTError: an option cannot be, or a file cannot be read.
    """
    run = scenario(settings)
    results = simulate(run, jobs)
    rows = Table(
        title=f"{run.replicas} replicas, {run.requests} responses a step, seed {run.seed}",
        title_justify="left",
    )
    seconds, counts = "stock rollout s, rollout s, rollout, step", "accept length, mean K, drafting"
    for head in f"RL step, {seconds}, {counts}, bubble s, trained s, learned, tail".split(", "):
        rows.add_column(head, justify="right")
    for r in results:
        rows.add_row(
            str(r.step), f"{r.stock_rollout_s:.1f}", f"{r.rollout_s:.1f}", f"{r.rollout_ratio:.2f}x",
            f"{r.step_ratio:.2f}x", f"{r.accept_length:.2f}", f"{r.draft_length:.1f}", f"{r.drafting}/{run.replicas}",
            f"{r.bubble_s:.0f}", f"{r.used_s:.0f}", f"{r.learned:.0%}", f"{r.small_batch_share:.0%}",
        )  # fmt: skip
    console.print(rows)
    rollout, step = total_ratios(results)
    console.print(f"Against stock, all steps: rollout {rollout:.2f}x, whole steps {step:.2f}x", highlight=False)
    if out is not None:
        content = {"rollout_ratio": rollout, "step_ratio": step, "steps": [asdict(r) for r in results]}
        try:
            out.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise TLTError(f"--out {out} cannot be written: {error.strerror}.") from error
    return results


def scenario(s: Settings) -> Scenario:
    """The options as a run.

    Raises:
        TLTError: one cannot be, and it says which.
    """
    for name in ("max_num_seqs", "prompt", "learning_tokens"):
        if getattr(s, name) < 1:
            raise TLTError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(s, name):g}.")
    for name in ("train_tokens_s", "rest_s", "overhead_s"):
        if getattr(s, name) < 0:
            raise TLTError(f"--{name.removesuffix('_s').replace('_', '-')} must not be negative.")
    if not 0 <= s.fade <= 1:
        raise TLTError(f"--fade must be in 0..1, not {s.fade:g}.")
    arms, cost = _arms(s.arms), _cost(s.cost)
    make_policy(s.policy, arms)  # says what is wrong with either
    if isinstance(cost, TableCost) and arms[-1] > cost.longest:
        raise TLTError(f"--cost {s.cost} knows draft lengths up to {cost.longest}, and --arms has {arms[-1]}.")
    drafter = Drafter(s.start or s.acceptance, s.acceptance if s.start else (), s.learning_tokens, s.fade)
    return Scenario(
        EngineSpec(cost, arms, s.policy, s.max_num_seqs), s.replicas, s.requests, _lengths(s), drafter, s.prompt,
        Rest(s.rest_s), Spot(s.train_tokens_s), s.overhead_s, s.steps, s.seed,
    )  # fmt: skip


def _arms(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TLTError(f"--arms takes whole numbers with commas between, not {text!r}.") from None


def _cost(text: str) -> CostModel:
    if text in PRESETS:
        return PRESETS[text]
    try:
        content = json.loads(Path(text).read_text())
    except OSError:
        raise TLTError(f"--cost {text} is neither one of {', '.join(PRESETS)} nor a file that can be read.") from None
    except ValueError:
        raise TLTError(f"--cost {text} is no JSON; verl-tlt calibrate writes such a table.") from None
    return TableCost(LatencyTable.from_list(content.get("points", []) if isinstance(content, dict) else content))


def _lengths(s: Settings) -> Distribution:
    if s.lengths is None:
        return LogNormal(s.median, s.sigma, s.longest)
    try:
        text = s.lengths.read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return Recorded(tuple(int(value) for value in values))
    except OSError as error:
        raise TLTError(f"--lengths {s.lengths} cannot be read: {error.strerror}.") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, TLTError):
            raise
        raise TLTError(f"--lengths {s.lengths} must hold whole numbers: a JSON list, or one a line.") from error
