"""Look up the symbols we rely on in a release's source text: of the installed one, or of an unpacked wheel.

Nothing is imported, so it works on a machine that could not run what it reads.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from verl_tlt.upstream.upstream_api import SYMBOLS, Symbol
from verl_tlt.upstream.versions import location

VLLM_MODELS = "vllm.model_executor.models"


class SourceTree:
    """The sources of one release below `root` (site-packages or an unpacked wheel), read without importing them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}

    def problem(self, symbol: Symbol) -> str | None:
        """How the release differs from what `symbol` says, in a few words; None: it does not."""
        if symbol.moved_to and self._module(symbol.moved_to) is not None:
            symbol = replace(symbol, name=f"{symbol.moved_to}:{symbol.name.partition(':')[2]}", moved_to="")
        module, _, qualified = symbol.name.partition(":")
        if (found := self._module(module)) is None:
            return f"there is no module {module}"
        node: ast.AST = found[1]
        for depth, part in enumerate(qualified.split(".") if qualified else []):
            inner = self._definition(module, part) if depth == 0 else self._member(node, module, part)
            if inner is None:
                return f"{symbol.name.partition(':')[0]} has no {qualified}"
            node, module = inner
        if wanted := symbol.takes.split():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return "is no function"
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            arguments = [a for a in arguments if a not in ("self", "cls")]
            if arguments[: len(wanted)] != wanted:
                return f"takes ({', '.join(arguments)}) and not ({', '.join(wanted)}, ...)"
        names = {name for _, name in self._members(node, module, assigned=True)} if symbol.has else set()
        if missing := [name for name in symbol.has.split() if name not in names]:
            return f"does not define {', '.join(missing)}"
        if symbol.says:
            source = self._source(node, module)
            if absent := next((fragment for fragment in symbol.says if fragment not in source), None):
                return f"does not say `{absent}`"
        return None

    def ancestors(self, module: str, name: str) -> set[str]:
        """Names of a class and of all classes it inherits, as far as they can be followed in these sources."""
        found = self._definition(module, name)
        if found is None or not isinstance(found[0], ast.ClassDef):
            return {name}
        bases = [base.id for base in found[0].bases if isinstance(base, ast.Name)]
        return {name}.union(*(self.ancestors(found[1], base) for base in bases))

    def table(self, module: str) -> Iterator[tuple[str, ast.expr]]:
        """(key, value) of every entry with a constant string as its key in the dicts that a module writes out."""
        tree = self._module(module)
        for node in ast.walk(tree[1]) if tree else ():
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value

    def _source(self, node: ast.AST, module: str) -> str:
        """The lines of a definition or module; `ast.get_source_segment` takes 50 ms on files as long as vLLM's."""
        found = self._module(module)
        lines = found[0].split("\n") if found else []
        return "\n".join(lines[node.lineno - 1 : node.end_lineno] if isinstance(node, ast.stmt) else lines)

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        """Text and tree of a module; None where there is none."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
            text = path.read_text(encoding="utf-8") if path else ""
            self._modules[name] = (text, ast.parse(text)) if path else None
        return self._modules[name]

    def _members(
        self, node: ast.AST, module: str, assigned: bool = False, depth: int = 0
    ) -> Iterator[tuple[ast.AST, str]]:
        """(definition, name) of what a module or class and its bases define; if `assigned`, `self.x = ...` too."""
        for inner in getattr(node, "body", []):
            yield from ((inner, name) for name in _bound(inner))
            if assigned and isinstance(node, ast.ClassDef):
                for deep in ast.walk(inner):
                    if isinstance(deep, ast.Attribute) and isinstance(deep.ctx, ast.Store):
                        yield deep, deep.attr
        if isinstance(node, ast.ClassDef) and depth < 5:
            for base in (base.id for base in node.bases if isinstance(base, ast.Name)):
                found = self._definition(module, base)
                if found is not None and isinstance(found[0], ast.ClassDef):
                    yield from self._members(*found, assigned, depth + 1)

    def _member(self, node: ast.AST, module: str, name: str) -> tuple[ast.AST, str] | None:
        """What a class or its bases define under `name`, and the module of the class."""
        inner = next((n for n, _ in self._members(node, module) if getattr(n, "name", None) == name), None)
        return None if inner is None else (inner, module)

    def _definition(self, module: str, name: str, hops: int = 5) -> tuple[ast.AST, str] | None:
        """What defines `name` of a module, and where: a package hands on what its modules define."""
        tree = self._module(module)
        if tree is None:
            return None
        if (found := self._member(tree[1], module, name)) is not None:
            return found
        for node in (n for n in tree[1].body if isinstance(n, ast.ImportFrom) and hops):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self._definition(self._absolute(node, module), alias.name, hops - 1)
        return None

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        """The module that a `from ... import` in `module` names."""
        if not node.level:
            return node.module or ""
        package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")[: len(module.split(".")) - node.level + package]
        return ".".join([*parts, *([node.module] if node.module else [])])


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


def check_symbols(root: Path, package: str, symbols: Sequence[Symbol] = SYMBOLS) -> list[tuple[Symbol, str | None]]:
    """Those of `symbols` in `package` with what is wrong with them below `root` (None: nothing), in the same order."""
    tree = SourceTree(root)
    return [(symbol, tree.problem(symbol)) for symbol in symbols if symbol.package == package]


@functools.cache
def serves_eagle3(architecture: str, root: Path | None = None) -> bool | None:
    """Whether vLLM can draft for an architecture with an EAGLE-3 head (`SupportsEagle3`); None: it has no class for it.

    `root` holds `vllm/`, the installed one if None.
    """
    if (root := root or source_root("vllm")) is None:
        return None
    tree = SourceTree(root)
    entry = dict(tree.table(f"{VLLM_MODELS}.registry")).get(architecture)
    if not isinstance(entry, ast.Tuple):
        return None
    module, name = (ast.literal_eval(part) for part in entry.elts[:2])
    return "SupportsEagle3" in tree.ancestors(f"{VLLM_MODELS}.{module}", name)
