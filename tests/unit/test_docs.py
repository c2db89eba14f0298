"""The pages say what the code says: settings, metrics, trace events and links are compared with it."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from test_imports import FRAMEWORKS, FRAMEWORKS_OF, MAY_IMPORT, SHARED

import verl_tlt
from verl_tlt import drafter
from verl_tlt.config import TLTConfig
from verl_tlt.trace.events import EVENT_TYPES

PACKAGE = Path(verl_tlt.__file__).parent
ROOT = PACKAGE.parent
DOCS = ROOT / "docs"
CONTROL = ("replay", "foreign", "drain", "changing", "overhead", "steady")
EARLIER = {
    "control drain", "drafter_merging", "drafter_objectives", "drafter_study_costs", "endurance", "endurance_leaks",
    "resume", "same_tokens",
}  # fmt: skip
"""Results that were recorded before files kept their machine; a new recording leaves this set."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted(DOCS.glob("*.md"))]
OF_TODAY = [page for page in PAGES if page.name != "migration.md"]
"""The other names what has gone."""


@pytest.fixture(scope="module")
def generate(beside_the_pages):
    return importlib.import_module("generate")


@pytest.fixture(scope="module")
def tables(beside_the_pages):
    return importlib.import_module("tables")


@pytest.fixture(scope="module")
def beside_the_pages():
    """Code in docs/ can be imported."""
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


def keys(tree, prefix="tlt"):
    """Full names of all settings and of their sections."""
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        yield name
        yield from keys(value, name) if isinstance(value, dict) else ()


def names_read(*, outside):
    """Attributes and strings in the package's code, one module left out."""
    for path in PACKAGE.rglob("*.py"):
        if path == outside:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def strings(path):
    """The strings of a module; what is filled in is `…`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.0-9]*[sdf]", "…", node.value)


def test_the_settings_page_is_the_generated_one(generate):
    assert generate.PAGE.read_text() == generate.render(), "run `python docs/generate.py`"


def test_the_page_of_patches_is_the_generated_one(generate):
    assert generate.PATCHES_PAGE.read_text() == generate.render_patches(), "run `python docs/generate.py`"


def test_the_interface_page_is_the_generated_one_and_has_every_name(generate):
    page = generate.API_PAGE.read_text()
    assert page == generate.render_api(), "run `python docs/generate.py`"
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == set(drafter.__all__) - {"DrafterError"}


def test_the_tables_of_results_are_those_of_the_files(tables):
    pages = [page.read_text() for page in (tables.PAGE, tables.README)]
    assert pages == [tables.render(page) for page in pages], "run `python docs/generate.py`"
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(tables.TABLES)


def test_a_figure_that_differs_from_its_file_is_seen(tables):
    page = tables.PAGE.read_text()
    for block in tables.BLOCK.finditer(page):
        cell = re.findall(r"\d", block[2])[-1]
        wrong = (str((int(cell) + 1) % 10)).join(block[2].rsplit(cell, 1))
        assert tables.render(page.replace(block[2], wrong, 1)) == page


def test_every_file_of_results_is_named_in_the_list(tables):
    named = set(re.findall(r"benchmarks/results/(\w+)\.json\)", tables.PAGE.read_text()))
    study = {"drafter_study_costs"}  # on the study's own page
    assert {path.stem for path in tables.FILES.glob("*.json")} - study == named


def test_every_file_of_results_says_what_it_was_measured_on(tables):
    """With the processor's flags and the commit; `control.json` says it of every part, whose runs are not one."""
    told = {}
    for path in tables.FILES.glob("*.json"):
        found = json.loads(path.read_text())
        parts = {f"control {part}": found.get(f"{part}_on", {}) for part in CONTROL}
        told |= parts if path.stem == "control" else {path.stem: found.get("machine", {})}
    missing = {name for name, on in told.items() if not {"commit", "cpu", "cpu_flags", "versions"} <= set(on)}
    assert missing == EARLIER
    listed = re.search(r"do not say it: ([^.]*)\.", tables.PAGE.read_text())[1]
    assert set(re.findall(r"`([\w ]+)`", listed)) == EARLIER


def test_every_setting_of_the_yaml_is_on_the_settings_page():
    tree = OmegaConf.to_container(OmegaConf.load(PACKAGE / "conf" / "tlt" / "default.yaml"))["tlt"]
    page = (DOCS / "configuration.md").read_text()
    for section, settings in tree.items():
        for key in settings:
            assert f"| `tlt.{section}.{key}` |" in page


def test_the_settings_page_admits_what_nothing_reads(generate):
    noted = set(re.findall(r"`(\w+)` has no effect", generate.render()))
    read = set(names_read(outside=PACKAGE / "config.py"))
    leaves = {name.rpartition(".")[2] for name in keys(TLTConfig().to_dict())}
    assert noted == leaves - read, "a note in docs/generate.py is missing, or no longer true"


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda p: p.name)
def test_settings_named_in_a_page_exist(page):
    known = set(keys(TLTConfig().to_dict()))
    found = set(re.findall(r"\btlt\.[a-z]+(?:\.[a-z_]+)*", page.read_text()))
    assert found <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_a_heading_find_it(page):
    for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" not in target:
            headings = re.findall(r"^#+ (.+)$", ((page.parent / file) if file else page).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_every_room_is_on_the_page_that_explains_the_parts():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {"conf"}
    page = (DOCS / "how-it-works.md").read_text()
    assert set(re.findall(r"\]\(\.\./verl_tlt/([a-z_]+)/\)", page)) >= rooms


def test_contributing_says_of_every_room_what_it_may_import():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    assert {room for room, _, _ in rows} == set(MAY_IMPORT)
    for room, rooms, world in rows:
        allowed = set(re.findall(r"`(\w+)`", rooms)) | (SHARED if "shared" in rooms else set())
        assert allowed == MAY_IMPORT[room], f"CONTRIBUTING.md, row {room}"
        named = FRAMEWORKS if "all" in world else {name for name in world.strip().split(", ") if name}
        assert named == FRAMEWORKS_OF[room], f"CONTRIBUTING.md, row {room}"


def test_what_troubleshooting_says_that_it_says_is_said():
    """Every message in a column "It says", piece by piece between its placeholders, is in a string of the code."""
    code = [path for room in ("verl_tlt", "hydra_plugins") for path in (ROOT / room).rglob("*.py")]
    said = " ".join(text for path in code for text in strings(path))
    pages = (DOCS / "troubleshooting.md").read_text()
    rows = [row for table in re.findall(r"^\| It says \|.*?\n\n", pages, re.M | re.S) for row in table.splitlines()[2:]]
    cells = [row.split("|")[1].partition("Hydra's")[0] for row in rows if row]
    pieces = {p.strip() for cell in cells for span in re.findall(r"`([^`]+)`", cell) for p in span.split("…")}
    messages = {piece for piece in pieces if piece and not re.fullmatch(r"[\w.]*[=.]|tlt/\w+", piece)}
    assert len(messages) > 20 and not [piece for piece in messages if piece not in said]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda p: p.name)
def test_modules_named_in_a_page_exist(page):
    for name in re.findall(r"\b(?:verl_tlt|demo|benchmarks)(?:\.[a-z_][a-z0-9_]*)+", page.read_text()):
        path, *rest = name.split(".")
        here = ROOT / path
        while rest and (here / rest[0]).is_dir():
            here /= rest.pop(0)
        if rest and (here / f"{rest[0]}.py").exists():
            continue
        if rest:  # a name that the package exports
            exported = ast.parse((here / "__init__.py").read_text())
            assert rest[0] in ast.unparse(exported), f"{page.name} names {name}"


def test_the_built_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def listed(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in listed(part)]

    assert sorted(listed(site["nav"])) == sorted(page.name for page in DOCS.glob("*.md"))


def test_links_out_of_the_site_become_names_or_lead_to_the_repository(generate):
    page = (
        "see [scheduler.py](../verl_tlt/engine_core/scheduler.py), [idle/](../verl_tlt/idle/) and [metrics](metrics.md)"
    )
    assert generate.on_page_markdown(page, config={"repo_url": None}) == (
        "see `verl_tlt/engine_core/scheduler.py`, `verl_tlt/idle/` and [metrics](metrics.md)"
    )
    assert generate.on_page_markdown(page, config={"repo_url": "https://example.org/verl-tlt/"}) == (
        "see [scheduler.py](https://example.org/verl-tlt/blob/main/verl_tlt/engine_core/scheduler.py), "
        "[idle/](https://example.org/verl-tlt/tree/main/verl_tlt/idle/) and [metrics](metrics.md)"
    )


def test_every_page_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        links = (page.parent / target for target in re.findall(r"\]\(([^)\s#]+\.md)\)", page.read_text()))
        todo += {link.resolve() for link in links} - seen
    assert seen >= set(PAGES)


METRICS = set(re.findall(r"^\| `(tlt/[^`]+)` \|", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE))
"""Rows of the metrics page; tests/unit/trace/test_step_metrics.py holds them against what a step logs."""


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda p: p.name)
def test_metrics_named_in_a_page_exist(page):
    def pattern(name):
        return "".join(r"\w+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))

    known = [re.compile(pattern(name)) for name in METRICS]
    for name in re.findall(r"`(tlt/[a-z_0-9<>]+)`", page.read_text()):
        assert name in METRICS or any(p.fullmatch(name) for p in known), f"{page.name} names {name}"


def test_the_metrics_page_describes_every_trace_event():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == set(EVENT_TYPES)
