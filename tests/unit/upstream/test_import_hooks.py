"""The post-import hook: when it fires, with what, and that it leaves no trace on the module."""

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader

import pytest

from verl_tlt.upstream.import_hooks import _FINDER, when_imported


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    """Writes `<name>.py` on the import path; forgets it, its callbacks and its module afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name, body):
        (tmp_path / f"{name}.py").write_text(body)
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
        _FINDER.callbacks.pop(name, None)


def test_each_fires_in_order_after_the_body_of_an_import_or_reload_and_at_once_for_an_imported_module(module_file):
    name, seen = module_file("hooked_later", "value = 1\n"), []
    when_imported(name, lambda m: seen.append(("first", m.value)))
    when_imported(name, lambda m: seen.append(("second", m.value)))
    assert seen == []
    module = importlib.import_module(name)
    assert seen == [("first", 1), ("second", 1)]
    importlib.reload(module)
    assert len(seen) == 4
    when_imported(name, lambda m: seen.append("at once"))
    assert seen[-1] == "at once"


def test_spec_and_loader_are_the_originals_afterwards(module_file):
    name = module_file("hooked_spec", "loader_in_body = __spec__.loader\n")
    when_imported(name, lambda m: None)
    module = importlib.import_module(name)
    assert type(module.__spec__.loader) is SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert module.loader_in_body is module.__loader__


def test_looking_without_importing_still_works(module_file):
    name, fired = module_file("hooked_look", "value = 1\n"), []
    when_imported(name, fired.append)
    assert importlib.util.find_spec(name).loader.get_source(name) == "value = 1\n" and fired == []


def test_a_module_that_replaces_itself_is_handed_over_as_replaced(module_file):
    name = module_file("hooked_swap", "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=7)\n")
    seen = []
    when_imported(name, lambda m: seen.append(m.value))
    importlib.import_module(name)
    assert seen == [7]


def test_an_error_of_the_callback_leaves_through_the_import(module_file):
    name = module_file("hooked_error", "")
    when_imported(name, lambda module: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)


def test_a_module_in_mid_execution_counts_as_not_yet_imported_and_an_error_leaves_the_others_for_the_next(module_file):
    body = (
        "from verl_tlt.upstream.import_hooks import when_imported\nseen = []\n"
        "for callback in (lambda m: 1 / 0, lambda m: seen.append(m.last), lambda m: seen.append('third')):\n"
        "    when_imported(__name__, callback)\n"
        "early, last = list(seen), 'end'\n"
    )
    module = importlib.import_module(module_file("hooked_half", body))
    after = module_file("hooked_half_after", "")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(after)
    assert module.early == module.seen == []
    importlib.import_module(after)
    assert module.seen == ["end", "third"]


def test_two_finders_that_ask_each_other_do_not_recurse(module_file, monkeypatch):
    class Asker:
        """A finder of another plugin that delegates to everybody else, as ours does."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "hooked_mutual":
                return None
            found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not Asker)
            return next((s for s in found if s is not None), None)

    name = module_file("hooked_mutual", "")
    fired = []
    when_imported(name, fired.append)
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Asker, *sys.meta_path[1:]])
    assert importlib.import_module(name) is fired[0]
