"""The status line follows what the run writes."""

from demo.progress import Progress
from verl_tlt.trace.events import LoadSample, Phase, RunStarted, Step


def test_from_start_to_the_last_step():
    progress = Progress(total=2, now=100.0)
    assert progress.status(103.0) == "starting 3 s"
    progress.log_line("ray init kwargs: {'num_cpus': 16}", 104.0)
    assert progress.status(104.0) == "starting Ray 0 s"
    progress.log_line("(vLLMHttpServer pid=4711) INFO loading", 110.0)
    progress.log_line("(WorkerDict pid=4712) late output of an earlier part", 112.0)
    assert progress.status(115.0) == "loading the rollout engines 5 s"
    progress.event(RunStarted(t=120.0, step0=1))
    assert progress.status(121.0) == "step 1/2: rollout 1 s"
    progress.event(LoadSample(t=125.0, step=1, inflight={"a": 12, "b": 3}))
    assert progress.status(127.0) == "step 1/2: rollout 7 s, 12 + 3 requests in flight"
    progress.event(Phase(t=130.0, step=1, name="rollout", start=120.0, end=130.0))
    assert progress.status(131.0) == "step 1/2: log-probs 1 s"
    line = progress.event(Step(t=140.0, step=1, metrics={"critic/score/mean": 0.5}))
    assert line == "step 1/2 | reward 0.50"
    assert progress.status(141.0) == "step 2/2: rollout 1 s"
    progress.event(LoadSample(t=141.0, step=1, inflight={"a": 0}))  # a late event of the finished step
    assert progress.status(142.0) == "step 2/2: rollout 2 s"


def test_a_step_is_announced_once_whichever_source_has_it_first():
    progress = Progress(total=2, now=0.0)
    assert progress.finished(1, {"timing_s/gen": 2.0}, 1.0) == "step 1/2 | rollout 2.0 s"
    assert progress.event(Step(t=2.0, step=1, metrics={})) is None
    assert progress.done == 1
