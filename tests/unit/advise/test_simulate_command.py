"""`verl-tlt simulate` as a user calls it."""

import json

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, save_table

SMALL = ["--replicas", "2", "--requests", "16", "--steps", "2", "--median", "200", "--longest", "1000"]


def simulate(*words):
    done = CliRunner().invoke(app, ["simulate", *SMALL, *words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_run_is_a_table_and_a_file(tmp_path):
    out = tmp_path / "run.json"
    code, said = simulate("--out", str(out))
    content = json.loads(out.read_text())
    assert code == 0 and f"rollout {content['rollout_ratio']:.2f}x" in said and len(content["steps"]) == 2
    assert simulate("--seed", "1")[1] != said and simulate("--out", str(out))[1] == said


def test_recorded_lengths_and_costs_of_a_calibration(tmp_path):
    points = [
        LatencyPoint(b, 32 * b, k, 0.01 * (1 + 0.05 * (k + 1)) * (1 + 0.01 * b)) for b in (1, 32) for k in (-1, 0, 1, 3)
    ]
    table = save_table(tmp_path, TableKey("cpu", "toy", "0.28"), LatencyTable(tuple(points)))
    (tmp_path / "lengths").write_text("100\n200\n300\n")
    code, said = simulate("--cost", str(table), "--lengths", str(tmp_path / "lengths"))
    assert code == 0 and "whole steps" in said, said
    (tmp_path / "lengths").write_text("[100, 200]")
    assert simulate("--lengths", str(tmp_path / "lengths"))[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "0"], "at least one replica"),
        (["--requests", "1"], "a request for every replica"),
        (["--arms", "1,2"], "starting with 0"),
        (["--arms", "few"], "--arms takes whole numbers"),
        (["--policy", "goodputt"], "Did you mean goodput?"),
        (["--acceptance", "0.5"], "3 draft positions"),
        (["--acceptance", "1.5,1,1"], "--acceptance takes numbers"),
        (["--start", "0.1"], "as many at its start as at its ceiling"),
        (["--cost", "a-cray"], "--cost a-cray is neither one of qwen3-8b-h100"),
        (["--lengths", "nowhere"], "--lengths nowhere cannot be read"),
        (["--median", "-3"], "median > 0"),
        (["--fade", "2"], "--fade must be in 0..1"),
        (["--rest", "-1"], "--rest must not be negative"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be 1 or more"),
        (["--out", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, said):
    code, output = simulate(*words)
    assert code == 1 and said in output and output.splitlines()[-1].endswith((".", "?")), output


def test_files_that_say_nothing_are_one_sentence(tmp_path):
    bad = tmp_path / "bad"
    for text, words, said in (
        ("ten\n", "--lengths", "must hold whole numbers"), ("", "--lengths", "one or more whole numbers"),
        ("[0]", "--lengths", "above 0"), ("{", "--cost", "is no JSON"), ("[]", "--cost", "a step without drafts"),
        ('[{"batch": 1}]', "--cost", "A latency row must hold"),
    ):  # fmt: skip
        bad.write_text(text)
        code, output = simulate(words, str(bad))
        assert code == 1 and said in output, output
