"""The idle planner's rules, with explicit times, and a random fleet that must never be starved."""

import random

import pytest

from verl_tlt.idle.planner import RETRY_S, Command, IdlePlanner, Look, PendingWork, State, TrainerIdlePlanner


def planner(replicas=("a", "b"), candidates=None, *, expected_requests=8, settle_s=0.1):
    chosen = replicas if candidates is None else candidates
    return IdlePlanner(replicas, chosen, expected_requests=expected_requests, settle_s=settle_s)


def loaded(p, **inflight):
    """The phase has been dispatched: by default four requests on each of two replicas."""
    assert p.observe(Look(0.0, inflight or {"a": 4, "b": 4})) == []
    return p


def settle(p, inflight, now=1.0, ready=True, **work):
    """Two looks at the same load, far enough apart for any settle time used here."""
    p.observe(Look(now, inflight, PendingWork(**work), ready))
    return p.observe(Look(now + 0.5, inflight, PendingWork(**work), ready))


def training(p=None, name="a", now=2.0):
    """`a` has left and trains since 2.0."""
    p = p or loaded(planner())
    assert settle(p, {"a": 0, "b": 3}) == [Command("leave", name)]
    assert p.slept(name) == [Command("train", name)]
    p.training(name, now)
    return p


# ---------------------------------------------------------------- who leaves, and when


@pytest.mark.parametrize("world", [{"pending": 1}, {"more": True}, {"ready": False}])
def test_none_leaves_while_work_can_arrive_or_there_is_nothing_to_train_on(world):
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 3}, now=1.0, **world) == []
    assert settle(p, {"a": 0, "b": 3}, now=2.0) == [Command("leave", "a")] or p.state("a") is State.LEAVES


@pytest.mark.parametrize("changes", [{"candidates": ["b"]}, {"expected_requests": 18}])
def test_a_replica_of_another_node_or_one_that_carried_little_stays(changes):
    assert settle(loaded(planner(**changes)), {"a": 0, "b": 3}) == []


def test_half_the_fair_share_is_enough_and_counts_at_its_peak():
    p = planner(expected_requests=16)
    p.observe(Look(0.0, {"a": 4, "b": 4}, PendingWork(8)))
    p.observe(Look(0.1, {"a": 1, "b": 8}))
    assert settle(p, {"a": 0, "b": 3}) == [Command("leave", "a")]


def test_before_dispatch_everybody_looks_idle_and_nobody_leaves():
    p = planner()
    assert settle(p, {"a": 0, "b": 0}) == []
    assert settle(p, {"a": 0, "b": 4}, now=2.0) == []  # dispatched to one replica so far
    assert sum(p.idle_time(3.0).idle_s.values()) == 0.0


@pytest.mark.parametrize(("requests", "pending"), [(1, 0), (0, 1)])
def test_settle_time_restarts_with_every_request_and_does_not_run_while_one_is_pending(requests, pending):
    p = loaded(planner(settle_s=0.25))
    for now, here, coming in ((7.0, 0, 0), (7.125, requests, pending), (7.5, 0, 0), (7.625, 0, 0)):
        assert p.observe(Look(now, {"a": here, "b": 3}, PendingWork(coming))) == []
    assert p.observe(Look(7.75, {"a": 0, "b": 3})) == [Command("leave", "a")]


def test_one_replica_leaves_and_all_others_serve_on():
    p = loaded(planner("abc", expected_requests=12), a=4, b=4, c=4)
    assert settle(p, {"a": 0, "b": 0, "c": 2}) == [Command("leave", "a")]
    p.slept("a")
    p.training("a", 2.0)
    assert settle(p, {"b": 0, "c": 2}, now=3.0) == [] and p.state("b") is State.SERVES


def test_all_idle_at_once_is_the_end_and_no_idle_time():
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 0}) == []
    p.end(4.0)
    assert p.idle_time(4.0).idle_s == {"a": 0.0, "b": 0.0}


# ---------------------------------------------------------------- refusals, failures, recalls


def test_a_replica_that_refused_is_asked_again_after_a_pause():
    p = loaded(planner())
    load, now = {"a": 0, "b": 3}, 1.5
    assert settle(p, load, now=1.0) == [Command("leave", "a")]
    for _ in range(3):
        assert p.refused("a", now) == [Command("rejoin", "a")] and p.state("a") is State.SERVES
        for waited in (0.0, 0.5, RETRY_S - 0.1):
            assert p.observe(Look(now + waited, load)) == []
        now += RETRY_S
        assert p.observe(Look(now, load)) == [Command("leave", "a")]


def test_one_that_does_not_say_whether_it_sleeps_stays_out_and_another_may_take_over():
    """Its gate may be closed, and verl's balancer would send every new request to the server with the fewest."""
    p = loaded(planner("abc", expected_requests=12), a=4, b=4, c=4)
    assert settle(p, {"a": 0, "b": 2, "c": 2}) == [Command("leave", "a")]
    p.failed("a")
    assert p.recall() is None, "RL would wait for it each time the sampler sends more"
    assert settle(p, {"b": 0, "c": 2}, now=3.0) == [Command("leave", "b")]
    p.end(5.0)
    assert p.idle_time(5.0).failures == 1 and p.state("a") is not State.SERVES


def test_a_session_that_ended_by_itself_or_failed_is_the_phases_last():
    p = training(now=2.0)
    p.ended(4.0, over=True)
    assert p.state("a") is State.ASLEEP and settle(p, {"b": 3}, now=5.0) == []
    p.end(9.0)
    assert p.idle_time(9.0).trained_s == pytest.approx(2.0)


def test_a_recalled_replica_serves_again_and_another_one_may_take_over():
    p = loaded(planner("abc", expected_requests=12), a=4, b=4, c=4)
    assert settle(p, {"a": 0, "b": 2, "c": 2}) == [Command("leave", "a")]
    p.slept("a")
    p.training("a", 2.0)
    p.ended(5.0, over=False)
    assert p.recall() == "a"
    assert p.awake("a", 5.25) == [Command("rejoin", "a")] and p.recall() is None
    assert settle(p, {"a": 0, "b": 2, "c": 2}, now=6.0) == [], "it stays"
    assert settle(p, {"a": 1, "b": 0, "c": 2}, now=7.0) == [Command("leave", "b")]
    p.slept("b")
    p.training("b", 8.0)
    p.ended(10.0, over=False)
    p.observe(Look(11.0, {"a": 0, "c": 0}))
    p.end(12.0)
    time = p.idle_time(12.0)
    assert time.trained_s == pytest.approx(5.0)
    assert time.idle_s["a"] == pytest.approx(4.25), "until it served again"


def test_a_recall_restarts_the_settle_time_of_those_that_serve():
    p = loaded(planner(settle_s=0.4))
    p.observe(Look(1.0, {"a": 0, "b": 3}))
    assert p.recall() is None
    assert p.observe(Look(1.5, {"a": 0, "b": 3})) == []


def test_a_replica_that_the_balancer_lost_comes_back_and_is_counted():
    p = loaded(planner())
    assert p.observe(Look(1.0, {"b": 4})) == [Command("rejoin", "a")]
    assert p.observe(Look(1.1, {"a": 0})) == [Command("rejoin", "b")]
    assert p.idle_time(2.0).lost == 2


# ---------------------------------------------------------------- the end, and the account


@pytest.mark.parametrize("report", ["slept", "refused"])
def test_reports_that_arrive_after_the_end_start_nothing(report):
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 3}) == [Command("leave", "a")]
    p.end(2.0)
    assert (p.refused("a", 2.1) if report == "refused" else p.slept("a")) == []
    assert p.observe(Look(3.0, {"a": 0, "b": 3})) == []


def test_accounting_of_a_phase():
    p = loaded(planner("abc", expected_requests=12), a=4, b=4, c=4)
    p.observe(Look(10.0, {"a": 0, "b": 2, "c": 2}))
    assert p.observe(Look(10.2, {"a": 0, "b": 2, "c": 2})) == [Command("leave", "a")]
    p.slept("a")
    p.training("a", 11.0)
    p.observe(Look(14.0, {"b": 0, "c": 2}))
    p.observe(Look(15.0, {"b": 0, "c": 0}))  # a pause before more requests is not the end
    p.observe(Look(16.0, {"b": 0, "c": 2}))
    p.observe(Look(20.0, {"b": 0, "c": 0}))  # the last request is done; the trainer notices at 22
    p.end(22.0)
    p.ended(22.25, over=False)
    time = p.idle_time(30.0)
    assert time.idle_s == pytest.approx({"a": 10.0, "b": 6.0, "c": 0.0})
    assert (time.trained_s, time.end) == (pytest.approx(9.0), 20.0)


def test_the_end_comes_although_one_replica_never_had_a_request():
    p = planner(("a", "b", "never"))
    p.observe(Look(0.0, {"a": 4, "b": 4, "never": 0}))
    p.observe(Look(5.0, {"a": 0, "b": 0, "never": 0}))
    p.end(9.0)
    assert p.idle_time(9.0).end == 5.0


# ---------------------------------------------------------------- the trainer's own devices


def test_the_trainers_device_trains_once_the_wait_for_samples_has_settled():
    p = TrainerIdlePlanner("trainer", begin=10.0, settle_s=0.5)
    assert p.observe(Look(10.4, {})) == [] and p.observe(Look(10.6, {}, ready=False)) == []
    assert p.observe(Look(10.7, {"far": 3}, PendingWork(4, more=True))) == [Command("train", "trainer")]
    p.training("trainer", 10.7)
    assert p.observe(Look(11.0, {})) == []
    p.end(12.0)
    p.ended(12.1, over=False)
    time = p.idle_time(12.1)
    assert (time.idle_s["trainer"], time.trained_s) == (pytest.approx(2.0), pytest.approx(1.3))


# ---------------------------------------------------------------- at random


@pytest.mark.parametrize("seed", range(60))
def test_random_fleets_are_never_starved(seed):
    """A simulated fleet with stale counts, late arrivals, refills, recalls, refusals and failures.

    The true load is hidden: a routed request shows in the count only when the next look is taken, so the planner acts
    on stale numbers and only the server's answer protects the request.
    """
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(rng.randint(1, 6))]
    total = len(names) * rng.randint(2, 8)
    candidates = [name for name in names if rng.random() < 0.7]
    p = planner(tuple(names), candidates, expected_requests=total, settle_s=rng.choice([0.0, 0.1, 0.4]))
    serving, asleep, trains = set(names), set(), None
    running = {n: 0 for n in names}
    pending, refill, now = total, rng.choice([0, 0, total // 2]), 0.0

    def carry_out(commands):
        nonlocal trains
        while commands:
            command = commands.pop(0)
            match command:
                case Command("leave", n):
                    assert pending == 0 and refill == 0 and n in candidates and trains is None
                    if rng.random() < 0.2:
                        running[n] += 1  # routed between the look and the removal
                    serving.discard(n)
                    assert any(running[o] for o in serving), "nobody with work was left behind"
                    if rng.random() < 0.1:
                        p.failed(n)
                    elif running[n]:
                        commands += p.refused(n, now)
                    else:
                        asleep.add(n)
                        commands += p.slept(n)
                case Command("train", n):
                    assert n in asleep and trains is None
                    trains = n
                    p.training(n, now)
                case Command("rejoin", n):
                    assert n not in asleep
                    serving.add(n)

    def recall():
        nonlocal trains
        if trains is not None:
            p.ended(now, over=False)
            trains = None
        if (name := p.recall()) is not None:
            asleep.discard(name)
            carry_out(p.awake(name, now))

    for _ in range(3000):
        now += rng.uniform(0.01, 0.2)
        if rng.random() < 0.01:
            recall()
        carry_out(p.observe(Look(now, {n: running[n] for n in serving}, PendingWork(pending, more=refill > 0))))
        if trains is not None and rng.random() < 0.02:
            p.ended(now, over=rng.random() < 0.5)
            trains = None
        for _ in range(min(pending, rng.randint(0, 3))):
            running[rng.choice(sorted(serving))] += 1
            pending -= 1
        for n in names:  # replica 0 has the long tail
            if running[n] and rng.random() < (0.02 if n == "r0" else 0.15):
                running[n] -= 1
        if refill and not pending and not any(running.values()):
            pending, refill = refill, 0
        if not pending and not refill and not any(running.values()):
            break
        assert serving
    assert not pending and not any(running[n] for n in serving), "a request was stranded"
    p.end(now + 1.0)
    time = p.idle_time(now + 1.0)
    assert 0.0 <= time.trained_s <= sum(time.idle_s.values()) + 0.3
    assert all(seconds <= now + 1.0 for seconds in time.idle_s.values())
    assert serving == {n for n in names if p.state(n) is State.SERVES}
