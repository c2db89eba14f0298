"""Call a function right after a module has been imported.

verl loads plugins while it is half imported itself. Importing its trainers or vLLM at that moment would be slow,
circular or, in processes that never need them, wasteful. Standard library only.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[Any], None]
"""Takes the module; its parameter may have a class that declares what it uses of the module."""


def when_imported(module_name: str, callback: Callback) -> None:
    """Call `callback(module)` once `module_name` has been executed; at once if it already is.

    Callbacks of one module run in the order they were given, and again if it is reloaded. A module that is being
    executed counts as not yet imported. What a callback raises leaves through the import statement.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.callbacks.setdefault(module_name, []).append(callback)
    if (module := sys.modules.get(module_name)) is not None:
        _FINDER.unfinished.append((module_name, module, callback))
        _FINDER.call_finished()


def _is_executing(module: ModuleType) -> bool:
    """Whether the import system is still inside the module's body (a private mark of the spec since Python 3.3)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _call_after(loader: Loader, name: str) -> None:
    """Have a loader, which is the module's own, call the callbacks of `name` once it has executed the module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if module.__name__ != name:  # an archive's modules share a loader
            return execute(module)
        vars(loader).pop("exec_module", None)  # the class's own shows again
        execute(module)
        imported = sys.modules.get(name, module)  # a module may replace itself while it is executed
        for callback in list(_FINDER.callbacks.get(name, ())):
            callback(imported)

    loader.exec_module = exec_module  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    """First on `sys.meta_path`: finds modules that have callbacks, through the finders behind it; no others."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self.unfinished: list[tuple[str, ModuleType, Callback]] = []
        self.looking = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        self.call_finished()
        busy: set[str] = self.looking.__dict__.setdefault("names", set())
        if name not in self.callbacks or name in busy:
            return None
        busy.add(name)  # another plugin's finder may ask all finders too, including this one
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((s for s in specs if s is not None), None)
        finally:
            busy.discard(name)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, name)
        return spec

    def call_finished(self) -> None:
        """Call the callbacks whose module was there when they were given, once it has been executed."""
        ready = [entry for entry in self.unfinished if not _is_executing(entry[1])]
        self.unfinished = [entry for entry in self.unfinished if entry not in ready]
        try:
            while ready:
                name, module, callback = ready.pop(0)
                callback(sys.modules.get(name, module))
        finally:
            self.unfinished[:0] = ready  # one has raised: the others are called at the next import


_FINDER = _Finder()
