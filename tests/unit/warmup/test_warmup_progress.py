"""How often a stage without a moving bar says where it is."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.warmup import engine


@pytest.mark.parametrize(
    ("shares", "lines"),
    [
        ([i / 50 for i in range(51)], [(i / 10, 5 * i) for i in range(1, 11)]),
        ([0.0, 0.05, 0.73, 0.74, 1.0], [(0.73, 2), (1.0, 4)]),
        ([0.0] * 200, [(0.0, 61), (0.0, 122), (0.0, 183)]),
    ],
    ids=["every tenth", "a jump over several", "a stage that stands still"],
)
def test_a_stage_without_a_terminal_says_every_tenth_and_every_minute(monkeypatch, shares, lines):
    now = [0.0]
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(file=io.StringIO(), width=200)
    stage = engine.Stage(engine.make_bars(console), "train", "begins")
    for second, share in enumerate(shares):
        now[0] = second
        stage.tell(share, f"{share:g}")
    told = re.findall(r"train: (\S+) after (\d+) s", console.file.getvalue())
    assert [(float(share), int(second)) for share, second in told] == lines


def test_what_is_said_is_printed_as_it_is(capsys):
    say(make_console(), "4:100: [bold] and :smile:")
    assert capsys.readouterr().out == "4:100: [bold] and :smile:\n"
