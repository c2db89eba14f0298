"""What a job's log says."""

from verl_tlt.commands.compare.job import accepted, cause, failure


def test_what_vllm_logs_of_accept_lengths_is_weighed_by_drafts():
    line = "INFO SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {} tokens, Drafted: {} tokens, Per"  # noqa: E501
    lines = [line.format("3.00", 200, 300), "another line", line.format("1.50", 150, 900)]
    assert accepted(lines) == 1 + 350 / 400
    assert accepted([*lines, line.format("1.00", 0, 1200)]) == 1 + 350 / 800, "400 more drafts of three tokens"
    assert accepted([line.format("1.00", 0, 300)]) == 1.0, "a drafter of which nothing is accepted drafts nevertheless"
    assert accepted(["another line"]) is None


def test_the_cause_is_the_last_error_without_rays_prefix():
    last = "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m torch.OutOfMemoryError: no memory left"
    lines = ["ValueError: first", last, "  File somewhere", "Error executing job with overrides: []"]
    assert cause(lines) == "torch.OutOfMemoryError: no memory left"
    assert cause(["all is well"]) is None


def test_a_failure_names_cause_and_log_and_shows_its_end(tmp_path):
    (log := tmp_path / "turn-1.log").write_text(
        "\n".join([*map(str, range(30)), "ValueError: x", "\x1b[31mbye" + "!" * 999])
    )
    what, where, *lines = failure("It failed.", log).splitlines()
    assert what == "It failed. Cause: ValueError: x" and str(log) in where
    assert lines[0] == "    17" and lines[-1].startswith("    bye!") and len(lines[-1]) < 320
