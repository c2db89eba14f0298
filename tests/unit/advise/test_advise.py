"""`verl-tlt advise`: what it reads of a run, the arithmetic, and the verdict."""

import json

import pytest
from cli import cli
from step_costs import step_costs

from verl_tlt.commands.advise.estimate import RunShape, drafting_gains, shape_of, steps_to_repay, verdict
from verl_tlt.commands.run_metrics import read_run
from verl_tlt.errors import TLTError
from verl_tlt.speculation.costs import LatencyTable

STEP = {"timing_s/gen": 80.0, "timing_s/step": 100.0, "response_length/mean": 900.0, "response_length/max": 3600.0}
SLOW = {**STEP, "timing_s/gen": 200.0, "timing_s/step": 600.0}
RUN = {1: SLOW, 2: STEP, 3: STEP, 4: {**STEP, "timing_s/step": 170.0, "timing_s/save_checkpoint": 70.0}}


def file_log(steps):
    return "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps)


def console_log(steps, prefix="", form=str):
    rows = (" - ".join(f"{name}:{form(value)}" for name, value in data.items()) for _, data in steps)
    return "".join(f"{prefix}step:{step} - {row}\n" for (step, _), row in zip(steps, rows, strict=True))


def csv_file(steps, step="Step", prefix="my run - "):
    columns = [f"{prefix}{name}{end}" for name in STEP for end in (("", "__MIN", "__MAX") if prefix else ("",))]
    rows = [[str(n), *(str(data[c.removeprefix(prefix).split("__")[0]]) for c in columns)] for n, data in steps]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in [[step, *columns], *rows])


def shape(rollout_s=80.0, longest=3600.0):
    return RunShape(3, rollout_s, 100.0, rollout_s / 100.0, 900.0, longest)


STEPS = list(RUN.items())
PLAIN = STEPS[:3]
FORMS = {
    "file logger": ("a.jsonl", file_log(STEPS)),
    "file logger, last line cut": ("a.jsonl", file_log(STEPS)[:-30]),
    "values as text": ("a.jsonl", file_log([(n, {k: str(v) for k, v in data.items()}) for n, data in STEPS])),
    "validation before the first step": ("a.jsonl", file_log([(0, {"val-core/acc": 0.1}), *STEPS])),
    "console": ("a.log", "WARNING odd:thing\n" + console_log(STEPS)),
    "console by Ray": ("a.log", console_log(STEPS, "\x1b[36m(TaskRunner pid=1)\x1b[0m ", "np.float64({})".format)),
    "console in colour": ("a.log", "".join(f"{line}\x1b[0m\n" for line in console_log(STEPS).splitlines())),
    "rows without a number": ("a.jsonl", '{"step": Infinity, "data": {"x": 1}}\n' + file_log(STEPS)),
    "W&B's panel": ("a.csv", csv_file(PLAIN)),
    "W&B's history": ("a.csv", csv_file(PLAIN, "_step", "")),
    "resumed": ("a.jsonl", file_log([*STEPS, (3, SLOW), (4, STEP), (5, STEP)])),
    "another run before it": ("a.jsonl", file_log([(n, SLOW) for n in range(1, 8)] + STEPS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_is_read_in_every_form_in_which_people_keep_it(form, tmp_path):
    name, text = FORMS[form]
    (path := tmp_path / name).write_text(text)
    found = shape_of(read_run(path), name)
    assert (found.rollout_s, found.step_s, found.share, found.tail) == (80.0, 100.0, 0.8, 4.0)


def test_the_first_step_after_each_start_is_left_out(tmp_path):
    (path := tmp_path / "a.jsonl").write_text(file_log([*STEPS, (3, SLOW), (4, SLOW), (5, STEP)]))
    run = read_run(path)
    assert run.starts == {1, 3} and shape_of(run, "").steps == 3


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "has no step with timing_s/gen and timing_s/step"),
        ("a.jsonl", file_log([(1, {**STEP, "tlt/accept_length": 2.0})]), "is from a run with TLT"),
        ("a.csv", "Step,a - timing_s/gen\n1,2", "has no timing_s/step: give the file with this metric too"),
        ("a.csv", "time,loss\n1,2", "has no column of RL steps"),
        ("a.csv", "Step,a - timing_s/gen,a - timing_s/gen\n1,2,3", "several columns of the same metric"),
        ("a.csv", 'Step,timing_s/gen\n1,"' + "2,3\n" * 50_000, "a.csv cannot be read as CSV: field larger than"),
        ("a.jsonl", file_log([(1, {**STEP, "timing_s/gen": 101.0})]), "they are of different runs"),
        ("a.jsonl", file_log([(1, {**STEP, "timing_s/save_checkpoint": 100.0})]), "they are of different runs"),
        (".", None, "cannot be read"),
    ],
)
def test_a_file_without_a_run_of_stock_verl_is_one_sentence(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TLTError, match=said):
        shape_of(read_run(tmp_path / name), name)


def test_amdahl():
    run = shape(50.0)
    assert [round(run.step_speedup(s), 3) for s in (1.5, 2.0, float("inf"))] == [1.2, 1.333, 2.0]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (shape(22.0), "Rollout is 22% of a step: at most 1.28x. Not worth it."),
        (shape(80.0, longest=1000.0), "only 1.1 times the mean"),
        (shape(30.0), "Only worth it with a good drafter: 1.18x if"),
        (shape(100.0), "Rollout is 100% of a step: a step gains what the rollout gains. Worth trying: 2.00x"),
        (shape(80.0), "Rollout is 80% of a step: at most 5.00x. Worth trying: 1.67x if the rollout is twice as fast."),
    ],
)
def test_the_verdict(run, said):
    assert said in verdict(run)


@pytest.mark.parametrize(("turns", "told"), [((2.0, 2.0, 9.0), None), ((2.0, 4.5, 5.0), "4.50 turns")])
def test_tools_whose_time_counts_as_decoding_are_told_where_responses_have_several_turns(turns, told, tmp_path):
    steps = [(n, {**STEP, "num_turns/mean": mean}) for n, mean in enumerate((9.0, *turns), start=1)]
    (path := tmp_path / "a.jsonl").write_text(file_log(steps))
    said = verdict(shape_of(read_run(path), ""))
    assert said == verdict(shape()) if told is None else (told in said and said.startswith(verdict(shape())))


COSTS = step_costs({-1: [(1, 10.0), (64, 20.0)], 1: [(1, 11.0), (64, 40.0)], 3: [(1, 13.0), (64, 80.0), (9, 1.0)]})


def test_the_break_even_is_beside_the_measured_accept_length():
    small, large = drafting_gains(COSTS, (0.8, 0.75, 0.7))
    assert (small.batch, small.draft_length) == (1, 3)
    assert small.break_even == pytest.approx(1.3) and small.accept_length == pytest.approx(1 + 0.8 + 0.6 + 0.42)
    assert (large.batch, large.draft_length, large.speedup) == (64, 1, 1.0), "a draft that does not pay is not made"
    assert drafting_gains(COSTS, (0.8,))[0].draft_length == 1, "no acceptance is assumed beyond what was measured"
    rows = [(1, 1000, -1, 11.0), (1, 1000, 3, 30.0), *((1, 32, k, s) for k, s in ((-1, 10.0), (3, 13.0)))]
    names = ("batch", "kv_tokens", "draft_length", "seconds")
    points = [dict(zip(names, row, strict=True)) for row in rows]
    (long,) = drafting_gains(LatencyTable.from_list(points), (0.8,) * 3, 1000)
    assert long.break_even == pytest.approx(30 / 11, rel=0.01), "at the context that is asked for"
    assert "With this drafter at most 1.76x, at a batch of 1. Measure it" in verdict(shape(), [small, large])
    assert "Not worth it with this drafter" in verdict(shape(), [large])
    said = verdict(shape(longest=1000.0), [small, large])
    assert "With this drafter 1.00x at a batch of 64, the largest measured: the longest response is only 1.1" in said
    assert said.endswith("until the end. Not worth it with this drafter.")
    assert "1.76x at a batch of 1, the" in (said := verdict(shape(longest=1000.0), [small])) and "Measure it" in said


def test_a_warm_up_is_repaid_by_what_steps_save():
    assert steps_to_repay(shape(), 2.0, minutes=20.0) == pytest.approx(1200 / 40)
    assert steps_to_repay(shape(), 1.0, minutes=20.0) is None


@pytest.fixture
def files(tmp_path):
    """A run, a drafter with its facts, and step times."""
    (tmp_path / "metrics.jsonl").write_text(file_log(STEPS))
    (tmp_path / "drafter").mkdir()
    (tmp_path / "costs.json").write_text(json.dumps({"points": COSTS.to_list()}))
    return tmp_path


def test_the_command(files):
    code, said = cli("advise", files / "metrics.jsonl")
    assert code == 0 and "80.0 s of 100.0 s (80%)" in said and "3,600 tokens, 4.0 times the mean" in said
    assert "In separate_async a step can gain more: " in said
    drafter = ("--drafter", files / "drafter", "--costs", files / "costs.json")
    code, said = cli("advise", files / "metrics.jsonl", *drafter)
    assert code == 1 and "has no measured acceptance" in said
    facts = {"acceptance": [0.8, 0.75, 0.7], "training_seconds": 1200.0}
    (files / "drafter" / "provenance.json").write_text(json.dumps(facts))
    code, said = cli("advise", files / "metrics.jsonl", *drafter)
    assert code == 0 and "training of 20 min repaid after" in said and "never" in said, said
    (files / "drafter" / "provenance.json").write_text(json.dumps({"acceptance": facts["acceptance"]}))
    code, said = cli("advise", files / "metrics.jsonl", *drafter)  # a drafter that a run trained has no warm-up
    assert code == 0 and "break-even" in said and "repaid" not in said, said
    assert cli("advise", files / "metrics.jsonl", *drafter[:2])[0] == 1
    step = {"batch": 1, "kv_tokens": 32, "draft_length": -1}
    for points in (None, [step | {"seconds": 0}], [step | {"seconds": float("nan")}]):
        (files / "costs.json").write_text(json.dumps({"points": points}))
        code, said = cli("advise", files / "metrics.jsonl", *drafter)
        assert code == 1 and "is not a report of verl-tlt doctor --gpu with measured step times" in said, said


def test_a_single_step_is_said_to_be_a_first_one(files):
    (files / "metrics.jsonl").write_text(file_log(STEPS[:1]))
    code, said = cli("advise", files / "metrics.jsonl")
    assert code == 0 and "1 step of stock verl, but it is the first after a start, which is slow. Give a longer" in said
