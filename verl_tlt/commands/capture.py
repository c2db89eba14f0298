"""How a user's own command starts `verl.trainer.main_ppo`: the command is run until it does, and then ended.

The command is not parsed. `verl_tlt.capture`, which verl imports in the command's processes, reports the arguments.
Whatever the command does before it starts `main_ppo` really happens. So it is searched for a few words: a program that
would leave this environment is refused, and one that ends, removes or overwrites something needs `--yes`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import verl_tlt.capture
from verl_tlt.capture import CAPTURE, MODULES, environment_for
from verl_tlt.checks.recipe import Recipe, config_folder
from verl_tlt.commands.console import last_lines
from verl_tlt.commands.processes import ProcessTree, running, runs
from verl_tlt.config import TLTConfigError
from verl_tlt.flag import CONFIG, MAIN, OURS

HANDED_ON = "VERL_TLT_CAPTURED"
"""Variable for this program when it goes on under the interpreter of the user's command: the descriptor of a file with
the answer, and with the environment in which the user started this program."""
POLL_S = 0.2
_START = r"(?:^|[\s;&|({`'\"/\\])"
"""What stands before the name of a program."""
_END = r"(?=[\s;&|)}`'\"<>]|$)"
"""What stands after it."""
LEAVES = re.compile(
    rf"{_START}(docker|podman|nerdctl|(?:apptainer|singularity) (?:exec|run)|enroot start|kubectl|ssh|pdsh|sudo|tmux"
    r"|screen -\w*d\w*|sbatch|qsub|bsub|ray job submit"
    r"|srun\s+(?:-\S+\s+(?:[^-\s]\S*\s+)?)*['\"]?--export[=\s](?!\s*['\"]?(?:[^\s'\"]*,)?(?i:all)(?:[\s,'\"]|$))[^\s;&|]*)(?=[\s<>;&]|$)"
)
"""Programs that start others without this environment, or elsewhere: the command would train there.

Tasks of `srun` have the environment unless `--export` has a list without ALL."""
CHANGES = re.compile(
    rf"{_START}(ray stop|pkill|kill(?!\s+-0\b)|killall|fuser\s.*-\w*k|rm\s+(?:-\S+\s+)*(?:-\w*[rR]\w*|--recursive)"
    r"|find\s.*-delete|git (?:-C \S+ )?(?:clean|reset)"
    r"|(?:pip[\d.]*|conda|conda env|mamba|micromamba|poetry|apt|apt-get)(?: -\S+)* (?:install|update)"
    rf"|uv (?:add|sync)){_END}"
)
"""What a script may do to other jobs, files and packages before it starts verl."""
EMPTIES = re.compile(r"(?:\btee\s+|(?<!>)>\|?\s*)['\"]?([^\s;&|<>()'\"$-][^\s;&|<>()'\"$]*)")
"""The file that a line writes its output to, in place of what is there."""
COMMENT = re.compile(r"\s#[^'\"]*$")
"""A comment after a command, unless it may be a part of a quoted text."""
SHELL_WORDS = ("cd", "source", ".", "export", "set", "eval", "module")


def capture(command: Sequence[str], yes: bool = False, environment: Mapping[str, str] = os.environ) -> Recipe:
    """How `command`, run in `environment`, starts `main_ppo`.

    If the command uses another Python, this program is started again under it. Afterwards this process has the
    environment of `main_ppo`. A `TLTConfigError` says why the command was not run, or that it did not start `main_ppo`.
    """
    if HANDED_ON in os.environ:
        answer = _handed_on()["answer"]
        os.close(int(os.environ[HANDED_ON]))
    else:
        check_words(command, yes)
        print(f"Running `{shlex.join(command)}` until it starts {MAIN}; nothing is trained.", file=sys.stderr)
        answer = run_until_answer(command, environment)
        if answer["prefix"] != sys.prefix:
            _go_on_under(answer)
    os.environ.clear()
    os.environ.update(answer["environment"])
    for word in command:
        if OURS.match(word) and word not in answer["arguments"]:
            raise TLTConfigError(f'{word} does not reach {MAIN}: the script must pass its arguments on with "$@".')
    return recipe_of(answer)


def started_in() -> dict[str, str]:
    """The environment in which the user started this command; `capture` changes that of the process."""
    if HANDED_ON not in os.environ:
        return dict(os.environ)
    environment: dict[str, str] = _handed_on()["started_in"]
    return environment


def _handed_on() -> dict[str, Any]:
    """The answer, and the environment in which the user started this program (`_go_on_under`)."""
    with open(int(os.environ[HANDED_ON]), encoding="utf-8", closefd=False) as file:
        file.seek(0)
        handed_on: dict[str, Any] = json.load(file)
        return handed_on


def check_words(command: Sequence[str], yes: bool) -> None:
    """Refuse a command in which one of a few words says that running it is not safe.

    The words are looked for in the command and in the shell scripts that it names; neither is parsed.
    """
    lines = {"the command": _executed(" ".join(command))}  # by where they stand
    for place, word in enumerate(command):
        if os.path.isfile(word) and _is_shell_script(word, command[:place]):
            for number, line in enumerate(_script_lines(word), start=1):
                lines[f"line {number} of {word}"] = line
    leaving: list[tuple[str, str]] = []  # (where, word)
    changing: list[tuple[str, str]] = []
    for where, line in lines.items():
        leaving += [(where, match[1]) for match in LEAVES.finditer(line)]
        changing += [(where, match[1]) for match in CHANGES.finditer(line)]
        for file in EMPTIES.findall(line):
            if os.path.isfile(file) and os.path.getsize(file):
                changing.append((where, f"empty {file}"))
    if leaving:
        where, word = leaving[0]
        raise TLTConfigError(
            f"Nothing was run: {where} has `{word}`, which starts programs without the environment of this "
            "command. Put `verl-tlt ... --` directly before `python` there, or give verl's overrides alone."
        )
    if changing and not yes:
        listed = "; ".join(f"{where}: {word}" for where, word in changing)
        raise TLTConfigError(f"Nothing was run, because the command would also do this: {listed}. Allow it with --yes.")


def _script_lines(file: str) -> list[str]:
    """What the lines of a shell script execute; a line that a backslash continues has the next one's text too."""
    script = Path(file).read_bytes()
    if b"\r\n" in script:
        raise TLTConfigError(
            f"Nothing was run: {file} has Windows line ends, which bash takes for parts of words. Remove them "
            f"with `sed -i 's/\\r$//' {shlex.quote(file)}`."
        )
    lines = [_executed(COMMENT.sub("", line)) for line in script.decode(errors="replace").splitlines()]
    for i in reversed(range(len(lines) - 1)):
        if lines[i].endswith("\\"):
            lines[i] = lines[i][:-1] + lines[i + 1]
            lines[i + 1] = ""  # so that the numbers of later lines stay
    return lines


def _executed(line: str) -> str:
    """A line without comments, and without the quoted text that an echo or printf in it prints."""
    if line.lstrip().startswith("#"):
        return ""
    if not re.search(r"(^|[;&|{(])\s*(echo|printf)\b", line):
        return line
    quoted = r"((?:>\|?|\btee)\s*)?('[^']*'|\"[^\"`$]*\")"
    return re.sub(quoted, lambda match: match[0] if match[1] else "", line)


def _is_shell_script(file: str, words_before: Sequence[str]) -> bool:
    before = [os.path.basename(word) for word in words_before if not word.startswith("-")]
    if file.endswith(".sh") or (before and before[-1] in ("bash", "sh")):
        return True
    with open(file, "rb") as stream:
        return re.match(rb"#!.*\b(ba|da|z)?sh\b", stream.readline(200)) is not None


def run_until_answer(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a command until a process of it has answered, or until it ends; all its processes are ended then.

    The answer is that of `verl_tlt.capture`, with the process's environment.
    """
    with tempfile.TemporaryDirectory(prefix="verl-tlt-capture-") as folder:
        file = Path(folder) / "answer.json"
        log = Path(folder) / "log"
        log.touch()  # an interrupt may come before the command has opened it
        try:
            own = environment_for(CAPTURE, str(file), environment)
            with running(command, env=own, log=log, own_tmpdir=False) as tree:  # what the script puts there stays
                code: int | None = None
                while not file.exists():
                    code = tree.status(MAIN)
                    if code is not None:
                        break
                    _refuse_training(tree)
                    time.sleep(POLL_S)
                answer = json.loads(file.read_text()) if file.exists() else None
                if answer is not None and "process" in answer:
                    answer["environment"] = environment_of(answer["process"], file)
                tree.kill()
        except KeyboardInterrupt:
            print(f"Ended before it started {MAIN}. {_printed(log)}", file=sys.stderr)
            raise
        except OSError as error:
            if error.filename != command[0]:
                raise
            raise TLTConfigError(_not_started(command[0], error)) from error
        if answer is None:
            raise TLTConfigError(_no_answer(command, code, log))
    if "other" in answer:
        remedy = "Of a program of your own check what it prints with --cfg job: verl-tlt doctor --config FILE"
        raise TLTConfigError(f"The command starts {answer['other']}, not {MAIN}. It was ended. {remedy}.")
    return answer


def environment_of(process: int, file: Path) -> dict[str, str]:
    """The environment with which the process that answers in `file` was started, without this package's variables."""
    try:
        own = psutil.Process(process).environ()
        if own.get(CAPTURE) != str(file):  # its number is one of another machine or container
            raise psutil.NoSuchProcess(process)
    except psutil.Error as error:
        raise TLTConfigError(
            f"The environment of {MAIN} cannot be read, as in a container ({error}). Put `verl-tlt ... --` directly "
            "before `python` there, or give verl's overrides alone."
        ) from error
    del own[CAPTURE]
    modules = [name for name in own.pop(MODULES, "").split(",") if name not in ("", verl_tlt.capture.__name__)]
    if modules:
        own[MODULES] = ",".join(modules)
    return own


def _not_started(program: str, error: OSError) -> str:
    """Why the first word of a command is not a program, and what to write instead."""
    remedy = ""
    if os.path.isfile(program):
        remedy = f" If it is a script for bash, write `bash {program}`."
    elif program in SHELL_WORDS or re.search(r"[=\s]", program):
        remedy = " No shell reads this command: put variables before verl-tlt, and shell code into bash -c '...'."
    elif os.path.isdir(program):
        remedy = " It is a folder."
    return f"{program} cannot be started: {error.strerror}.{remedy}"


def _refuse_training(tree: ProcessTree) -> None:
    """Raise a `TLTConfigError` where `main_ppo` is without our variables, or starts or joins Ray, so did not see them.

    It joins where its Python has a connection: until it answers it only imports verl, which makes none.
    """
    for process in tree.alive():
        with contextlib.suppress(psutil.Error):  # it has just ended
            starts = runs(process, MAIN)
            environment = process.environ() if starts else {}
            lacks_variables = bool(environment) and not environment.get(CAPTURE)
            is_python = starts and os.path.basename(process.exe()).startswith("python")  # and not srun or uv
            joins = is_python and any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))
            begins = process.name() == "raylet" and any(runs(p, MAIN) for p in process.parents())
            if lacks_variables or joins or begins:
                what = f"The command starts {MAIN} without the variables {CAPTURE} and {MODULES}"
                raise TLTConfigError(f"{what} of its environment: keep them in the script. It was ended at once.")


def _no_answer(command: Sequence[str], code: int | None, log: Path) -> str:
    if "No module named 'verl_tlt'" in log.read_text(errors="replace"):
        return f"The Python that the command starts verl with does not have verl-tlt: install it there. {_printed(log)}"
    ended = f"`{shlex.join(command)}` ended with exit status {code} and did not start {MAIN}."
    if "srun" in map(os.path.basename, command):
        ended += " srun may start it on another node, which cannot answer: leave srun out, inside the job."
    return f"{ended} {_printed(log)}"


def _printed(log: Path) -> str:
    last = last_lines(log)
    return f"Its last lines:\n{last}" if last else "It printed nothing."


def _go_on_under(answer: dict[str, Any]) -> None:
    """Replace this process by the same command under the interpreter of the user's command."""
    descriptor = os.memfd_create("captured", 0)  # in memory, and handed on: the environment may hold secrets
    os.write(descriptor, json.dumps({"answer": answer, "started_in": dict(os.environ)}).encode())
    interpreter = answer["interpreter"]
    print(f"Going on with {interpreter}, which the command starts verl with.", file=sys.stderr, flush=True)
    environment = {**answer["environment"], HANDED_ON: str(descriptor)}
    try:
        os.execve(interpreter, [interpreter, "-P", "-m", "verl_tlt.commands.cli", *sys.argv[1:]], environment)
    except OSError as error:
        raise TLTConfigError(f"{interpreter}, which the command uses, cannot be started: {error.strerror}.") from error


def recipe_of(answer: dict[str, Any]) -> Recipe:
    """The recipe with which `main_ppo` is started; its arguments may have options of Hydra's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", default=CONFIG)
    parser.add_argument("--config-path", "-cp", default="")
    parser.add_argument("--config-dir", "-cd", default="")
    parser.add_argument("--run", "-r", "--multirun", "-m", action="store_true")
    try:
        options, overrides = parser.parse_known_args(answer["arguments"])
    except argparse.ArgumentError as error:
        raise TLTConfigError(f"{MAIN} cannot read its {error}.") from error
    for word in overrides:
        if word.startswith("-"):
            options_of_ours = "Options of verl-tlt stand before --."
            raise TLTConfigError(f"{MAIN} does not train with {word}: leave it out. {options_of_ours}")
    path = options.config_path
    if options.config_dir:
        more = os.path.join(answer["directory"], options.config_dir)
        file = f"{options.config_name.removesuffix('.yaml')}.yaml"
        if os.path.isfile(os.path.join(more, file)) and not os.path.isfile(os.path.join(config_folder(path), file)):
            overrides.append(f"hydra.searchpath=[file://{config_folder(path)}]")
            path = more
        else:
            overrides.append(f"hydra.searchpath=[file://{more}]")
    return Recipe(tuple(overrides), options.config_name, answer["directory"], path)
