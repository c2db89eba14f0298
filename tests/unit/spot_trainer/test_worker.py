"""The spot trainer's process, without Ray."""

from tiny_trainer import plan_of, texts, verifier_arrays

from verl_tlt.spot_trainer.worker import SpotTrainerWorker


async def test_a_stop_that_arrives_before_its_session_ends_that_one_and_no_other(tmp_path):
    """Ray may start calls of an asynchronous actor in another order."""
    worker = SpotTrainerWorker(plan_of(tmp_path / "policy"), {})
    worker.trainer.add(1, texts(60), verifier_arrays())
    await worker.stop(1)
    ended = await worker.train(1, 0)
    assert (ended.outcome, ended.steps) == ("stopped", 0)
    assert (await worker.train(2, 0)).steps > 0
