"""Every symbol of verl and vLLM that verl-tlt touches, looked up in a release's source text.

A release number says little about a function that begins with an underscore. So what is used is listed in
`symbols.yaml`, by our file that uses it, with the signature it relies on; a test compares the list with our imports.
The sources are those of the installed release, or of an unpacked wheel. Nothing of them is imported, so this works on a
machine that could not run them.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from verl_tlt.upstream.versions import location

_ROW = re.compile(r"([^\s(]+)(?:\((.*)\))?(?: has (.*?))?(?: moved_to (.*))?")


@dataclass(frozen=True)
class Symbol:
    """Something of verl's or vLLM's that our code calls, overrides, replaces or reads."""

    name: str  # `module:qualified.name`; for a module itself, `module:`
    takes: str = ""
    """Names of the first parameters, in order, `self` left out; space-separated like the next one."""
    has: str = ""  # names that the class or module must define; its bases within the package count
    says: tuple[str, ...] = ()  # fragments that its source must contain, where we rely on how it is written
    moved_to: str = ""  # where a later release defines it, if it is not handed on to the module in `name`
    used_by: str = ""  # our file

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def _symbol(row: str | dict[str, list[str]]) -> Symbol:
    """One row of `symbols.yaml`, which says how it is written."""
    text, says = next(iter(row.items())) if isinstance(row, dict) else (row, ())
    if (match := _ROW.fullmatch(text)) is None:
        raise ValueError(f"symbols.yaml: {text} is no symbol.")
    name, takes, has, moved_to = (part or "" for part in match.groups())
    return Symbol(name if ":" in name else f"{name}:", takes, has, tuple(says), moved_to)


_LISTED = yaml.safe_load(Path(__file__).with_name("symbols.yaml").read_text())
SYMBOLS = tuple(replace(_symbol(row), used_by=file) for file, rows in _LISTED.items() for row in rows)


class SourceTree:
    """The sources of one release below `root` (site-packages or an unpacked wheel), read without importing them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}

    def problem(self, symbol: Symbol) -> str | None:
        """How the release differs from what `symbol` says, in a few words; None: it does not."""
        home, _, qualified = symbol.name.partition(":")
        if symbol.moved_to and self._module(symbol.moved_to) is not None:
            home = symbol.moved_to
        if (parsed := self._module(home)) is None:
            return f"there is no module {home}"
        node: ast.AST = parsed[1]
        module = home
        for depth, part in enumerate(qualified.split(".") if qualified else []):
            inner = self._member(node, module, part) if depth else self.definition(module, part)
            if inner is None:
                return f"{home} has no {qualified}"
            node, module = inner
        if parameters := symbol.takes.split():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return "is no function"
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            arguments = [a for a in arguments if a not in ("self", "cls")]
            if arguments[: len(parameters)] != parameters:
                return f"takes ({', '.join(arguments)}) and not ({', '.join(parameters)}, ...)"
        names = {name for name, _, _ in self._members(node, module, assigned=True)} if symbol.has else set()
        if missing := [name for name in symbol.has.split() if name not in names]:
            return f"does not define {', '.join(missing)}"
        if symbol.says:
            source = self._source(node, module)
            if absent := next((fragment for fragment in symbol.says if fragment not in source), None):
                return f"does not say `{absent}`"
        return None

    def _source(self, node: ast.AST, module: str) -> str:
        """The lines of a definition or module; `ast.get_source_segment` takes 50 ms on files as long as vLLM's."""
        parsed = self._module(module)
        lines = parsed[0].split("\n") if parsed else []
        return "\n".join(lines[node.lineno - 1 : node.end_lineno] if isinstance(node, ast.stmt) else lines)

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        """Text and tree of a module; None where there is none."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
            text = path.read_text(encoding="utf-8") if path else ""
            self._modules[name] = (text, ast.parse(text)) if path else None
        return self._modules[name]

    def with_bases(self, node: ast.AST, module: str, depth: int = 0) -> Iterator[tuple[ast.AST, str]]:
        """A module or class with its module's name, then the classes it inherits, as far as these sources have them."""
        yield node, module
        for base in node.bases if isinstance(node, ast.ClassDef) and depth < 5 else ():
            parent = self.definition(module, base.id) if isinstance(base, ast.Name) else None
            if parent is not None and isinstance(parent[0], ast.ClassDef):
                yield from self.with_bases(*parent, depth + 1)

    def _members(self, node: ast.AST, module: str, assigned: bool = False) -> Iterator[tuple[str, ast.AST, str]]:
        """(name, definition, module) of all that a module or class with bases defines; `assigned`: `self.x =` too."""
        for owner, place in self.with_bases(node, module):
            for inner in getattr(owner, "body", []):
                yield from ((name, inner, place) for name in _bound(inner))
                for deep in ast.walk(inner) if assigned and isinstance(owner, ast.ClassDef) else ():
                    if isinstance(deep, ast.Attribute) and isinstance(deep.ctx, ast.Store):
                        yield deep.attr, deep, place

    def _member(self, node: ast.AST, module: str, name: str) -> tuple[ast.AST, str] | None:
        """(definition, module) of `name` in a module, or in a class with its bases; None: neither defines it itself."""
        members = self._members(node, module)
        return next(((n, place) for _, n, place in members if getattr(n, "name", None) == name), None)

    def definition(self, module: str, name: str, hops: int = 5) -> tuple[ast.AST, str] | None:
        """(definition, module) of a module's `name`, through imports: a package hands on what its modules define."""
        tree = self._module(module)
        if tree is None:
            return None
        if (member := self._member(tree[1], module, name)) is not None:
            return member
        for node in (n for n in tree[1].body if isinstance(n, ast.ImportFrom) and hops):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self.definition(self._absolute(node, module), alias.name, hops - 1)
        return None

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        """The module that a `from ... import` in `module` names."""
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        package = module if is_package else module.rpartition(".")[0]
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement of a module's or class's body binds, in either branch of an `if` or `try`."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (t.id for t in targets if isinstance(t, ast.Name))
        case ast.If() | ast.Try():
            for inner in (*node.body, *node.orelse):
                yield from _bound(inner)


def source_root(package: str) -> Path | None:
    folder = location(package)
    return None if folder is None else folder.parent
