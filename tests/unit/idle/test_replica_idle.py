"""The session planner's rules, with explicit times, and a random fleet that must never be starved."""

import itertools
import random

import pytest

from verl_tlt.idle import replica_idle as idle
from verl_tlt.idle.replica_idle import Command, ReplicaIdlePlanner, State, next_pause


def planner(replicas=("a", "b"), **changes):
    settings = {"expected_requests": 8, "settle_s": 0.1} | changes
    return ReplicaIdlePlanner(replicas, **settings)


def loaded(p, **inflight):
    """The phase has been dispatched: by default four requests on each of two replicas."""
    assert p.observe(0.0, inflight or {"a": 4, "b": 4}, pending=0) == []
    return p


def settle(p, inflight, now=1.0, pending=0, **more):
    """Two looks at the same load, far enough apart for any settle time used here."""
    p.observe(now, inflight, pending, **more)
    return p.observe(now + 0.5, inflight, pending, **more)


def loaded_and_leaving():
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 3}) == [Command("leave", "a")]
    return p


def trained(p, replica="a", now=2.0):
    """Take an idle replica all the way to TRAINING."""
    assert p.left(replica) == [Command("try_sleep", replica)]
    assert p.slept(replica) == [Command("train", replica)]
    p.training(replica, now)
    return p


@pytest.mark.parametrize("world", [{"pending": 1}, {"more": True}])
def test_none_leaves_while_work_can_arrive(world):
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 3}, now=1.0, **world) == []
    assert p.observe(2.0, {"a": 0, "b": 3}, pending=0) or p.observe(2.5, {"a": 0, "b": 3}, pending=0)
    assert p.state("a") is State.DRAINING


@pytest.mark.parametrize("changes", [{"spot_workers": ["b"]}, {"expected_requests": 18}])
def test_a_replica_that_cannot_train_or_carried_little_stays(changes):
    assert settle(loaded(planner(**changes)), {"a": 0, "b": 3}) == []


def test_half_the_fair_share_is_enough_and_counts_at_its_peak():
    p = planner(expected_requests=16)
    p.observe(0.0, {"a": 4, "b": 4}, pending=8)
    p.observe(0.1, {"a": 1, "b": 8}, pending=0)
    assert settle(p, {"a": 0, "b": 3}) == [Command("leave", "a")]


def test_before_dispatch_everybody_looks_idle_and_nobody_leaves():
    p = planner()
    assert settle(p, {"a": 0, "b": 0}) == []
    assert settle(p, {"a": 0, "b": 4}, now=2.0) == []  # dispatched to one replica so far
    assert sum(p.account(3.0).bubble_s.values()) == 0.0


@pytest.mark.parametrize(("requests", "pending"), [(1, 0), (0, 1)])
def test_settle_time_restarts_with_every_request_and_does_not_run_while_one_is_pending(requests, pending):
    p = loaded(planner(settle_s=0.25))
    for now, here, coming in ((7.0, 0, 0), (7.125, requests, pending), (7.5, 0, 0), (7.625, 0, 0)):
        assert p.observe(now, {"a": here, "b": 3}, pending=coming) == []
    assert p.observe(7.75, {"a": 0, "b": 3}, pending=0) == [Command("leave", "a")]


def test_the_last_serving_replica_never_leaves():
    p = trained(loaded_and_leaving())
    assert settle(p, {"b": 0}, now=3.0) == []
    assert p.state("b") is State.BUSY


def test_all_idle_at_once_is_the_end_and_not_a_bubble():
    p = loaded(planner())
    assert settle(p, {"a": 0, "b": 0}, now=1.0) == []
    p.end(4.0)
    assert p.account(4.0).bubble_s == {"a": 0.0, "b": 0.0}


def test_a_draining_replica_does_not_count_as_the_busy_one():
    p = loaded_and_leaving()
    # A request was on its way to a; meanwhile b runs empty. Were b to leave as well, nobody would serve.
    assert settle(p, {"a": 1, "b": 0}, now=2.0) == []


@pytest.mark.parametrize(("load", "pending"), [({"b": 3}, 2), ({"a": 0, "b": 0}, 0)])
def test_leaving_is_called_off_when_the_world_changes_on_the_way_out(load, pending):
    p = loaded_and_leaving()
    p.observe(2.0, load, pending)
    assert p.left("a") == [Command("rejoin", "a")]
    assert p.state("a") is State.BUSY


@pytest.mark.parametrize(("back_first", "sent"), [(False, Command("rejoin", "b")), (True, Command("try_sleep", "b"))])
def test_one_that_comes_back_with_a_request_counts_as_working_at_once(back_first, sent):
    p = loaded(planner("abc", expected_requests=12), a=4, b=4, c=4)
    assert settle(p, {"a": 0, "b": 0, "c": 2}) == [Command("leave", "a"), Command("leave", "b")]
    p.observe(2.0, {"a": 1, "b": 0, "c": 0}, pending=0)  # one had been on its way to a
    if back_first:
        assert p.refused("a", 2.0) == [Command("rejoin", "a")]
    assert p.left("b") == [sent]


def test_refusals_back_off_exponentially_up_to_a_ceiling():
    p = loaded(planner())
    load, now, pauses = {"a": 0, "b": 3}, 1.0, []
    p.observe(now, load, pending=0)
    now += 0.2
    assert p.observe(now, load, pending=0) == [Command("leave", "a")]
    for _ in range(7):
        p.left("a")
        assert p.refused("a", now) == [Command("rejoin", "a")]
        assert p.state("a") is State.BUSY
        asked = now
        while not p.observe(now, load, pending=0):
            now = round(now + 0.01, 6)
        pauses.append(now - asked)
    expected = [min(idle.LONGEST_RETRY_S, idle.FIRST_RETRY_S * 2**i) for i in range(7)]
    assert pauses == pytest.approx(expected, abs=0.02)


def test_a_refusal_restarts_the_idle_clock():
    p = loaded_and_leaving()
    p.left("a")
    p.refused("a", 3.0)
    p.observe(3.5, {"a": 0, "b": 3}, pending=0)
    p.end(4.0)
    assert p.account(4.0).bubble_s["a"] == pytest.approx(0.5)


def test_one_that_does_not_answer_whether_it_sleeps_stays_out_until_the_sync():
    """Its gate may be closed, and verl's balancer would send every new request to the server with the fewest."""
    p = loaded_and_leaving()
    p.left("a")
    p.failed("a", 2.0)
    assert settle(p, {"b": 3}, now=30.0) == [] and p.state("a") is State.IDLE
    assert p.recall() == [], "RL would wait for it each time the sampler sends more"
    assert p.end(31.0) == [] and p.account(31.0).failures == 1
    assert p.account(31.0).used_s["a"] == 0.0


def test_a_failure_in_training_leaves_the_replica_asleep_until_the_sync():
    p = trained(loaded_and_leaving(), now=2.0)
    p.failed("a", 5.0)
    assert p.state("a") is State.IDLE
    assert settle(p, {"b": 3}, now=6.0) == []
    assert p.end(7.0) == []
    assert p.account(7.0).used_s["a"] == pytest.approx(3.0)
    assert p.state("a") is not State.BUSY


@pytest.mark.parametrize("report", ["left", "slept", "refused"])
def test_reports_that_arrive_after_the_end_start_nothing(report):
    p = loaded_and_leaving()
    if report != "left":
        p.left("a")
    assert p.end(2.0) == []
    # The trainer has everybody sleep: back with the sync, once.
    assert (p.refused("a", 2.1) if report == "refused" else getattr(p, report)("a")) == []
    assert p.state("a") is not State.BUSY
    assert p.observe(3.0, {"a": 0, "b": 3}, pending=0) == []


def test_the_end_comes_although_one_replica_never_had_a_request():
    p = planner(("a", "b", "never"))
    p.observe(0.0, {"a": 4, "b": 4}, pending=0)
    p.observe(5.0, {"a": 0, "b": 0}, pending=0)
    p.end(9.0)
    assert p.account(9.0).end == 5.0


def test_a_look_after_the_end_moves_nobody_and_changes_no_account():
    p = loaded(planner())
    p.observe(1.0, {"a": 0, "b": 3}, pending=0)
    p.end(1.05)
    before = p.account(9.0)
    assert p.observe(2.0, {"a": 0, "b": 0}, pending=0) == []
    assert p.state("a") is State.BUSY and p.account(9.0) == before


def test_a_worker_that_was_only_just_started_is_stopped_too():
    p = loaded_and_leaving()
    p.left("a")
    assert p.slept("a") == [Command("train", "a")]
    assert p.end(2.0) == [Command("stop", "a")]
    p.stopped("a", 2.1)
    p.training("a", 2.2)  # overtaken by the stop
    assert p.account(9.0).used_s["a"] == 0.0


def test_a_worker_that_finished_by_itself_is_not_stopped():
    p = trained(loaded_and_leaving(), now=2.0)
    p.stopped("a", 4.0)
    assert p.end(9.0) == []
    p.stopped("a", 9.1)
    assert p.account(9.0).used_s["a"] == pytest.approx(2.0)


def test_accounting_of_a_phase():
    p = loaded(planner(("a", "b", "c"), expected_requests=12), a=4, b=4, c=4)
    p.observe(10.0, {"a": 0, "b": 2, "c": 2}, pending=0)
    assert p.observe(10.2, {"a": 0, "b": 2, "c": 2}, pending=0) == [Command("leave", "a")]
    trained(p, "a", now=11.0)
    assert p.state("a") is State.TRAINING
    p.observe(14.0, {"b": 0, "c": 2}, pending=0)
    p.observe(20.0, {"b": 0, "c": 0}, pending=0)  # the last request is done; the trainer notices at 22
    assert p.end(22.0) == [Command("stop", "a")]
    p.stopped("a", 22.25)
    assert p.state("a") is State.IDLE
    account = p.account(30.0)
    assert account.bubble_s == pytest.approx({"a": 10.0, "b": 6.0, "c": 0.0})
    assert account.used_s == pytest.approx({"a": 9.0, "b": 0.0, "c": 0.0})
    assert account.stop_s == pytest.approx({"a": 0.25})


def test_a_pause_before_more_requests_is_not_the_end():
    p = trained(loaded_and_leaving(), now=2.0)
    p.observe(3.0, {"b": 0}, pending=0)
    p.observe(4.0, {"b": 2}, pending=0)
    p.observe(9.0, {"b": 0}, pending=0)
    p.end(9.5)
    assert p.account(9.5).bubble_s["a"] == pytest.approx(8.0)


@pytest.mark.parametrize("seed", range(60))
def test_random_fleets_are_never_starved(seed):
    """A simulated fleet with stale counts, late arrivals, refills, refusals and failures.

    The true load is hidden: a routed request shows in the count only when the next look is taken, so the planner acts
    on stale numbers and only the server's answer protects the request.
    """
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(rng.randint(1, 6))]
    total = len(names) * rng.randint(2, 8)
    p = planner(tuple(names), expected_requests=total, settle_s=rng.choice([0.0, 0.1, 0.4]))
    serving, asleep = set(names), set()
    running = {n: 0 for n in names}
    pending, refill, now, sleeps = total, rng.choice([0, 0, total // 2]), 0.0, 0

    def carry_out(commands):
        nonlocal pending, sleeps
        while commands:
            command = commands.pop(0)
            match command:
                case Command("leave", n):
                    assert pending == 0 and refill == 0
                    if rng.random() < 0.2:
                        running[n] += 1  # routed between the look and the removal
                    serving.discard(n)
                    assert serving, "the last serving replica left"
                    assert any(running[o] for o in serving), "nobody with work was left behind"
                    commands += p.left(n)
                case Command("try_sleep", n):
                    if rng.random() < 0.1:
                        p.failed(n, now)
                    elif running[n]:
                        commands += p.refused(n, now)
                    else:
                        asleep.add(n)
                        sleeps += 1
                        commands += p.slept(n)
                case Command("train", n):
                    assert n in asleep
                    (p.failed if rng.random() < 0.1 else p.training)(n, now)
                case Command("stop", n):
                    p.stopped(n, now)
                case Command("rejoin", n):
                    assert n not in asleep
                    serving.add(n)

    for _ in range(3000):
        now += rng.uniform(0.01, 0.2)
        carry_out(p.observe(now, {n: running[n] for n in serving}, pending, more=refill > 0))
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
    assert not pending and not any(running.values()), "a request was stranded"
    carry_out(p.observe(now, {}, pending))
    carry_out(p.end(now + 1.0))
    asleep.clear()
    account = p.account(now + 1.0)
    for n in names:
        assert 0.0 <= account.used_s[n] <= account.bubble_s[n] + 1e-9
        assert account.bubble_s[n] <= now
    assert serving == {n for n in names if p.state(n) is State.BUSY}
    if len(names) == 1:
        assert sleeps == 0


def test_a_replica_that_the_balancer_lost_comes_back_and_is_counted():
    p = loaded(planner())
    assert p.observe(1.0, {"b": 4}, pending=0) == [Command("rejoin", "a")]
    assert p.observe(1.1, {"a": 0}, pending=0) == [Command("rejoin", "b")]
    assert p.account(2.0).lost == 2


def test_looks_become_rarer_while_nothing_changes_and_frequent_again_after_a_change():
    quiet = list(itertools.accumulate(range(12), lambda pause, _: next_pause(pause, 0.05, False), initial=0.05))
    assert all(b >= a for a, b in itertools.pairwise(quiet))
    assert quiet[-1] == pytest.approx(idle.PATIENCE * 0.05)
    assert next_pause(quiet[-1], 0.05, True) == 0.05
