"""A shell script as a syntax tree: parsed, walked, its words and commands picked out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfigError

if TYPE_CHECKING:
    from tree_sitter import Node

MAIN = "verl.trainer.main_ppo"
MARK = re.compile("\ue000([0-9]+)\ue001")
"""Stands in a value for what only a run could tell: characters that no script may contain."""
LONGEST = 1_000_000
"""Characters of a script or of a value in it."""
_WORDS = {"concatenation", "expansion", "simple_expansion", "string", "arithmetic_expansion", "word", "raw_string"}
_WORDS |= {"ansi_c_string", "number", "brace_expression", "process_substitution"}
"""Nodes that are words, or parts of them: `words` reads their text, so the parser's faults in them do not count."""


def words_of_start(words: Sequence[str]) -> tuple[str, ...] | None:
    """What `main_ppo` is given by a command of these words, whatever program starts it; None: it does not start it."""
    for i, word in enumerate(words):
        joined = re.fullmatch(rf"-[A-Za-z]*m{re.escape(MAIN)}", word)
        if joined or (word == MAIN and i and re.fullmatch(r"-[A-Za-z]*m", words[i - 1])):
            return tuple(words[i + 1 :])
    return None


def parse(text: str, name: str) -> Node:
    """The syntax tree of a script; a `TLTConfigError` where it is none, or the parser is not installed."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        raise TLTConfigError("Scripts are read with tree-sitter: pip install tree-sitter tree-sitter-bash.") from None
    if len(text) > LONGEST or re.search("[\0\ue000\ue001]", text):
        raise TLTConfigError(f"{name} is no shell script: it is over {LONGEST} characters long, or has odd ones.")
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    for node in walk(root, below=lambda node: node.type not in _WORDS):
        if node.is_error or node.is_missing:
            said = shorten(text_of(node)) or node.type
            raise TLTConfigError(f"{name}, line {node.start_point.row + 1}, is no bash that can be read: `{said}`.")
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
