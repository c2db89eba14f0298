"""The pages say what the code says: settings, metrics, trace events, figures and links are compared with it."""

import ast
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from doc_commands import PAGES
from test_imports import FRAMEWORKS, FRAMEWORKS_OF, MAY_IMPORT, SHARED

import verl_tlt
from verl_tlt.config import TLTConfig, is_setting
from verl_tlt.trace.events import EVENT_TYPES

PACKAGE = Path(verl_tlt.__file__).parent
ROOT = PACKAGE.parent
DOCS = ROOT / "docs"
HOME = r"(?<![\w.])/(home|root|tmp|work|mnt|Users)/"
CONTROL = ("replay", "foreign", "drain", "changing", "overhead", "steady")
EARLIER = {
    "control drain", "drafter_merging", "drafter_objectives", "drafter_study_costs", "endurance", "endurance_leaks",
    "resume", "same_tokens",
}  # fmt: skip
"""Results that were recorded before files kept their machine; a new recording leaves this set."""
METRICS = set(re.findall(r"^\| `(tlt/[^`]+)` \|", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE))
"""Rows of the metrics page; tests/unit/trace/test_step_metrics.py compares them with what a step logs."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("generate")


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("hook")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("tables")


SECTIONS = typing.get_type_hints(TLTConfig)
SETTINGS = [f"tlt.{name}.{f.name}" for name, cls in SECTIONS.items() for f in dataclasses.fields(cls) if is_setting(f)]
"""Full names of all settings."""


def test_the_page_of_settings_is_what_is_generated(generate):
    assert generate.PAGE.read_text() == generate.render(), "run `python docs/generate.py`"


def test_each_setting_has_one_line_that_begins_with_a_short_sentence(generate):
    found = re.findall(r"^\* `(tlt\.\w+\.\w+)` = `[^`]+` \(.*?\): (.*?[.;:])(?: |$)", generate.render(), re.MULTILINE)
    assert [key for key, _ in found] == list(SETTINGS)
    assert max(len(sentence) for _, sentence in found) < 125


def test_the_tables_of_results_are_those_of_the_files(tables):
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == [tables.render(page) for page in pages], "run `python docs/generate.py`"
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(tables.TABLES)


def test_the_picture_shows_the_rows_of_its_file(tables):
    from tables import picture

    assert picture.drawn() == picture.digest(picture.shown()), "run `python docs/generate.py`"


def test_tables_follow_the_benchmark_when_it_records_more(tables, monkeypatch, tmp_path):
    """More arms, which say what they are, the drafters' making, and a second load: rows of their own, no code."""
    from tables import front, page, picture, runs

    shutil.copytree(tables.FILES, tmp_path, dirs_exist_ok=True)
    found = json.loads((tables.FILES / "e2e.json").read_text())
    found["drafters"] = {"warm": {"made_by": "verl-tlt warmup", "cpu_seconds": 541, "accept_length": 5.8,
                                  "accept_length_served": 5.7}, "random": {"made_by": "random weights"}}  # fmt: skip
    names, like = ("vllm-5-lost", "vllm-3-stale"), "vllm-3-lost"
    for name in names:
        found["ratios"][name], found["arms"][name] = found["ratios"][like], {**found["arms"][like], "label": "a label"}
    found["turns"] += [{**turn, "arm": name} for name in names for turn in found["turns"] if turn["arm"] == like]
    for file in ("e2e", "e2e_large", "e2e_stale"):
        (tmp_path / f"{file}.json").write_text(json.dumps(found))
    monkeypatch.setattr(page, "FILES", tmp_path)
    shown = [row.split(" | ") for row in front.expectations().splitlines()[2:]]
    assert len(shown) == 9 and shown[5][1] < shown[3][1]
    assert front.headlines().count("\n") == 16 + page.recorded("race")
    assert runs.arms().count("a label") == len(names) and "9 minutes" in runs.drafters() and "5.80" in runs.drafters()
    told = (runs.end_to_end, runs.end_to_end_large, runs.end_to_end_stale)
    assert all(f"`{name}`" in table() for table in told for name in names) and runs.readings()
    assert {*names} < {*picture.shown()}
    found["ratios"] = {"tlt": {**found["ratios"]["tlt"], "lead": {"seconds": [[2, 1.0], [3, -9.0]], "from_step": None}}}
    for step in (step for turn in found["turns"] for step in turn["steps"]):
        step["cold_start_s"] = 8.0 if step["step"] == 3 else None
    (tmp_path / "cold_start.json").write_text(json.dumps(found))
    assert "8.0 s in step 3" in runs.cold_start() and "9 s, step 3 | not yet | -9 s, step 3" in runs.cold_start()
    picture.draw(picture.shown(), tmp_path / "picture.png")
    assert picture.drawn(tmp_path / "picture.png") == picture.digest(picture.shown()) != picture.drawn()


def test_the_readme_is_short_and_has_one_form_of_the_flag():
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 100
    assert "+trainer.plugin=tlt" in page


def test_no_file_of_results_names_a_folder_of_a_machine(tables):
    assert not [path.name for path in tables.FILES.glob("*.json") if re.search(HOME, path.read_text())]


def test_every_file_of_results_is_listed_and_says_what_it_was_measured_on(tables):
    """`control.json` says it of every part, whose runs are not one."""
    told = {}
    for path in tables.FILES.glob("*.json"):
        found = json.loads(path.read_text())
        parts = {f"control {part}": found.get(f"{part}_on", {}) for part in CONTROL}
        told |= parts if path.stem == "control" else {path.stem: found.get("machine", {})}
    page = "".join(page.read_text() for page in tables.PAGES)
    assert {name for name, on in told.items() if not {"commit", "cpu", "cpu_flags", "versions"} <= set(on)} == EARLIER
    assert set(re.findall(r"`([\w ]+)`", re.search(r"do not say it: ([^.]*)\.", page)[1])) == EARLIER
    named = set(re.findall(r"[(/](\w+)\.json\)", page))
    assert {path.stem for path in tables.FILES.glob("*.json")} - {"drafter_study_costs"} == named


def test_every_setting_is_read_somewhere():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path.name != "config.py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)} <= read


@each_page
def test_settings_and_metrics_named_in_a_page_exist(page):
    text = page.read_text()
    known = {*SETTINGS, *(name.rpartition(".")[0] for name in SETTINGS), "tlt"}
    assert set(re.findall(r"(?<![.\w])tlt\.[a-z]+(?:\.[a-z_]+)*", text)) <= known
    known = [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in METRICS]
    for name in re.findall(r"`(tlt/[a-z_0-9<>]+)`", text):
        assert name in METRICS or any(pattern.fullmatch(name) for pattern in known), f"{page.name} names {name}"


@each_page
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE) if anchor else ()
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{page.name} links to {target}"


@each_page
def test_modules_named_in_a_page_exist(page):
    for name in re.findall(r"\b(?:verl_tlt|demo|benchmarks)(?:\.[a-z_][a-z0-9_]*)+", page.read_text()):
        folder, *rest = name.split(".")
        here = ROOT / folder
        while rest and (here / rest[0]).is_dir():
            here /= rest.pop(0)
        if rest and not (here / f"{rest[0]}.py").exists():
            assert rest[0] in (here / "__init__.py").read_text(), f"{page.name} names {name}"


def test_rooms_are_explained_with_what_they_may_import():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {"conf"}
    page = (DOCS / "how-it-works.md").read_text()
    assert set(re.findall(r"\]\(\.\./verl_tlt/([a-z_]+)/\)", page)) >= rooms
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    assert {room for room, _, _ in rows} == set(MAY_IMPORT)
    for room, below, world in rows:
        allowed = set(re.findall(r"`(\w+)`", below)) | (SHARED if "shared" in below else set())
        named = FRAMEWORKS if "all" in world else {name for name in world.strip().split(", ") if name}
        assert (allowed, named) == (MAY_IMPORT[room], FRAMEWORKS_OF[room]), f"CONTRIBUTING.md, row {room}"


def test_every_page_is_in_the_site_and_can_be_reached_from_the_readme():
    listed = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        links = (page.parent / target for target in re.findall(r"\]\((?!https:)([^)\s#]+\.md)\)", page.read_text()))
        todo += {link.resolve() for link in links} - reached
    assert reached >= set(PAGES)


def test_links_out_of_the_site_become_names_or_lead_to_the_repository(hook):
    page = "[a.py](../verl_tlt/idle/a.py#here), [its room](../verl_tlt/idle/) and [metrics](metrics.md)"
    names = "`verl_tlt/idle/a.py`, its room: `verl_tlt/idle/` and [metrics](metrics.md)"
    assert hook.on_page_markdown(page, config={"repo_url": None}).startswith(f"{names}\n")
    assert hook.on_page_markdown(page, config={"repo_url": "https://example.org/x/"}).startswith(
        "[a.py](https://example.org/x/blob/main/verl_tlt/idle/a.py#here), "
        "[its room](https://example.org/x/tree/main/verl_tlt/idle/) and [metrics](metrics.md)\n"
    )


@pytest.mark.parametrize("repository", ["", "https://example.org/x"])
def test_links_in_the_readme_of_a_package_work_outside_the_repository(repository, tmp_path):
    """The metadata as pip builds it: no link to a file that its reader does not have."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "verl_tlt").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "verl_tlt")
    made = "import setuptools.build_meta as m; print(m.prepare_metadata_for_build_wheel('.'))"
    environment = {**os.environ, "VERL_TLT_REPOSITORY": repository}
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.read_text())
    assert links and all(link.startswith("https://") for link in links)
    if repository:
        inside = {link for link in links if link.startswith(repository)}
        assert len(inside) > 15 and f"Project-URL: Repository, {repository}" in metadata.read_text()
        assert all((ROOT / re.sub(r"^.*/main/|#.*$", "", link)).exists() for link in inside)


def test_the_metrics_page_describes_every_trace_event():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == set(EVENT_TYPES)
