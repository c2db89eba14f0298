"""How many small faults the unit tests of control and idle-time code notice: a mutation score, drawn by seed.

    python -m benchmarks.mutation [--sample 150] [--seed 0] [--jobs 2] [--module costs/latency.py] [--all]

A mutant is the package with one place changed: a comparison, an operator, `and` for `or`, a `not` gone, a condition
turned round, min for max, a bound of a range or slice or an index off by one, a sign lost, a return without its value.
Literals are not changed, nor what is only said (messages, logs). Only the tests of the mirrored folder count, the
mirrored file first, and the first that fails ends the mutant; so does three times the processor time of them all.

mutmut and cosmic-ray were the alternatives. Neither draws a sample, and both start pytest anew for each mutant, which
takes longer than most of these tests; here a process that has imported everything else is forked.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stored import store

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
PACKAGES = {"speculation": "verl_tlt/speculation", "idle": "verl_tlt/idle"}
EQUIVALENT = ROOT / "benchmarks" / "mutation_equivalent.json"
"""Mutants that no test can tell from the code, with the reason: `{"FILE: CODE -> MUTANT": "reason"}`."""

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
SAID = ("logger", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    """From the repository's root."""
    line: int
    what: str
    """The changed expression before and after, as code."""
    number: int
    """Among the file's mutants."""

    @property
    def name(self) -> str:
        """The same in other revisions, as long as the expression is."""
        return f"{self.file}: {self.what}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a module."""
    for number, (node, changed) in enumerate(_places(ast.parse(path.read_text()))):
        what = f"{_short(ast.unparse(node))} -> {_short(ast.unparse(changed))}"
        yield Mutant(str(path.relative_to(ROOT)), getattr(node, "lineno", 0), what, number)


def source_of(mutant: Mutant) -> str:
    """The whole file, changed."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    node, changed = next(itertools.islice(_places(tree), mutant.number, None))
    return ast.unparse(_replaced(tree, node, changed))


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(what may be changed, what may stand in its place)"""
    said = {id(part) for node in ast.walk(tree) if _only_said(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        yield from ((node, changed) for changed in _changes(node) if id(node) not in said)


def _only_said(node: ast.AST) -> bool:
    """Messages, logs and types: no decision."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in SAID


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in SWAPS.get(type(op), ()):
                    yield _with(node, ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            for other in SWAPS.get(type(op), ()):
                yield _with(node, op=other())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.If() | ast.While() | ast.IfExp():
            if not isinstance(node.test, ast.Constant | ast.Compare | ast.UnaryOp):
                yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield _with(node, value=ast.Constant(None))
        case ast.Call(func=ast.Name(id="range"), args=args):
            yield from (_with(node, args=[*args[:-1], _beside(args[-1], op)]) for op in (ast.Add(), ast.Sub()))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield _with(node, func=ast.Name(CALLS[name], ast.Load()))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name)) if name in CALLS:
            yield _with(node, func=ast.Attribute(ast.Name("math", ast.Load()), CALLS[name], ast.Load()))
        case ast.Slice(lower=lower, upper=upper):
            yield from (_with(node, lower=_beside(lower, ast.Add())) for _ in range(lower is not None))
            yield from (_with(node, upper=_beside(upper, ast.Add())) for _ in range(upper is not None))
        case ast.Subscript(slice=ast.BinOp() as index, ctx=ast.Load()) if not isinstance(index.op, ast.BitOr):
            yield _with(node, slice=_beside(index, ast.Add()))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _beside(node: ast.expr | None, op: ast.operator) -> ast.expr:
    assert node is not None
    return ast.BinOp(node, op, ast.Constant(1))


def _replaced(tree: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """The tree with one node exchanged; nothing else is copied."""

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else super().generic_visit(_with(node, **_lists(node)))

    return ast.fix_missing_locations(Exchange().visit(tree))


def _lists(node: ast.AST) -> dict[str, object]:
    return {name: list(value) for name, value in ast.iter_fields(node) if isinstance(value, list)}


def _short(code: str) -> str:
    """An expression, or the head of a statement."""
    line = code.splitlines()[0]
    return line if len(line) <= 110 else line[:107] + "..."


# ---------------------------------------------------------------------- running


def mirrored(file: str) -> list[str]:
    """The mirrored folder's tests, the mirrored file's first."""
    package = next(name for name, folder in PACKAGES.items() if file.startswith(f"{folder}/"))
    own = f"test_{Path(file).stem}.py"
    found = sorted((ROOT / "tests" / "unit" / package).rglob("test_*.py"), key=lambda p: (p.name != own, str(p)))
    return [str(path) for path in found]


def run_tests(mutant: Mutant | None, tests: list[str], cpu_s: int) -> tuple[str, float]:
    """("killed", "survived" or "endless", seconds of processor time), in a process of its own.

    Args:
        mutant: None: the code as it is.
        tests: files.
        cpu_s: processor time after which it counts as endless; time on the wall says little on a busy machine.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _child(mutant, tests, cpu_s)
        finally:
            os._exit(99)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    ending = "endless" if code == -signal.SIGXCPU else "killed" if code else "survived"
    return ending, used.ru_utime + used.ru_stime


def _child(mutant: Mutant | None, tests: list[str], cpu_s: int) -> None:
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # these tests need none, and loading them takes its time
    if mutant is not None:
        source, target = source_of(mutant), str(ROOT / mutant.file)
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(self, fullname):
            if self.path == target:
                return compile(source, target, "exec")
            return original(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / of
    middle, spread = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - spread) / (1 + z * z / of), (middle + spread) / (1 + z * z / of)


def judge(chosen: list[Mutant], jobs: int, known: dict[str, str]) -> dict[str, object]:
    """Run the tests against each, and count."""
    started = time.monotonic()
    ending, used = run_tests(None, mirrored(chosen[0].file), 3600)
    if ending != "survived":
        raise SystemExit(f"The tests of {chosen[0].file} fail without a mutant.")
    longest = 10 + math.ceil(3 * used)

    def one(mutant: Mutant) -> str:
        own, *others = mirrored(mutant.file)  # most end with their own, and need not collect the others
        ending, _ = run_tests(mutant, [own], longest)
        if ending == "survived":
            ending, _ = run_tests(mutant, others, longest)
        print(f"{ending:9} {mutant.file}:{mutant.line}  {mutant.what}", flush=True)
        return ending

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, chosen))
    survivors = [m for m, what in zip(chosen, found, strict=True) if what == "survived"]
    equivalent = [m for m in survivors if m.name in known]
    killed, of = len(chosen) - len(survivors), len(chosen) - len(equivalent)
    return {
        "sample": len(chosen),
        "killed": killed,
        "of_them_endless": found.count("endless"),
        "equivalent": {m.name: known[m.name] for m in equivalent},
        "survived": [f"{m.file}:{m.line}: {m.what}" for m in survivors if m.name not in known],
        "score": round(killed / of, 4),
        "interval_95": [round(x, 4) for x in interval(killed, of)],
        "seconds": round(time.monotonic() - started),
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=150, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--module", default="", help="only files whose path ends so; nothing is kept")
    parser.add_argument("--all", action="store_true", help="no sample: every mutant")
    wanted = parser.parse_args()
    import numpy  # noqa: F401  what every fork would import
    import omegaconf  # noqa: F401
    import pytest  # noqa: F401

    os.chdir(ROOT)
    known = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.is_file() else {}
    found: dict[str, object] = {}
    for name, folder in PACKAGES.items():
        files = [path for path in sorted((ROOT / folder).rglob("*.py")) if str(path).endswith(wanted.module)]
        every = [mutant for path in files for mutant in mutants(path)]
        chosen = every if wanted.all else random.Random(wanted.seed).sample(every, min(wanted.sample, len(every)))
        if chosen:
            found[name] = {"mutants": len(every), **judge(sorted(chosen, key=lambda m: m.name), wanted.jobs, known)}
    result = {"seed": wanted.seed, "packages": found}
    print(json.dumps(result, indent=1))
    if not wanted.module:
        store(RESULT, result)


if __name__ == "__main__":
    main()
