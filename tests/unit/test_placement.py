"""Devices of the CPU platform: which core each is, and what runs there."""

import json
import os
import subprocess
import sys

CODE = """
import json, os, threading, time
from pathlib import Path
os.sched_setaffinity(0, {allowed})
from verl_cpu import placement

def affinities():
    return [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
{act}
"""


ALLOWED = sorted(os.sched_getaffinity(0))


def run(act, visible=None, allowed=ALLOWED):
    """What code prints in a process of its own, whose devices are `visible` and whose cores `allowed`."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    code = CODE.format(allowed=set(allowed), act=act)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_session_runs_on_its_replicas_core_and_the_other_threads_do_not():
    act = "with placement.device(1):\n    inside = affinities()\nprint(json.dumps([inside, affinities()]))"
    inside, after = run(act)
    assert sorted(inside) == sorted([[ALLOWED[1 % len(ALLOWED)]], ALLOWED])
    assert after == [ALLOWED] * 2


def test_devices_share_the_cores_in_turn():
    act = "print(json.dumps([placement.core_of(i) for i in range(3)]))"
    assert run(act) == [ALLOWED[i % len(ALLOWED)] for i in range(3)]
    assert run(act, allowed=ALLOWED[:1]) == ALLOWED[:1] * 3
    assert run(act, visible="1,2,3") == [ALLOWED[i % len(ALLOWED)] for i in (1, 2, 3)]
