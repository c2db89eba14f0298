"""A shell script as a syntax tree: parsed, walked, its words and commands picked out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfigError

if TYPE_CHECKING:
    from tree_sitter import Node

MAIN = "verl.trainer.main_ppo"
MARK = re.compile("\ue000([0-9]+)\ue001")
"""A mark, which stands in a value for what only a run could tell; no script may contain its characters."""
LONGEST = 1_000_000
"""Most characters of a script or of a value in it."""
_NAMED = re.compile(rf"(?<!\S)(-[A-Za-z]*m\s*|--module[\s=]){re.escape(MAIN)}(?![\w.])")
_ONLY_NAMES = re.compile(r"echo|printf|:|true|kill|p?kill|ps|pgrep|[ef]?grep|git|logger")
"""Programs that are given the words of a start and start nothing."""
_HANDS_ON = re.compile(
    r"python[\d.]*|env|nohup|setsid|exec|time|nice|ionice|chrt|timeout|stdbuf|unbuffer|taskset|numactl|ray|srun|uv|"
    r"conda|mamba|micromamba|poetry|pixi|pipenv|torchrun|accelerate|deepspeed|nsys|ncu|py-spy|coverage|debugpy|cProfile|"
    r"viztracer|pdb|memray|torch\.distributed\.(run|launch)|accelerate\.commands\.launch|run|job|submit|launch|profile|record"
)
"""Programs, modules of Python and commands of programs that start the words they are given as a command."""
_OTHERWISE = re.compile(r"xargs|parallel|find|watch|ssh|su|sudo|chroot|docker|podman|(ba|z|da)?sh|.*\.(py|sh)")
"""Programs that may give a start other words, also where they stand behind an option."""
_OPTION = re.compile(r"-(?!\w*[cm]$|-module$).*", re.DOTALL)
"""An option whose value may follow it; after `-c` and `-m`, which this leaves out, comes what is run."""
_LAUNCHERS = re.compile(r"--(runtime-env|export|env-file|working-dir|chdir|cwd|directory)\b")
"""Options that give a start variables or a directory of its own."""
_WORDS = {"concatenation", "expansion", "simple_expansion", "string", "arithmetic_expansion", "word", "raw_string"}
_WORDS |= {"ansi_c_string", "number", "brace_expression", "process_substitution"}
"""Nodes that are words, or parts of them: `words` reads their text, so the parser's faults in them do not count."""


@dataclass(frozen=True)
class Start:
    """A command that starts `main_ppo`."""

    words: tuple[str, ...]
    """Words after the name of the module."""
    environment: Mapping[str, str]
    directory: str
    line: int
    through: str = ""
    """A program that may give the start words or variables that are not known; "": there is none."""
    assumed: tuple[str, ...] = ()
    """Earlier commands, which were not run and are taken to go well, and options of its launcher that change little."""


def start_of(words: Sequence[str], environment: Mapping[str, str], directory: str, line: int) -> Start | None:
    """The start of `main_ppo` by a command of these words, whatever its first program; None: it is no such command."""
    at = next((i for i, word in enumerate(words[1:], 1) if _NAMED.fullmatch(f"{words[i - 1]} {word}")), None)
    at = next((i for i, word in enumerate(words) if _NAMED.fullmatch(word)), at)
    if _ONLY_NAMES.fullmatch(os.path.basename("".join(words[:1]))) or not _NAMED.search(" ".join(words)):
        return None
    if at is None:  # within a word, as of `bash -c`
        return Start((), environment, directory, line, shorten(" ".join(words)))
    own = dict(environment)
    through = _through(words[:at], own)
    assumed = tuple(f"`{shorten(word)}` (line {line})" for word in words[:at] if _LAUNCHERS.match(word))
    return Start(tuple(words[at + 1 :]), own, directory, line, through, assumed)


def _through(words: Sequence[str], environment: dict[str, str]) -> str:
    """The first word before `-m` that may give the start other words; changes `environment` as `env` does."""
    of_env = False
    for before, word in zip(("", *words), words, strict=False):
        program = os.path.basename(word)
        name, equals, value = word.removeprefix("-u").removeprefix("--unset=").partition("=")
        if of_env and (before == "-u" or word.startswith(("-u", "--unset="))):
            environment.pop(name, None)
        elif of_env and equals and not word.startswith("-"):
            environment[name] = value
        elif of_env and word in ("-i", "-", "--ignore-environment"):
            environment.clear()
        elif _HANDS_ON.fullmatch(program):
            of_env = program == "env"
        elif of_env or _OTHERWISE.fullmatch(program) or not (re.match(r"-|\d|\w+=", word) or _OPTION.fullmatch(before)):
            return shorten(word)
    return ""


def parse(text: str, name: str) -> Node:
    """The syntax tree of a script; a `TLTConfigError` where it is none."""
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    if len(text) > LONGEST or re.search("[\0\ue000\ue001]", text):
        raise TLTConfigError(f"{name} is no shell script: it is over {LONGEST} characters long, or has odd ones.")
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    for node in walk(root, below=lambda node: node.type not in _WORDS):
        if node.is_error or node.is_missing:
            fault = shorten(text_of(node)) or node.type
            raise TLTConfigError(f"{name}, line {node.start_point.row + 1}, is no bash that can be read: `{fault}`.")
    return root


def walk(node: Node, below: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """A node and all within it, those above first; nothing within a node for which `below` is false."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        if below(node):
            left.extend(reversed(node.children))


def text_of(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def spans_of(node: Node) -> list[tuple[Node, str]]:
    """The words of a command or array: the first node of each, and its text, which the parser may have cut up."""
    spans: list[tuple[Node, Node]] = []
    whole, begin = node.text or b"", node.start_byte
    for child in node.children:
        if child.type.endswith("_redirect") or child.type == "comment" or (node.type == "array" and child.type in "()"):
            continue
        gap = whole[spans[-1][1].end_byte - begin : child.start_byte - begin] if spans else b" "
        if gap.replace(b"\\\n", b""):
            spans.append((child, child))
        else:
            spans[-1] = (spans[-1][0], child)
    return [(a, whole[a.start_byte - begin : b.end_byte - begin].decode(errors="replace")) for a, b in spans]


def shorten(text: str) -> str:
    """A piece of a script for a sentence."""
    text = " ".join(MARK.sub("...", text).split())
    return text if len(text) <= 60 else text[:57] + "..."


def gives_up(body: Sequence[Node]) -> bool:
    """Whether the last command of a branch ends the script."""
    text = " ; ".join(text_of(node) for node in body if node.is_named and node.type != "comment")
    return re.search(r"(^|[\s;{])exit\b[^;|&\n]*[;}\s]*$", text) is not None
