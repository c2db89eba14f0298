"""A switch for a running job: a small file that the trainer reads between two rollouts.

The file lies in the trace directory, because whoever watches a run has that directory and perhaps nothing else of it.
Standard library and PyYAML only: `verl-tlt switch` runs where nothing else is installed.
"""

import reprlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from verl_tlt.errors import TLTError
from verl_tlt.files.disk import replacing

SWITCH_FILE = "tlt_control.yaml"
TRACE_FILE = "trainer.jsonl"
"""The trace, which the trainer writes in the same directory from the start of a run on."""


class SwitchError(TLTError, ValueError):
    """The switch's file cannot be understood; the message names file and key."""


@dataclass(frozen=True)
class RuntimeSwitch:
    """Which halves of TLT run from the next rollout on."""

    speculation: bool = True  # False: the drafter's pass does not run in any engine
    spot: bool = True  # False: no replica leaves early, and nothing is trained


def read_switch(directory: str | Path) -> RuntimeSwitch:
    """The switch as the file in a trace directory has it; all on where there is no file."""
    path = Path(directory) / SWITCH_FILE
    try:
        node = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return RuntimeSwitch()
    except (OSError, ValueError, LookupError, AttributeError, yaml.YAMLError, RecursionError) as error:
        raise SwitchError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if node is None:  # an empty file
        return RuntimeSwitch()
    if not isinstance(node, dict):
        raise SwitchError(f"{path} must hold lines such as `speculation: off`.")
    switches = asdict(RuntimeSwitch())
    for key, value in node.items():
        if key not in switches:
            raise SwitchError(f"{path}: {key} is not a switch; there are {' and '.join(switches)}.")
        if not isinstance(value, bool):  # YAML reads on and off as booleans
            raise SwitchError(f"{path}: {key} must be on or off, not {reprlib.repr(value)}.")
    return RuntimeSwitch(**node)


def write_switch(directory: str | Path, **changes: bool | None) -> RuntimeSwitch:
    """Change some switches of a run, atomically; None leaves one as it is. Errors: see `find_run` and `read_switch`."""
    directory = find_run(directory)
    switch = replace(read_switch(directory), **{k: v for k, v in changes.items() if v is not None})
    with replacing(directory / SWITCH_FILE) as file:
        file.write("".join(f"{key}: {'on' if value else 'off'}\n" for key, value in asdict(switch).items()).encode())
    return switch


def find_run(directory: str | Path) -> Path:
    """`directory`, if a run's trainer writes its trace there; else `SwitchError`: nobody would read the switch."""
    directory = Path(directory)
    if (directory / TRACE_FILE).is_file():
        return directory
    why = f"holds no {TRACE_FILE}" if directory.is_dir() else "does not exist"
    near = sorted(file.parent for file in directory.glob(f"*/{TRACE_FILE}"))
    hint = f"; did you mean {near[0]}?" if near else "."
    raise SwitchError(f"{directory} {why}, so it is not the trace directory of a run (tlt.trace.dir){hint}")
