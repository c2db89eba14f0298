"""How often, and on how much, a drafter in training is scored: as much as takes a tenth of the run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup import command, engine, train
from verl_tlt.commands.warmup.command import warmup
from verl_tlt.commands.warmup.train import CHECK_SHARE, CHECKS, FEW_TOKENS, FREE_TOKENS, JUDGED_TOKENS, plan_checks
from verl_tlt.drafter import acceptance
from verl_tlt.drafter.train import DrafterTrainer


@pytest.mark.parametrize("run_s", [10.0, 600.0, 36_000.0])
@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("held_out", [40, 3_000, 500_000])
def test_checks_take_a_tenth_of_the_run_at_most(run_s, token_s, held_out):
    scores, tokens = plan_checks(run_s, token_s, held_out).values()
    assert 2 <= scores <= CHECKS + 1 and 0 < tokens <= min(held_out, JUDGED_TOKENS)
    assert scores * tokens <= max(FREE_TOKENS, CHECK_SHARE * run_s / token_s)
    if scores < CHECKS + 1:  # fewer checks, before each tells nothing
        assert tokens >= min(held_out, FEW_TOKENS)


def test_where_time_is_plenty_all_is_scored_ten_times():
    assert plan_checks(3600.0, 1e-4, 500_000) == {"scores": CHECKS + 1, "tokens": JUDGED_TOKENS}
    few = plan_checks(1.0, 1.0, 100)
    assert few == {"scores": CHECKS + 1, "tokens": 100}, "a few tokens cost nothing worth saving"


@pytest.fixture
def slow_scores(monkeypatch):
    """A clock that only training (ten seconds a step) and scoring (a second for ten tokens) move."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in (train, engine):
        monkeypatch.setattr(module, "time", clock)

    def step_on(trainer, fed, real=DrafterTrainer.step_on):
        now[0] += 10.0
        return real(trainer, fed)

    def score(model, sequences, **options):
        now[0] += 0.1 * sum(len(sequence.tokens) for sequence in sequences)
        return acceptance(model, sequences, **options)

    monkeypatch.setattr(DrafterTrainer, "step_on", step_on)
    monkeypatch.setattr(train, "acceptance", score)
    return now


@pytest.fixture
def ended(policy_dir, prompts_file, tmp_path, answered, slow_scores, monkeypatch):
    """A warm-up with such scores: (its training run, what it printed)."""

    def run(samples, **more):
        runs, said = [], io.StringIO()
        options = WarmupOptions(
            model=policy_dir, prompts=[prompts_file], out=tmp_path / "drafter", response_length=24, device="cpu",
            objective="eagle", samples=samples, **more,
        )  # fmt: skip
        answered(options.work, samples)
        monkeypatch.setattr(command, "_save", lambda o, p, r, run: runs.append(run) or o.out)
        warmup(options, Console(file=said, width=200))
        return runs[0], said.getvalue()

    return run


@pytest.mark.parametrize("budget", [{"epochs": 1}, {"epochs": 9, "max_minutes": 5.0}], ids=str)
def test_a_large_vocabularys_scores_do_not_take_the_run(ended, slow_scores, monkeypatch, budget):
    monkeypatch.setattr(train, "FREE_TOKENS", 100)
    monkeypatch.setattr(train, "PROBE_TOKENS", 30)
    run, said = ended(samples=6, batch_tokens=128, **budget)
    spent = run.progress
    assert 0.03 < spent.check_seconds / (spent.seconds + spent.check_seconds) < CHECK_SHARE + 0.03  # with the probe
    assert spent.checks[0]["step"] == 0 and spent.checks[-1]["step"] == run.trainer.steps
    if "max_minutes" in budget:
        assert spent.seconds + spent.check_seconds == pytest.approx(300.0, abs=30.0), "checks are minutes too"
    longest = max(b - a for a, b in zip([0.0, *stamps(said)], [*stamps(said), slow_scores[0]], strict=True))
    assert longest < 0.25 * slow_scores[0], said


def stamps(said):
    """Seconds at which a line was printed."""
    return [float(line.split(" after ")[1].split()[0]) for line in said.splitlines() if " after " in line]


def test_while_text_is_scored_it_says_so(ended):
    _, said = ended(samples=4, batch_tokens=64, epochs=1)
    assert "held-out tokens scored after" in said


def test_a_check_has_as_many_prompts_as_it_can_and_counts_no_token_of_theirs(ended):
    run, _ = ended(samples=3, batch_tokens=64, epochs=1)
    prompts = [text.tokens[: text.prompt_len] for text in (run.library.texts[i] for i in run.judged)]
    once = len(prompts) // 3
    assert once > 1 and len(set(prompts[:once])) == once
    assert run.progress.plan["tokens"] == run.library.responses(run.judged), "so few are all scored"
