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
from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.console import last_lines
from verl_tlt.commands.processes import ProcessTree, running, runs
from verl_tlt.config import TLTConfigError
from verl_tlt.flag import CONFIG, MAIN, OURS

GIVEN = "VERL_TLT_CAPTURED"
"""Variable with which a command goes on under the interpreter of the user's command: descriptor of a file that holds
the answer, and the environment in which the command was started."""
POLL_S = 0.2
_START, _END = r"(?:^|[\s;&|({`'\"/\\])", r"(?=[\s;&|)}`'\"<>]|$)"
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
    if GIVEN in os.environ:
        answer = _given()["answer"]
        os.close(int(os.environ[GIVEN]))
    else:
        check_words(command, yes)
        print(f"Running `{shlex.join(command)}` until it starts {MAIN}; nothing is trained.", file=sys.stderr)
        answer = run_until_answer(command, environment)
        if answer["prefix"] != sys.prefix:
            _go_on_under(answer)
    os.environ.clear()
    os.environ.update(answer["environment"])
    if lost := next((word for word in command if OURS.match(word) and word not in answer["arguments"]), None):
        raise TLTConfigError(f'{lost} does not reach {MAIN}: the script must pass its arguments on with "$@".')
    return recipe_of(answer)


def started_in() -> dict[str, str]:
    """The environment in which the user started this command; `capture` changes that of the process."""
    return _given()["around"] if GIVEN in os.environ else dict(os.environ)


def _given() -> dict[str, Any]:
    with open(int(os.environ[GIVEN]), encoding="utf-8", closefd=False) as file:
        file.seek(0)
        given: dict[str, Any] = json.load(file)
        return given


def check_words(command: Sequence[str], yes: bool) -> None:
    """Refuse a command in which one of a few words says that running it is not safe.

    Looks for words in the command, and in the shell scripts that it names; it understands neither.
    """
    lines = {"the command": [_done(" ".join(command))]}
    for place, word in enumerate(command):
        if os.path.isfile(word) and _is_shell_script(word, command[:place]):
            if b"\r\n" in (script := Path(word).read_bytes()):
                raise TLTConfigError(
                    f"Nothing was run: {word} has Windows line ends, which bash takes for parts of words. Remove them "
                    f"with `sed -i 's/\\r$//' {shlex.quote(word)}`."
                )
            read = script.decode(errors="replace").splitlines()
            lines[word] = _joined([_done(COMMENT.sub("", line)) for line in read])
    leaving, changing = list[tuple[str, str]](), list[tuple[str, str]]()  # (place, word)
    for source, texts in lines.items():
        for number, text in enumerate(texts, start=1):
            where = source if source == "the command" else f"line {number} of {source}"
            leaving += [(where, match[1]) for match in LEAVES.finditer(text)]
            changing += [(where, match[1]) for match in CHANGES.finditer(text)]
            files = [file for file in EMPTIES.findall(text) if os.path.isfile(file) and os.path.getsize(file)]
            changing += [(where, f"empty {file}") for file in files]
    if leaving:
        where, word = leaving[0]
        raise TLTConfigError(
            f"Nothing was run: {where} has `{word}`, which starts programs without the environment of this "
            "command. Put `verl-tlt ... --` directly before `python` there, or give verl's overrides alone."
        )
    if changing and not yes:
        listed = "; ".join(f"{where}: {word}" for where, word in changing)
        raise TLTConfigError(f"Nothing was run, because the command would also do this: {listed}. Allow it with --yes.")


def _joined(lines: list[str]) -> list[str]:
    """The lines of a script, those that a backslash continues at the place of their first."""
    for i in reversed(range(len(lines) - 1)):
        if lines[i].endswith("\\"):
            lines[i : i + 2] = [lines[i][:-1] + lines[i + 1], ""]
    return lines


def _done(line: str) -> str:
    """A line without comments, and without the quoted text that an echo or printf in it prints."""
    if line.lstrip().startswith("#"):
        return ""
    if not re.search(r"(^|[;&|{(])\s*(echo|printf)\b", line):
        return line
    quoted = r"((?:>\|?|\btee)\s*)?('[^']*'|\"[^\"`$]*\")"
    return re.sub(quoted, lambda match: match[0] if match[1] else "", line)


def _is_shell_script(file: str, words_before: Sequence[str]) -> bool:
    before = [os.path.basename(word) for word in words_before if not word.startswith("-")]
    if file.endswith(".sh") or before[-1:] in (["bash"], ["sh"]):
        return True
    with open(file, "rb") as stream:
        return re.match(rb"#!.*\b(ba|da|z)?sh\b", stream.readline(200)) is not None


def run_until_answer(command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> dict[str, Any]:
    """Run a command until a process of it has answered, or until it ends; all its processes are ended then.

    The answer is that of `verl_tlt.capture`, with the process's environment.
    """
    with tempfile.TemporaryDirectory(prefix="verl-tlt-capture-") as folder:
        file, log = Path(folder) / "answer.json", Path(folder) / "log"
        log.touch()  # an interrupt may come before the command has opened it
        try:
            with running(command, env=environment_for(CAPTURE, str(file), environment), log=log, cwd=cwd) as tree:
                while not file.exists() and (code := tree.status(MAIN)) is None:
                    _refuse_training(tree)
                    time.sleep(POLL_S)
                answer = json.loads(file.read_text()) if file.exists() else None
                if answer is not None and "process" in answer:
                    own = environment_of(answer["process"], file)
                    if own.get("TMPDIR") == str(tree.folder):  # not the script's, but this command's
                        del own["TMPDIR"]
                        own |= {name: value for name, value in environment.items() if name == "TMPDIR"}
                    answer["environment"] = own
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
    """Raise a `TLTConfigError` where `main_ppo` is without our variables, or has started Ray, so did not see them."""
    for process in tree.alive():
        with contextlib.suppress(psutil.Error):  # it has just ended
            own = runs(process, MAIN) and process.environ()
            unseen = own and not own.get(CAPTURE)
            if unseen or (process.name() == "raylet" and any(runs(p, MAIN) for p in process.parents())):
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
    return f"Its last lines:\n{last}" if (last := last_lines(log)) else "It printed nothing."


def _go_on_under(answer: dict[str, Any]) -> None:
    """Replace this process by the same command under the interpreter of the user's command."""
    descriptor = os.memfd_create("captured", 0)  # in memory, and handed on: the environment may hold secrets
    os.write(descriptor, json.dumps({"answer": answer, "around": dict(os.environ)}).encode())
    interpreter = answer["interpreter"]
    print(f"Going on with {interpreter}, which the command starts verl with.", file=sys.stderr, flush=True)
    environment = {**answer["environment"], GIVEN: str(descriptor)}
    try:
        os.execve(interpreter, [interpreter, "-P", "-m", "verl_tlt.commands.cli", *sys.argv[1:]], environment)
    except OSError as error:
        raise TLTConfigError(f"{interpreter}, which the command uses, cannot be started: {error.strerror}.") from error


def recipe_of(answer: dict[str, Any]) -> Recipe:
    """The recipe of a start of `main_ppo`, Hydra's own options among its arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", default=CONFIG)
    parser.add_argument("--config-path", "-cp", default="")
    parser.add_argument("--config-dir", "-cd", default="")
    parser.add_argument("--run", "-r", "--multirun", "-m", action="store_true")
    try:
        options, overrides = parser.parse_known_args(answer["arguments"])
    except argparse.ArgumentError as error:
        raise TLTConfigError(f"{MAIN} cannot read its {error}.") from error
    if unread := next((word for word in overrides if word.startswith("-")), None):
        raise TLTConfigError(f"{MAIN} does not train with {unread}: leave it out. Options of verl-tlt stand before --.")
    path = options.config_path
    if options.config_dir:
        folder = os.path.join(answer["directory"], options.config_dir)
        if os.path.isfile(os.path.join(folder, f"{options.config_name.removesuffix('.yaml')}.yaml")):
            overrides.append(f"hydra.searchpath=[{path or 'pkg://verl.trainer.config'}]")
            path = folder
        else:
            overrides.append(f"hydra.searchpath=[file://{folder}]")
    return Recipe(tuple(overrides), os.path.join(path, options.config_name), answer["directory"])
