"""Two real servers with real engines, verl's real load balancer, and our client, without a trainer.

Requests are fired all the time while one server is taken out of the balancer, asked to sleep, woken and put back, over
and over: so many are between the balancer's answer and the server's gate when the gate closes. None is lost, none is
cut short. At last a drafter's file is cut short before a reload, and an engine is killed in one.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import open_dict
from recorded import ray_cluster, wait_for

from benchmarks.faults.plan import ENGINE_KILLED, FAULTS
from benchmarks.faults.run import arm, fired
from verl_tlt.checks.recipe import compose
from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import store_name
from verl_tlt.trainer.run_setup import first_drafter
from verl_tlt.trainer.servers import DrafterStore, Servers
from verl_tlt.trainer.waits import CallFailed, ask

pytestmark = pytest.mark.engine

REQUESTS, TOKENS = 80, 24
TRUNCATED = replace(next(fault for fault in FAULTS if fault.action == "truncate"), step=1)
KILLED = replace(ENGINE_KILLED, step=2)
SOON_S = 120.0
"""Seconds for calls that once waited forever; they take one or two on a free machine."""
SPECULATION = {"policy": "fixed", "max_draft_length": 2}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it a CPU's engine has its worker in one more process
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the servers."""


def verls_config(policy, tlt: TLTConfig):
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={policy}", f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.dtype=float32", f"{rollout}.load_format=auto",
        f"{rollout}.enforce_eager=True", f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        f"{rollout}.max_model_len=256", f"{rollout}.max_num_seqs=16", f"{rollout}.max_num_batched_tokens=512",
        "data.max_prompt_length=64", "data.max_response_length=128",
    ]  # fmt: skip
    config = compose(overrides, "ppo_trainer")
    with open_dict(config):
        config.actor_rollout_ref.rollout.custom = {"tlt": tlt.to_dict()}
    return config


def make_server(config, rank: int, environment: Mapping[str, str]):
    """A server as verl places it, without resources; not launched yet."""
    import ray
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode

    from verl_tlt.server.server import TLTvLLMHttpServer

    variables = {"env_vars": {**ENVIRONMENT, **environment}}
    return ray.remote(TLTvLLMHttpServer).options(max_concurrency=100, num_cpus=0, runtime_env=variables).remote(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
        model_config=omega_conf_to_dataclass(config.actor_rollout_ref.model),
        rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=rank,
        node_rank=0, gpus_per_node=1, nnodes=1, cuda_visible_devices=str(rank),
    )  # fmt: skip


@pytest.fixture(scope="module")
def armed(tmp_path_factory):
    """Where the step is written in which a fault strikes."""
    return tmp_path_factory.mktemp("armed")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, armed):
    """(servers by name, balancer, config, their first drafter); faults may strike the second."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        import ray
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from tests.toy.assets import build_assets

        assets = build_assets(tmp_path_factory.mktemp("assets"), width="small", train_rows=4, val_rows=4)
        tlt = TLTConfig.from_dict({"speculation": SPECULATION})
        config = verls_config(assets.policy, tlt)
        drafter = ray.put(first_drafter(tlt, str(assets.policy), "float32", 260, None).served)
        name = store_name(ray.get_runtime_context().get_job_id())
        store = ray.remote(DrafterStore).options(name=name, num_cpus=0).remote([drafter])
        faults = arm(armed, (TRUNCATED, KILLED))
        servers = {f"server-{rank}": make_server(config, rank, faults if rank else {}) for rank in range(2)}
        ray.get([s.launch_server.remote() for s in servers.values()], timeout=300)
        balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote(servers=dict(servers))
        yield servers, balancer, config, drafter
        for actor in (*servers.values(), balancer, store):
            ray.kill(actor)


async def synced(server) -> None:
    """Wake it up as verl does around a weight sync: what level 2 dropped is garbage until it is sent again."""
    await server.wake_up.remote(["weights"])
    await server.collective_rpc.remote("reload_weights")
    await server.clear_kv_cache.remote()
    await server.wake_up.remote(["kv_cache"])


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(10, 60) for _ in range(rng.randint(4, 20))]


async def storm(servers, balancer, config) -> tuple[list, list[bool], int]:
    from verl_tlt.server.client import TLTLLMServerClient

    client = TLTLLMServerClient(config=config, load_balancer_handle=balancer)
    rng = random.Random(0)
    answers: list[bool] = []

    async def one(i: int):
        await asyncio.sleep(rng.random() * 8)
        params = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": True, "temperature": 1.0}
        return await client.generate(f"request-{i}", prompt_ids=prompt(rng), sampling_params=params)

    async def leave_and_return(stop: asyncio.Event) -> int:
        cycles = recalled = 0
        while not (stop.is_set() and recalled):  # with nothing left to decode the next one sleeps
            name = f"server-{cycles % 2}"
            await balancer.remove_servers.remote([name])
            recall = cycles % 3 == 2 or stop.is_set()  # before the weight sync, or with it
            answers.append(await servers[name].tlt_try_sleep.remote(recall))
            if answers[-1]:
                await asyncio.sleep(0.1)
                await (servers[name].tlt_recall.remote() if recall else synced(servers[name]))
                recalled += recall
            await balancer.add_servers.remote({name: servers[name]})
            cycles += 1
            await asyncio.sleep(0.02)
        return cycles

    stop = asyncio.Event()
    leaving = asyncio.create_task(leave_and_return(stop))
    outputs = await asyncio.gather(*(one(i) for i in range(REQUESTS)))
    stop.set()
    return outputs, answers, await leaving


def test_no_request_is_lost_or_truncated_while_replicas_leave_and_return(fleet):
    outputs, answers, cycles = asyncio.run(asyncio.wait_for(storm(*fleet[:3]), 900))
    assert cycles > 3
    assert len(outputs) == REQUESTS
    assert {len(o.token_ids) for o in outputs} == {TOKENS}
    assert {len(o.log_probs) for o in outputs} == {TOKENS}
    assert {o.stop_reason for o in outputs} == {"completed"}
    # Both answers of a server occurred: it slept, and it refused because of a request the balancer no longer showed.
    assert set(answers) == {True, False}


def ends_at_stop_strings(_server):
    from vllm.v1.engine.output_processor import OutputProcessor

    stock_does = hasattr(OutputProcessor, "_trim_surplus_tokens")  # vLLM 0.32
    return stock_does or hasattr(OutputProcessor.process_outputs, "__wrapped__")


def test_responses_end_at_stop_strings(fleet):
    """How, test_lossless_stops.py has."""
    import ray

    assert ray.get(fleet[0]["server-0"].__ray_call__.remote(ends_at_stop_strings), timeout=60)


def test_stock_client_would_have_lost_requests(fleet):
    """The same gate with verl's own client: a rejected request comes back empty, which is why ours exists."""
    from verl.workers.rollout.llm_server import LLMServerClient

    servers, balancer, config, _ = fleet

    async def rejected():
        client = LLMServerClient(config=config, load_balancer_handle=balancer)
        for name, server in servers.items():
            assert await server.tlt_try_sleep.remote(), name
        try:
            params = {"max_tokens": TOKENS, "ignore_eos": True}
            return await client.generate("late", prompt_ids=[11, 12, 13], sampling_params=params)
        finally:
            for server in servers.values():
                await synced(server)

    output = asyncio.run(asyncio.wait_for(rejected(), 300))
    assert output.stop_reason == "aborted" and not output.token_ids


def called_by_the_trainer(fleet, name):
    servers, balancer, _, drafter = fleet
    replica = SimpleNamespace(_server_address=name, _server_handle=servers[name], servers=[servers[name]])
    return Servers(SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=balancer), None, 1, drafter)


def test_a_recalled_server_has_compared_its_drafter_and_one_without_weights_stays_away(fleet):
    import ray

    server, called = fleet[0]["server-0"], called_by_the_trainer(fleet, "server-0")
    before = ray.get(server.tlt_status.remote())
    assert called.try_sleep("server-0", keep_weights=True)
    called.wake_up("server-0")
    after = ray.get(server.tlt_status.remote())
    assert after.ok and after.seconds != before.seconds, (before, after)
    assert called.try_sleep("server-0", keep_weights=False)
    with pytest.raises(CallFailed, match="without its weights"):
        called.wake_up("server-0")
    asyncio.run(synced(server))


def block(server):
    """It answers nobody for a while."""
    time.sleep(2.0)


@pytest.mark.parametrize("blocked", [True, False], ids=["before it began", "while it sleeps"])
def test_a_server_whose_answer_is_given_up_serves_again_after_the_weight_sync(fleet, blocked):
    """Where it had not begun, it begins before what the weight sync calls."""
    import ray

    server = fleet[0]["server-0"]
    for i, wait_s in enumerate([0.5] if blocked else [0.0, 0.003, 0.01, 0.03]):
        if blocked:
            server.__ray_call__.remote(block)
        with contextlib.suppress(CallFailed):
            slept = ask(server.tlt_try_sleep.remote(True), wait_s)
            assert slept and not blocked, "it answered in time"
        asyncio.run(synced(server))
        params = {"max_tokens": TOKENS, "ignore_eos": True}
        output = ray.get(server.generate.remote([11, 12, 13], params, f"after-{blocked}-{i}"), timeout=300)
        assert len(output.token_ids) == TOKENS, output


def test_verls_abort_takes_the_gate_over_and_parks_late_requests(fleet):
    """As at every other server: what verl resumes after the weight sync waits here instead of being sent elsewhere."""
    server = fleet[0]["server-1"]

    async def parked():
        assert await server.tlt_try_sleep.remote(True)
        await server.abort_all_requests.remote()
        params = {"max_tokens": TOKENS, "ignore_eos": True}
        late = asyncio.ensure_future(server.generate.remote([11, 12, 13], params, "parked"))
        done, _ = await asyncio.wait([late], timeout=1.0)
        assert not done, "rejected or served behind a closed gate"
        await server.wake_up.remote()
        assert not (await asyncio.wait([late], timeout=1.0))[0], "the gate is verl's to open"
        await server.resume_generation.remote()
        return await late

    output = asyncio.run(asyncio.wait_for(parked(), 300))
    assert len(output.token_ids) == TOKENS


@pytest.fixture
def struck(fleet, armed):
    """The server that faults strike, and a function that has one strike its next reload and returns what counts it."""

    def begin(fault):
        (armed / "step").write_text(str(fault.step))
        return lambda: fired(armed)

    return fleet[0]["server-1"], begin


def test_a_file_that_is_cut_short_costs_drafts_until_another_is_staged(fleet, struck):
    import ray

    server, begin = struck
    ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    assert ray.get(server.tlt_status.remote(), timeout=60).ok
    struck = begin(TRUNCATED)
    ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    status = ray.get(server.tlt_status.remote(), timeout=60)
    assert len(struck()) == 1
    assert not status.ok and TRUNCATED.log in status.error
    ray.get(server.tlt_stats.remote(), timeout=60)  # counts from here on
    sampling = {"max_tokens": 8, "ignore_eos": True}
    output = ray.get(server.generate.remote([11, 12, 13, 14], sampling, "x"), timeout=SOON_S)
    assert len(output.token_ids) == 8, "the engine lives"
    stats = ray.get(server.tlt_stats.remote(), timeout=60)
    assert stats.num_drafts == 0 and not stats.failure
    assert called_by_the_trainer(fleet, "server-1").stage(fleet[3]) == 0
    ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    assert ray.get(server.tlt_status.remote(), timeout=60).ok, "the next publication replaces it"


def is_busy(server):
    return bool(server.engine.output_processor.request_states)


def test_a_request_that_still_runs_at_the_end_of_the_run_is_aborted_and_a_later_one_waits(fleet):
    """Takes the server away."""
    import ray

    server, sampling = fleet[0]["server-0"], {"max_tokens": 180, "ignore_eos": True}
    running = server.generate.remote([11, 12, 13, 14], sampling, "running")
    wait_for(lambda: ray.get(server.__ray_call__.remote(is_busy)), SOON_S)
    closed = server.tlt_close.remote()
    assert ray.get(running, timeout=SOON_S).stop_reason == "aborted"
    late = server.generate.remote([11, 12, 13, 14], sampling, "late")
    ray.get(closed, timeout=SOON_S)
    assert not ray.wait([late], timeout=1.0)[0]


def test_an_engine_that_is_killed_while_it_reloads_ends_the_weight_sync_in_one_sentence(struck):
    """Last, since it takes the server away."""
    import ray

    server, begin = struck
    struck, start = begin(KILLED), time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match=KILLED.log):
        ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    assert len(struck()) == 2
    # What verl and the trainer may ask next.
    for call in (server.wake_up, server.sleep, server.tlt_try_sleep, server.clear_kv_cache, server.resume_generation):
        with pytest.raises(ray.exceptions.RayTaskError):
            ray.get(call.remote(), timeout=SOON_S)
    assert ray.get(server.tlt_stats.remote(), timeout=SOON_S).failure
    ray.get(server.tlt_status.remote(), timeout=SOON_S)
    ray.get(server.tlt_close.remote(), timeout=SOON_S)
    assert time.monotonic() - start < 4 * SOON_S
