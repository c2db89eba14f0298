"""Prompts in every form they may come in, the part that is held out, and one sentence for every unusable file."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tlt.commands.warmup import prompts as prompts_module
from verl_tlt.commands.warmup.prompts import PromptForm, load_tokenizer, read_prompts
from verl_tlt.drafter import DrafterError


@pytest.fixture(scope="module")
def tokenizer(policy_dir):
    return load_tokenizer(policy_dir)


def as_chat(lines):
    return [[{"role": "user", "content": line}] for line in lines]


def test_text_and_chat_in_three_formats(tokenizer, prompt_lines, prompts_file, tmp_path):
    plain = read_prompts([prompts_file], tokenizer, 100)
    expected = tuple(int(word[1:]) for word in prompt_lines[0].split())
    assert plain.tokens[0] == expected
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": line}) for line in prompt_lines))
    assert read_prompts([tmp_path / "p.jsonl"], tokenizer, 100).tokens == plain.tokens
    pq.write_table(pa.table({"prompt": as_chat(prompt_lines)}), tmp_path / "p.parquet")
    chat = read_prompts([tmp_path / "p.parquet"], tokenizer, 100)
    assert chat.tokens[0] == (*expected, 47)  # through the chat template


def test_a_tenth_is_held_out_whatever_else_is_in_the_file(tokenizer, tmp_path):
    lines = [f"w{i} w{j}" for i in range(1, 40) for j in range(1, 20)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    (tmp_path / "half.txt").write_text("\n".join(lines[::2]))
    whole, half = (read_prompts([tmp_path / f"{name}.txt"], tokenizer, 100) for name in ("all", "half"))
    assert len(whole.held_out) == pytest.approx(74, abs=25)  # three standard deviations
    held = {whole.tokens[i] for i in whole.held_out}
    assert {half.tokens[i] for i in half.held_out} == held & set(half.tokens)
    assert whole.digest != half.digest


def test_equal_prompts_count_once_and_long_ones_are_left_out(tokenizer, tmp_path, prompt_lines):
    (tmp_path / "p.txt").write_text("\n".join([*prompt_lines, *prompt_lines, " ".join(["w3"] * 30)]))
    found = read_prompts([tmp_path / "p.txt"], tokenizer, 20)
    assert len(found.tokens) == 40
    assert len(read_prompts([tmp_path / "p.txt"], tokenizer, 20, limit=17).tokens) == 17


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", "", "is empty"),
        ("p.txt", "w1 w2\nw3 w4", "holds 2 different usable prompts, but at least 16 are needed"),
        ("p.txt", "\n".join(" ".join(["w5"] * 101) + f" w{i}" for i in range(1, 40)), "39 are longer than 100 tokens"),
        ("p.csv", "w1", "must end in .parquet, .jsonl, .json or .txt"),
        ("p.jsonl", '{"prompt": "w1"}\n{', "is not a readable .jsonl file"),
        ("p.jsonl", '{"text": "w1"}', "prompt 1 has no field `prompt`."),
        ("p.jsonl", '{"prompt": [1, 2]}', "prompt 1 is neither text nor a list of messages"),
        ("p.jsonl", '{"prompt": "w1 \\ud83d"}', "half a surrogate pair"),
        ("p.json", '[{"prompt": "w1 \\ude00 w2"}]', "half a surrogate pair"),
        ("p.jsonl", '{"prompt": "w1"}\n' + DEEP, "file after prompt 1: it is nested deeper than"),
        ("p.json", DEEP, "it is nested deeper than"),
        ("p.json", '[{"prompt": "w1"}, {"prompt": 3}]', "prompt 2 is neither text nor a list of messages"),
        ("p.json", '{"data": [{"prompt": "w1"}]}', "prompt 1 has no field `prompt`."),
        ("p.parquet", "not parquet", "is not a readable .parquet file"),
    ],
)
def test_unusable_files_are_named(tokenizer, tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(DrafterError) as caught:
        read_prompts([tmp_path / name], tokenizer, 100)
    said = str(caught.value)
    assert sentence in said and str(tmp_path / name) in said and "\n" not in said and len(said) < 400


def test_a_policy_needs_a_tokenizer(tmp_path, policy_dir):
    with pytest.raises(DrafterError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copytree(policy_dir, tmp_path / "policy")
    for text in ("{", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "none"}}'):
        (tmp_path / "policy" / "tokenizer.json").write_text(text)
        with pytest.raises(DrafterError, match=r"policy holds no tokenizer: [^\n]+\."):
            load_tokenizer(tmp_path / "policy")


def test_a_chat_needs_a_template(tokenizer, tmp_path, prompt_lines, monkeypatch):
    pq.write_table(pa.table({"prompt": as_chat(prompt_lines)}), tmp_path / "p.parquet")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(DrafterError, match="prompt 1 is a chat, but the policy's tokenizer has no chat template"):
        read_prompts([tmp_path / "p.parquet"], tokenizer, 100)


ODD = [f"w{i + 1} {c} w{i + 2}" for i, c in enumerate("\u2028\u2029\u0085\x0c\x0b\x1c\x1d\x1e")]
"""Prompts with characters that `str.splitlines` takes for the end of a line."""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_a_prompt_ends_where_its_line_does(tokenizer, tmp_path, kind, mark, ending):
    prompts = [*ODD, *(f"w{i} w{i + 1}" for i in range(15, 40))]
    rows = {
        "txt": prompts,
        "jsonl": [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts],
        "json": [json.dumps([{"prompt": prompt} for prompt in prompts], ensure_ascii=False, indent=2)],
    }[kind]
    file = tmp_path / f"prompts.{kind}"
    file.write_bytes((mark + ending.join(rows)).encode())
    assert read_prompts([file], tokenizer, 100).tokens == tuple(tuple(tokenizer(p)["input_ids"]) for p in prompts)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_up_to_a_size_and_lines_are_whatever_theirs(
    tokenizer, tmp_path, monkeypatch, prompt_lines, kind, indent
):
    monkeypatch.setattr(prompts_module, "MOST_BYTES", 1 << 20)
    file = tmp_path / f"prompts.{kind}"
    chats = as_chat(prompt_lines)
    file.write_text("\n".join([*(json.dumps(chat) for chat in chats), *[" " * 1000] * 2000]))
    assert len(read_prompts([file], tokenizer, 100).tokens) == len(chats)
    file.write_text(json.dumps([chats[0]] * 30_000, indent=indent))
    with pytest.raises(DrafterError) as error:
        read_prompts([file], tokenizer, 100)
    said = "an array of more than 1 MB is not read; write one JSON value a line."
    assert str(error.value) == f"--prompts {file} is not a readable .{kind} file: {said}"


def test_an_array_a_folder_and_several_files_are_one_set_of_prompts(tokenizer, tmp_path, prompt_lines, prompts_file):
    expected = read_prompts([prompts_file], tokenizer, 100).tokens
    chats = tuple((*prompt, 47) for prompt in expected)
    folder = tmp_path / "train.parquet"
    (folder / "part").mkdir(parents=True)
    (folder / "_SUCCESS").touch()
    for name, lines in (("a.parquet", prompt_lines[:15]), ("part/b.parquet", prompt_lines[15:])):
        pq.write_table(pa.table({"prompt": as_chat(lines), "answer": lines}), folder / name)
    assert read_prompts([folder], tokenizer, 100).tokens == chats
    array = tmp_path / "chats.json"
    array.write_text(json.dumps([{"prompt": chat} for chat in as_chat(prompt_lines)]))
    assert read_prompts([array], tokenizer, 100).tokens == chats
    array.write_text(json.dumps(as_chat(prompt_lines)))
    assert read_prompts([array], tokenizer, 100).tokens == chats
    array.write_text("\n".join(json.dumps(chat) for chat in as_chat(prompt_lines)))  # one chat a line is no array
    assert read_prompts([array], tokenizer, 100).tokens == chats
    both = read_prompts([prompts_file, folder], tokenizer, 100)
    assert both.tokens == expected + chats
    assert read_prompts([prompts_file, folder], tokenizer, 100, limit=45).tokens == both.tokens[:45]
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(DrafterError, match=r"empty is a folder without \.parquet files"):
        read_prompts([empty], tokenizer, 100)


def test_a_row_takes_the_form_that_the_run_gives_it(tokenizer, tmp_path, prompt_lines, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }} {{ 'w46' if thinking else 'w45' }}")
    pq.write_table(pa.table({"question": as_chat(prompt_lines)}), tmp_path / "p.parquet")
    form = PromptForm("question", {"thinking": True, "add_generation_prompt": False, "tokenize": True})
    assert {p[-1] for p in read_prompts([tmp_path / "p.parquet"], tokenizer, 100, form=form).tokens} == {46}
    with pytest.raises(DrafterError, match=r"p\.parquet has no column `prompt`"):
        read_prompts([tmp_path / "p.parquet"], tokenizer, 100)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DrafterError, match="prompt 1 is refused by the policy's chat template: roles must alternate"):
        read_prompts([tmp_path / "p.parquet"], tokenizer, 100, form=form)
