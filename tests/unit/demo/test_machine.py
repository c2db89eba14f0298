"""What a container grants is what counts."""

import os

import pytest

from demo.machine import DemoError, Machine, find_machine


def test_a_container_limits_memory_and_cores(tmp_path):
    (tmp_path / "memory.max").write_text("2000000000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    machine = find_machine(tmp_path)
    assert (machine.memory_gb, machine.cores) == (2.0, 0.5)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    machine = find_machine(tmp_path)
    assert machine.memory_gb != 2.0 and machine.cores == len(os.sched_getaffinity(0)), "the machine's own"


def test_too_little_is_refused_and_little_is_said():
    with pytest.raises(DemoError, match=r"3\.0 GB are free"):
        Machine(3.0, 2).check()
    assert Machine(32.0, 4).check() == []
    warnings = Machine(15.0, 1).check()
    assert len(warnings) == 2 and "15.0 GB" in warnings[0] and "cores" in warnings[1]
