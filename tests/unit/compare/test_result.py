"""What is concluded from a comparison's turns, its page and its picture."""

import html
import random
import re

import pytest

from verl_tlt.commands.compare.page import save_compare_picture, write_compare_page
from verl_tlt.commands.compare.plan import named_arms
from verl_tlt.commands.compare.record import Record, Step, Turn, schedule
from verl_tlt.commands.compare.result import found_of

ARMS = named_arms(["tlt", "vllm-3", "vllm-7"], "/a/drafter")
FASTER = {"stock": 1.0, "tlt": 1.6, "vllm-3": 1.3, "vllm-7": 1.5}


@pytest.fixture
def record(tmp_path):
    """Three rounds of four arms, the last one not to its end."""
    found, rng = Record(tmp_path, {}), random.Random(0)
    for name, turn in list(schedule(list(FASTER), 3))[:-1]:
        seconds = [10.0 / FASTER[name] * rng.uniform(0.95, 1.05) for _ in range(4)]
        steps = [
            Step(turn, 5 * turn + 2 + i, s + 5.0, s, 1000.0 + i, 300.0, reward=0.5 + rng.uniform(-0.1, 0.1), prompt=9.0,
                 accept_length=None if name != "tlt" else 2.0 + i)
            for i, s in enumerate(seconds)
        ]  # fmt: skip
        logged = 3.5 if name.startswith("vllm") else None
        found.add(Turn(name, turn, steps, 120.0, 16.0, 4.0, logged))
    return found


def test_every_arm_has_its_ratio_length_reward_and_sentence(record):
    found = found_of(ARMS, record)
    assert list(found["arms"]) == list(FASTER) and list(found["ratios"]) == list(FASTER)[1:]
    for name, of in found["ratios"].items():
        assert of["rollout_per_token"]["pooled"] == pytest.approx(FASTER[name], rel=0.05)
        assert 1 < of["e2e_per_token"]["pooled"] < of["rollout_per_token"]["pooled"]
    assert [found["arms"][name]["accept_length"] for name in ("stock", "tlt", "vllm-3")] == [None, 3.5, 3.5]
    said = " ".join(found["sentences"])
    assert "tlt was faster than stock" in said and "vllm-7, the fastest of the others" in said
    assert len(found["turns"]) == len(record.turns) == 11


def test_before_the_first_pair_there_is_nothing_to_say(tmp_path):
    found = found_of(ARMS, Record(tmp_path, {}))
    assert not found["ratios"] and not found["arms"] and not found["sentences"]


def test_the_page_has_every_row_and_the_picture_is_one(record, tmp_path):
    found = found_of(ARMS, record)
    page = html.unescape(write_compare_page(tmp_path / "compare.html", found, record.turns).read_text())
    assert len(re.findall(r"<tr><td>(?:stock|tlt|vllm-\d)</td>", page)) == 4 + 11 + 11 * 4
    assert all(sentence in page for sentence in found["sentences"]) and "<script" not in page
    assert page.count("data:image/svg+xml") == 5
    picture = save_compare_picture(tmp_path / "compare.png", found, record.turns)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 30_000
