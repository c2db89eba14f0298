"""JSON from elsewhere: whatever lies under its name, reading ends soon, in a value or in a sentence."""

import os

import pytest

from verl_tlt.files.json_files import MOST_BYTES, MOST_LEVELS, JSONFileError, parse, read_lines, read_object


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file.json"


def refusal(path):
    with pytest.raises(JSONFileError) as caught:
        read_object(path)
    sentence = str(caught.value)
    assert sentence.startswith(str(path)) and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 400
    return sentence


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
@pytest.mark.parametrize("levels", [MOST_LEVELS, 500, 100_000])
def test_depth_and_width_which_is_none(file, opening, closing, levels):
    depth = levels // len(closing) - 1
    file.write_text('{"top": ' + opening * depth + "0" + closing * depth + "}")
    if levels == MOST_LEVELS:
        assert read_object(file)["top"]
    else:
        assert "nested deeper than" in refusal(file)
    assert len(parse("[" + ",".join(["[[]]"] * 1000) + "]")) == 1000


def test_what_is_no_ordinary_file(tmp_path, file):
    assert "does not exist" in refusal(file)
    os.mkfifo(file)
    assert "no ordinary file" in refusal(file)  # nobody writes to it, and it is not waited for
    for target, said in (("/dev/zero", "no ordinary file"), (tmp_path, "no ordinary file"), (file, "symbolic links")):
        os.unlink(file)
        file.symlink_to(target)
        assert said in refusal(file)


def test_what_is_too_large_or_no_object(file):
    with file.open("wb") as sparse:
        sparse.truncate(MOST_BYTES + 1)
    assert "more than" in refusal(file)
    for text in (b"[1]", b"3", b"", b"{", b"\xff\xfe{", b"{} {}"):
        file.write_bytes(text)
        refusal(file)
    file.write_text('{"few": 123, "many": ' + "9" * 10_000 + "}")
    assert read_object(file) == {"few": 123, "many": float("inf")}


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ude00\\ud83d", "\\ud83d\\ud83d\\ude00"])
def test_half_a_surrogate_pair_is_no_text(file, half):
    for text in (f'{{"a": ["{half}"]}}', f'{{"{half}": 1}}'):
        file.write_text(text)
        assert "half a surrogate pair" in refusal(file)
    assert parse('["\\ud83d\\ude00", "\\\\ud83d"]') == ["\U0001f600", "\\ud83d"]


def test_a_line_feed_alone_ends_a_line(file):
    text = "\ufeffa\u2028b\u0085c\x0cd\re\r\n\ufefff"
    file.write_bytes(text.encode())
    assert [line.decode() for line in read_lines(file)] == [text[1:-2], "\ufefff"]
    assert b"".join(read_lines(file, longest=3)) == text[1:].encode()
