"""GPUs of this machine, and whether a recipe wants more. Looks at device files only: no driver is asked."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import number, select

if TYPE_CHECKING:
    from omegaconf import DictConfig

NO_GPU = "No GPU found; --cpu measures on the CPU."


def visible_gpus(environment: Mapping[str, str], root: str = "/") -> int:
    """GPUs that a process with this environment would see; `root` holds `dev` and `sys`."""
    there = len(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    for node in glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")):  # AMD's; a CPU is 0
        there += Path(node).read_text().strip() not in ("", "0")
    there = there or int(os.path.exists(os.path.join(root, "dev/dxg")))  # WSL's: one or more
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if (asked := environment.get(name)) is not None:
            names = [one.strip() for one in asked.split(",")]
            until = next((i for i, one in enumerate(names) if one in ("", "-1")), len(names))
            there = min(there, until) if not any(one.startswith("MIG") for one in names) else until
    return there


def examine_gpus(config: DictConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the GPUs that the recipe asks for are seen from here; none where it runs on the CPU."""
    device, what = str(select(config, "trainer.device", "cuda")), "GPUs"
    if device == "cpu":
        return []
    if device != "cuda":
        return [Finding("if", what, f"trainer.device={device}: whether there are such devices was not looked at.")]
    nodes, each = number(config, "trainer.nnodes", 1), number(config, "trainer.n_gpus_per_node", 1)
    here = visible_gpus(environment)
    wanted = f"trainer.nnodes={nodes} and trainer.n_gpus_per_node={each} ask for {nodes * each} GPUs"
    if nodes * each <= here:
        return [Finding("ok", what, f"{here} GPUs are seen here")]
    return [Finding("if", what, f"{wanted}, and {here or 'none'} {'is' if here == 1 else 'are'} seen here.")]
