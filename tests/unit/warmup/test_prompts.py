"""Prompts in every form they may come in, the part that is held out, and one sentence for every unusable file."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tlt.commands.warmup import prompts as prompts_module
from verl_tlt.commands.warmup.prompts import PromptForm, load_tokenizer, read_prompts
from verl_tlt.drafter.policy import DrafterError


@pytest.fixture(scope="module")
def tokenizer(policy_dir):
    return load_tokenizer(policy_dir)


@pytest.fixture
def read(tokenizer, tmp_path):
    """The prompts of a file in `tmp_path`, with this content where some is given."""

    def of(name, content=None, longest=100, **more):
        if content is not None:
            (tmp_path / name).write_text(content if isinstance(content, str) else "\n".join(content))
        return read_prompts([tmp_path / name], tokenizer, longest, **more)

    return of


def as_chats(lines):
    return [[{"role": "user", "content": line}] for line in lines]


def test_the_same_prompts_in_every_form(read, tokenizer, prompt_lines, prompts_file, tmp_path):
    texts = [{"prompt": line} for line in prompt_lines]
    expected = tuple(tuple(int(word[1:]) for word in line.split()) for line in prompt_lines)
    assert read("prompts.txt").tokens == read("p.jsonl", map(json.dumps, texts)).tokens == expected
    chats = as_chats(prompt_lines)
    as_told = tuple((*prompt, 47) for prompt in expected)  # through the chat template
    assert read("array.json", json.dumps([{"prompt": chat} for chat in chats])).tokens == as_told
    assert read("chats.json", json.dumps(chats)).tokens == as_told
    assert read("lines.json", map(json.dumps, chats)).tokens == as_told, "one chat a line is no array"
    (tmp_path / "folder.parquet" / "part").mkdir(parents=True)
    (tmp_path / "folder.parquet" / "_SUCCESS").touch()
    for name, part in (("a.parquet", slice(15)), ("part/b.parquet", slice(15, None))):
        pq.write_table(
            pa.table({"prompt": chats[part], "answer": prompt_lines[part]}), tmp_path / "folder.parquet" / name
        )
    assert read("folder.parquet").tokens == as_told
    sources = [prompts_file, tmp_path / "folder.parquet"]
    assert read_prompts(sources, tokenizer, 100).tokens == expected + as_told
    assert read_prompts(sources, tokenizer, 100, limit=45).tokens == (expected + as_told)[:45]


def test_a_tenth_is_held_out_whatever_else_is_in_the_file(read):
    lines = [f"w{i} w{j}" for i in range(1, 40) for j in range(1, 20)]
    whole, half = read("all.txt", lines), read("half.txt", lines[::2])
    assert len(whole.held_out) == pytest.approx(74, abs=25)  # three standard deviations
    held = {whole.tokens[i] for i in whole.held_out}
    assert {half.tokens[i] for i in half.held_out} == held & set(half.tokens)
    assert whole.digest != half.digest


def test_equal_prompts_count_once_and_long_ones_are_left_out(read, prompt_lines):
    assert len(read("p.txt", [*prompt_lines, *prompt_lines, " ".join(["w3"] * 30)], longest=20).tokens) == 40
    assert len(read("p.txt", longest=20, limit=17).tokens) == 17


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
def test_unusable_files_are_named(read, tmp_path, name, content, sentence):
    with pytest.raises(DrafterError) as caught:
        read(name, content)
    said = str(caught.value)
    assert sentence in said and str(tmp_path / name) in said and "\n" not in said and len(said) < 400


def test_a_folder_has_prompts_in_parquet(read, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DrafterError, match=r"empty is a folder without \.parquet files"):
        read("empty")


def test_a_policy_needs_a_tokenizer(tmp_path, policy_dir):
    with pytest.raises(DrafterError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copytree(policy_dir, tmp_path / "policy")
    for text in ("{", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "none"}}'):
        (tmp_path / "policy" / "tokenizer.json").write_text(text)
        with pytest.raises(DrafterError, match=r"policy holds no tokenizer: [^\n]+\."):
            load_tokenizer(tmp_path / "policy")


ODD = [f"w{i + 1} {c} w{i + 2}" for i, c in enumerate("\u2028\u2029\u0085\x0c\x0b\x1c\x1d\x1e")]
"""Prompts with characters that `str.splitlines` takes for the end of a line."""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_a_prompt_ends_where_its_line_does(read, tokenizer, tmp_path, kind, mark, ending):
    prompts = [*ODD, *(f"w{i} w{i + 1}" for i in range(15, 40))]
    rows = {
        "txt": prompts,
        "jsonl": [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts],
        "json": [json.dumps([{"prompt": prompt} for prompt in prompts], ensure_ascii=False, indent=2)],
    }[kind]
    (tmp_path / f"p.{kind}").write_bytes((mark + ending.join(rows)).encode())
    assert read(f"p.{kind}").tokens == tuple(tuple(tokenizer(p)["input_ids"]) for p in prompts)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_up_to_a_size_and_lines_are_whatever_theirs(read, monkeypatch, prompt_lines, kind, indent):
    monkeypatch.setattr(prompts_module, "MOST_BYTES", 1 << 20)
    chats = as_chats(prompt_lines)
    assert len(read(f"p.{kind}", [*map(json.dumps, chats), *[" " * 1000] * 2000]).tokens) == len(chats)
    said = rf"p\.{kind} is not a readable \.{kind} file: an array of more than 1 MB is not read; write one JSON value"
    with pytest.raises(DrafterError, match=said):
        read(f"p.{kind}", json.dumps([chats[0]] * 30_000, indent=indent))


def test_a_row_takes_the_form_that_the_run_gives_it(read, tokenizer, tmp_path, prompt_lines, monkeypatch):
    pq.write_table(pa.table({"question": as_chats(prompt_lines)}), tmp_path / "p.parquet")
    form = PromptForm("question", {"thinking": True, "add_generation_prompt": False, "tokenize": True})
    with pytest.raises(DrafterError, match=r"p\.parquet has no column `prompt`"):
        read("p.parquet")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }} {{ 'w46' if thinking else 'w45' }}")
    assert {p[-1] for p in read("p.parquet", form=form).tokens} == {46}
    for template, said in (
        ("{{ raise_exception('roles must alternate') }}", "is refused by the policy's chat template: roles must"),
        (None, "is a chat, but the policy's tokenizer has no chat template"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(DrafterError, match=f"prompt 1 {said}"):
            read("p.parquet", form=form)
