"""How often, and on how much, a drafter in training is scored; what is said meanwhile where no bar moves."""

import io
import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.warmup import command, engine, train
from verl_tlt.commands.warmup.prompts import Prompt
from verl_tlt.commands.warmup.train import CHECKS
from verl_tlt.drafter.evaluate import acceptance
from verl_tlt.drafter.train import DrafterTrainer
from verl_tlt.errors import TLTError


@pytest.fixture
def now(monkeypatch):
    """The seconds of a clock that stands still by itself."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in (train, engine):
        monkeypatch.setattr(module, "time", clock)
    return now


@pytest.fixture
def ended(warm, now, monkeypatch):
    """A warm-up whose steps take ten seconds, and scores a second for ten tokens: (its training, what it printed)."""

    def step_on(trainer, fed, real=DrafterTrainer.step_on):
        now[0] += 10.0
        return real(trainer, fed)

    def score(model, sequences, **options):
        now[0] += 0.1 * sum(len(sequence.tokens) for sequence in sequences)
        return acceptance(model, sequences, **options)

    def run(**options):
        runs = []
        monkeypatch.setattr(command, "_save", lambda o, p, r, run: runs.append(run) or o.out)
        _, said = warm(**options)
        return runs[0], said

    monkeypatch.setattr(DrafterTrainer, "step_on", step_on)
    monkeypatch.setattr(train, "acceptance", score)
    return run


@pytest.mark.parametrize("budget", [{"epochs": 1}, {"epochs": 9, "max_minutes": 5.0}], ids=str)
def test_checks_are_spread_over_the_run_and_are_no_minutes_of_training(ended, budget):
    run, _ = ended(samples=3, batch_tokens=128, **budget)
    steps = [check["step"] for check in run.progress.checks]
    assert steps[0] == 0 and steps[-1] == run.trainer.steps and len(steps) == CHECKS + 1
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1, "evenly"
    if "max_minutes" in budget:
        assert run.progress.seconds == 300.0


def test_a_check_has_as_many_prompts_as_it_can_and_counts_no_token_of_theirs(ended):
    run, said = ended(samples=4, batch_tokens=64, max_steps=1)
    assert "held-out tokens scored after" in said
    prompts = [text.tokens[: text.prompt_len] for text in (run.library.texts[i] for i in run.judged)]
    once = len(prompts) // 4
    assert once > 1 and len(set(prompts[:once])) == once


def test_a_check_of_long_responses_has_several(ended, monkeypatch):
    monkeypatch.setattr(train, "JUDGED_TOKENS", 30)  # one response of 24 tokens
    _, said = ended(samples=6, batch_tokens=64, max_steps=1)
    (judged,) = set(re.findall(r"of (\d+) held-out tokens scored", said))
    assert int(judged) >= 16 * 24


@pytest.mark.parametrize(
    ("shares", "lines"),
    [
        ([i / 50 for i in range(51)], [(i / 10, 5 * i) for i in range(1, 11)]),
        ([0.0, 0.05, 0.73, 0.74, 1.0], [(0.73, 2), (1.0, 4)]),
        ([0.0] * 200, [(0.0, 61), (0.0, 122), (0.0, 183)]),
    ],
    ids=["every tenth", "a jump over several", "a stage that stands still"],
)
def test_a_stage_without_a_terminal_says_every_tenth_and_every_minute(now, shares, lines):
    console = Console(file=io.StringIO(), width=200)
    stage = engine.Stage(engine.make_bars(console), "train", "begins")
    for second, share in enumerate(shares):
        now[0] = second
        stage.tell(share, f"{share:g}")
    told = re.findall(r"train: (\S+) after (\d+) s", console.file.getvalue())
    assert [(float(share), int(second)) for share, second in told] == lines


@pytest.mark.parametrize(("before", "left"), [(0.0, 70), (0.2, 210)], ids=["a new one", "one that goes on"])
def test_a_stage_tells_the_time_left_by_what_it_did_itself(now, before, left):
    console = Console(file=io.StringIO(), width=200)
    stage = engine.Stage(engine.make_bars(console), "train", "begins")
    stage.tell(before, "")
    now[0] = 30
    stage.tell(0.3, "")
    assert f"about {left} s left" in console.file.getvalue().splitlines()[-1]


def test_an_engine_of_more_gpus_than_there_are_is_not_started(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert engine.find_device(2) == "cuda"
    with pytest.raises(TLTError, match=r"--tensor-parallel 4 asks for 4 GPUs, and torch finds 2\."):
        engine.find_device(4)


def test_what_a_kill_left_is_no_response(tmp_path, monkeypatch):
    """Two tries were killed, the second within a line; the third is under way."""
    rows = [json.dumps({"prompt": i, "sample": 0, "tokens": [1, 2]}) + "\n" for i in range(4)]
    (tmp_path / engine.RESPONSES).write_text(rows[0] + "\n" + rows[1] + rows[2][:-5] + "\n" + rows[2])
    told = []

    def child(*_, tell, **__):
        tell()
        with (tmp_path / engine.RESPONSES).open("a") as stream:
            stream.write(rows[3])
        tell()

    monkeypatch.setattr(engine, "run_job", child)
    stage = SimpleNamespace(tell=lambda share, note: told.append((share, note)))
    responses, _ = engine.generate(engine.GenerationJob(Recipe(()), {}, [Prompt((5,))] * 4), tmp_path, stage)
    assert len(responses) == 4
    assert told == [(0.75, "3 of 4 responses"), (1.0, "4 of 4 responses"), (1.0, "4 of 4 responses")]
