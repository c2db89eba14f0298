"""Jobs that fail or hang, what a turn keeps, what a job's log says; real `main_ppo` processes that come to no step."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.compare import job
from verl_tlt.commands.compare.command import take_turns
from verl_tlt.commands.compare.job import accept_length_of, failure, read_rows, take_turn, with_cluster
from verl_tlt.commands.compare.plan import STOCK, Arm, Plan
from verl_tlt.commands.compare.record import CompareError, Record
from verl_tlt.commands.console import make_console

ARM = Arm(STOCK, "", False)


def plan_of(folder, *overrides):
    return Plan(Recipe(overrides), None, 4, folder)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (0, r"(?s)stock failed with exit status 1\..*/stock/job-1\.log.*no\.such\.key"),
        (1, r"global_step_4, from which stock is to go on, is gone"),
    ],
    ids=["fails", "has no checkpoint"],
)
def test_a_turn_that_comes_to_nothing_says_why(tmp_path, turn, said):
    told = []
    with pytest.raises(CompareError, match=said):
        take_turn(plan_of(tmp_path, "no.such.key=1"), ARM, turn, 60.0, told.append)
    assert set(told) <= {0}


def test_a_turn_that_could_not_be_recorded_is_taken_again(tmp_path, monkeypatch):
    """As after a kill between the end of a job and its record, or on a full disk; one checkpoint is left in the end."""
    plan, record = plan_of(tmp_path), Record(tmp_path, {})

    def run(name, command, env, log, folder, stall_s, look, keeps):
        assert keeps == [record.lock.fileno()], "so that a comparison that is killed leaves no job without a lock"
        last = plan.last_step(int(log.stem.removeprefix("job-")) - 1)
        data = {"timing_s/step": 2.0, "timing_s/gen": 1.0, "critic/score/mean": 0.5, "response_length/mean": 8.0,
                "prompt_length/mean": 2.0, "perf/total_num_tokens": 100.0}  # fmt: skip
        Path(env[job.FILE_LOGGER]).write_text(
            "".join(json.dumps({"step": last - n, "data": data}) + "\n" for n in (3, 2, 1, 0))
        )
        (tmp_path / "stock" / f"global_step_{last}").mkdir()
        return 0

    def take(rounds):
        take_turns(plan, [ARM], rounds, record, make_console(), 60.0, lambda: None)

    monkeypatch.setattr(job, "watched", run)
    take(1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr(record, "add", Mock(side_effect=OSError("the disk is full")))
        take(2)
    take(2)
    assert [turn.turn for turn in record.turns] == [0, 1]
    assert [path.name for path in (tmp_path / "stock").glob("global_step_*")] == ["global_step_8"]


@pytest.mark.parametrize(
    ("end", "stall_s", "said"),
    [
        ("exit 3", 60.0, "stock failed with exit status 3"),
        ("exit 3 | cat", 60.0, "stock ended after 0 of 4 steps"),
        ("sleep 600", 1.0, "stock has written nothing for 1 s"),
    ],
    ids=["fails", "piped", "hangs"],
)
def test_rays_logs_of_a_failed_turn_are_kept(tmp_path, monkeypatch, end, stall_s, said):
    monkeypatch.setattr(job, "LOOK_S", 0.1)
    script = f'mkdir -p "$TMPDIR/ray/session_1_2/logs"; echo why > "$TMPDIR/ray/session_1_2/logs/worker.err"; {end}'
    with pytest.raises(CompareError, match=rf"^{said}\. Ray's logs are in .*job-1\.ray\."):
        take_turn(Plan(Recipe(()), None, 4, tmp_path, ("bash", "-c", script)), ARM, 0, stall_s, lambda _: None)
    assert (tmp_path / "stock" / "job-1.ray" / "worker.err").read_text() == "why\n"


def test_a_job_that_logs_elsewhere_lives_as_long_as_its_steps_end(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "LOOK_S", 0.1)
    line = '{"step": %d, "data": {"timing_s/step": 1.0, "timing_s/gen": 0.5}}'
    script = f"for i in 1 2 3 4; do sleep 1; printf '{line}\\n' $i >> \"$VERL_FILE_LOGGER_PATH\"; done"
    plan = Plan(Recipe(()), None, 4, tmp_path, ("bash", "-c", f"{script}; exit 3"))
    with pytest.raises(CompareError, match=r"(?s)failed with exit status 3.*none: does the command send its output"):
        take_turn(plan, ARM, 0, 3.0, lambda _: None)


def test_rows_are_finished_steps(tmp_path):
    file = tmp_path / "job-1.jsonl"
    assert read_rows(file) == {}
    done = {"timing_s/step": 2.0, "sample": "one\u2028two\u0085three"}  # what ends a line for `str.splitlines` alone
    rows = [{"step": 0, "data": {"val/acc": 1.0}}, {"step": 1, "data": done}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(lines + '{"step": 2, "data": {"timing_s/st')
    assert read_rows(file) == {1: {"timing_s/step": 2.0}}


def test_a_job_finds_the_ray_cluster_that_was_started_here(tmp_path):
    """Ray looks for it in the temporary folder, and a job has one of its own."""
    here = {"TMPDIR": str(tmp_path)}
    assert "RAY_TMPDIR" not in with_cluster(here)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    found = with_cluster({**here, "MINE": "1"})
    assert (found["RAY_TMPDIR"], found["MINE"]) == (str(tmp_path), "1")
    assert with_cluster({**here, "RAY_TMPDIR": "/scratch"})["RAY_TMPDIR"] == "/scratch"
    assert found["RAY_DEDUP_LOGS"] == "0", "every replica's lines of accept length are counted"


def test_what_vllm_logs_of_accept_lengths_is_weighed_by_drafts():
    line = "INFO SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {} tokens, Drafted: {} tokens, Per"  # noqa: E501
    lines = [line.format("3.00", 200, 300), "another line", line.format("1.50", 150, 900)]
    assert accept_length_of(lines) == 1 + 350 / 400
    assert accept_length_of([*lines, line.format("1.00", 0, 1200)]) == 1 + 350 / 800, "400 more drafts of three tokens"
    assert accept_length_of([line.format("1.00", 0, 300)]) == 1.0, (
        "a drafter of which nothing is accepted drafts nevertheless"
    )
    assert accept_length_of(["another line"]) is None


def test_the_cause_is_the_last_error_without_rays_prefix(tmp_path):
    last = "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m torch.OutOfMemoryError: no memory left"
    lines = ["ValueError: first", last, "  File somewhere", "Error executing job with overrides: []"]
    (log := tmp_path / "log").write_text("\n".join(lines))
    assert failure("It failed.", log).startswith("It failed. Cause: torch.OutOfMemoryError: no memory left\n")
    log.write_text("\n".join([*map(str, range(30)), "all is well", "\x1b[31mbye" + "!" * 999]))
    what, *lines = failure("It failed.", log).splitlines()
    assert (what, lines[0], lines[1]) == ("It failed.", f"The last lines of {log}:", "    17")
    assert lines[-1].startswith("    bye!") and len(lines[-1]) < 320


def test_overrides_reach_main_ppo_of_the_users_command(tmp_path):
    """Hydra prints the composed config in the place of a run."""
    words = "--cfg job trainer.experiment_name=mine data.seed=5 +trainer.plugin=tlt tlt.spot.max_epochs=3"
    script = f"{sys.executable} -m verl.trainer.main_ppo {words}"
    plan = Plan(Recipe(("data.seed=5",)), None, 4, tmp_path, ("bash", "-c", script), ("data.seed=6",))
    command, environment = plan.job(ARM, 0, {"MINE": "yes, {it} is"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    config = yaml.safe_load(done.stdout)
    assert config["trainer"]["experiment_name"] == "stock" and config["data"]["seed"] == 6, done.stderr
    assert config["tlt"] == {"spot": {"max_epochs": 3}}, "without TLT's flag they do nothing"
    assert config["trainer"]["plugin"] is None and config["trainer"]["total_training_steps"] == 4
    assert config["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]["MINE"] == "yes, {it} is"
