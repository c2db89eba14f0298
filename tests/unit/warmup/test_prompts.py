"""The prompts of a warm-up are token for token those that verl's agent loops would send; unusable files are named."""

import json
from dataclasses import replace

import pytest

from verl_tlt.checks.recipe import compose
from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup.prompts import open_images, read_prompts
from verl_tlt.errors import DrafterError

pytest.importorskip("verl")
TOOLS = (
    "{% if tools is defined and tools is not none %}w40 {% for t in tools %}w41 {% endfor %}{% endif %}"
    "{% for m in messages %}{{ {'system': 'w42', 'user': 'w43', 'assistant': 'w44'}[m.role] }} "
    "{{ m.content }} {% endfor %}"
    "{{ 'w46' if thinking }} w47"
)
"""As Llama 3.2's and Qwen's chat templates: with a list of tools, even an empty one, the prompt is another."""
TOOL = '''from verl.tools.function_tool import function_tool


@function_tool
def calculator(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: What to work out.
    """
    return "1"
'''
DATASET = """from verl.utils.dataset.rl_dataset import RLHFDataset


class Asked(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"] = [{"role": "system", "content": "w9"}, *row["raw_prompt"]]
        return row
"""
DRAWN = '''from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopBase


class Drawn(AgentLoopBase):
    """Asks about pictures of the shades that a row says, or about a film where it says none."""

    async def run(self, sampling_params, **row):
        shades = map(int, row["raw_prompt"][0]["content"].split())
        images = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in shades]
        media = {"image_data": images} if images else {"video_data": ["film"]}
        await self.server_manager.generate("1", prompt_ids=[5, 6], sampling_params=sampling_params, **media)
'''
TOOL_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"


@pytest.fixture
def options(policy_dir, prompts_file, tmp_path):
    def make(*overrides, **more):
        given = {"model": policy_dir, "prompts": [prompts_file], "out": tmp_path / "out", "response_length": 24, **more}
        return WarmupOptions(overrides=list(overrides) or None, **given)

    return make


def as_verl(policy_dir, overrides, chats):
    """Token ids of chats as verl's tool and single-turn loops build them: its tokenizer, template and schemas."""
    from verl.tools.tool_registry import load_all_tools
    from verl.utils import hf_tokenizer

    config = compose([*overrides, f"actor_rollout_ref.model.path={policy_dir}"], "ppo_trainer")
    path = config.actor_rollout_ref.rollout.multi_turn.function_tool_path
    tools = load_all_tools(tool_config_path=None, function_tool_path=path) if path else []
    schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    kwargs = {"tools": schemas} if TOOL_LOOP in overrides else {}
    tokenizer = hf_tokenizer(str(policy_dir))
    if own := config.actor_rollout_ref.model.get("custom_chat_template"):
        tokenizer.chat_template = own
    kwargs |= config.data.get("apply_chat_template_kwargs", {})
    kwargs |= {"add_generation_prompt": True, "return_dict": False}
    return [tuple(tokenizer.apply_chat_template(messages, **kwargs)) for messages in chats]


@pytest.mark.parametrize(
    ("kind", "marks"),
    [
        ("plain", {43}),
        ("tool", {40, 41, 43}),
        ("no tool", {40, 43}),
        ("turns", {42, 43, 44, 46}),
        ("class", {9, 42, 43}),
    ],
)
def test_prompts_are_those_of_the_run(options, policy_dir, tmp_path, prompt_lines, kind, marks):
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "own.py").write_text(DATASET)
    overrides = [f"actor_rollout_ref.model.custom_chat_template='{TOOLS.replace(chr(39), chr(92) + chr(39))}'"]
    overrides += [TOOL_LOOP] * (kind in ("tool", "no tool"))
    overrides += [f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path}/tool.py"] * (kind == "tool")
    chats = [[{"role": "user", "content": line}] for line in prompt_lines]
    given = chats
    if kind == "turns":
        overrides += ["+data.apply_chat_template_kwargs.thinking=true", "data.prompt_key=question"]
        before = [{"role": role, "content": f"w{i}"} for i, role in enumerate(("system", "user", "assistant"), start=5)]
        given = chats = [[*before, *chat] for chat in chats]
    if kind == "class":
        overrides += [f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Asked"]
        given = [[{"role": "system", "content": "w9"}, *chat] for chat in chats]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": c, "question": c}) + "\n" for c in chats))
    read = read_prompts(options(*overrides, prompts=[tmp_path / "rows.jsonl"]), tmp_path / "images")
    wanted = as_verl(policy_dir, overrides, given)
    assert {prompt.tokens for prompt in read.all} == set(wanted) and len(read.all) == len(set(wanted))
    assert set(wanted[0]) >= marks and not {40, 41, 42, 44, 46, 9} & set(wanted[0]) - marks - {
        int(word[1:]) for word in prompt_lines[0].split()
    }


def test_a_few_prompts_are_of_all_files_and_the_same_in_every_call(options, tmp_path):
    """As where a run shuffles files of different tasks, and takes part of them."""
    files = [tmp_path / "easy.jsonl", tmp_path / "hard.jsonl"]
    for file, marked in zip(files, (5, 6), strict=True):
        chats = ([{"role": "user", "content": f"w{marked} w{7 + i // 30} w{7 + i % 30}"}] for i in range(200))
        file.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    asked = options("data.train_max_samples=300", prompts=files)
    first, again, fewer = (read_prompts(asked, tmp_path / "images", limit) for limit in (64, 64, 32))
    assert first.digest == again.digest and first.all[:32] == fewer.all
    assert sum(5 in prompt.tokens for prompt in first.all) >= 20
    assert sum(6 in prompt.tokens for prompt in first.all) >= 20


@pytest.mark.parametrize("dated", [True, False])
def test_a_template_that_writes_todays_date_is_told(options, tmp_path, dated):
    """As Llama 3.2's."""
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('w8') %}{% endif %}{{ date_string }} "
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    ).replace("'", "\\'")
    given = [] if dated else ["+data.apply_chat_template_kwargs.date_string=w9"]
    asked = options(f"actor_rollout_ref.model.custom_chat_template='{template}'", *given)
    read = read_prompts(asked, tmp_path / "images")
    assert bool(read.dated) is dated and {prompt.tokens[0] for prompt in read.all} == {8 if dated else 9}


def test_a_tenth_is_held_out_whatever_else_is_in_the_file(options, tmp_path):
    lines = [f"w{i} w{j}" for i in range(1, 30) for j in range(1, 12)]
    rows = [json.dumps({"prompt": [{"role": "user", "content": line}]}) for line in lines]
    (tmp_path / "all.jsonl").write_text("\n".join(rows))
    (tmp_path / "half.jsonl").write_text("\n".join(rows[::2]))
    whole, half = (read_prompts(options(prompts=[tmp_path / f"{name}.jsonl"]), tmp_path) for name in ("all", "half"))
    assert len(whole.held_out) == pytest.approx(32, abs=16)  # three standard deviations
    held = {whole.all[i] for i in whole.held_out}
    assert {half.all[i] for i in half.held_out} == held & set(half.all)
    assert whole.digest != half.digest and whole.files_digest != half.files_digest


def test_equal_prompts_count_once_and_a_limit_holds(options, prompts_file, tmp_path):
    twice = replace(options(), prompts=[prompts_file, prompts_file])
    assert len(read_prompts(twice, tmp_path).all) == 40 and len(read_prompts(twice, tmp_path, limit=17).all) == 17
    first = [line for line in prompts_file.read_text().splitlines()[:20] for _ in range(2)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(first))
    assert len(read_prompts(options(prompts=[tmp_path / "pairs.jsonl"]), tmp_path, limit=17).all) == 17
    with pytest.raises(DrafterError, match=r"at least 16 are needed; --limit 8 takes no more\."):
        read_prompts(options(prompts=[prompts_file]), tmp_path, limit=8)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.jsonl", '{"prompt": [{"role": "user", "content": "w1"}]}', "holds 1 different usable prompts, but at"),
        ("p.jsonl", '{"text": "w1"}', "has no `prompt` (its columns: text): add data.prompt_key=NAME"),
        ("p.jsonl", '{"prompt": "w1"}', "prompt 1 is no list of messages with `role` and `content`, such as"),
        ("p.jsonl", "", "p.jsonl is empty."),
        ("p.jsonl", '{"prompt": [{"role": "none", "content": "w1"}]}', "prompt 1 is refused by verl's single_turn"),
        ("p.jsonl", '{"prompt": [{"role": "empty", "content": ""}]}', "; 1 are empty in the policy's chat template."),
        ("p.parquet", "not parquet", "cannot be read by verl's dataset: "),
    ],
)  # fmt: skip
def test_unusable_files_are_named(options, tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    template = (
        'actor_rollout_ref.model.custom_chat_template=\'{% for m in messages %}{{ m.content if m.role == "empty" }}'
        '{{ raise_exception(1) if m.role == "none" }}{% endfor %}{{ "w47" if messages[0].role != "empty" }}\''
    )
    with pytest.raises(DrafterError) as caught:
        read_prompts(options(template, prompts=[tmp_path / name]), tmp_path)
    said = str(caught.value)
    assert sentence in said and str(tmp_path / name) in said and "\n" not in said and len(said) < 500


def test_long_prompts_are_left_out(options, tmp_path):
    chats = [[{"role": "user", "content": " ".join(["w5"] * 240) + f" w{i}"}] for i in range(1, 20)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": chat}) for chat in chats))
    with pytest.raises(DrafterError, match=r"19 are longer than \d+ tokens, which leaves no room for a response"):
        read_prompts(options(prompts=[tmp_path / "p.jsonl"]), tmp_path)


def test_prompts_keep_their_images(options, tmp_path, monkeypatch):
    """The same words about another picture are another prompt; rows with what is not taken are counted."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawn.py").write_text(DRAWN)
    (tmp_path / "loops.yaml").write_text("- {name: drawn, _target_: drawn.Drawn}")
    agent = "actor_rollout_ref.rollout.agent"
    overrides = [f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=drawn"]
    shades = [*([shade] for shade in range(20)), [3, 4]]

    def read(shades, folder):
        said = [" ".join(map(str, row)) for row in shades]
        rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in said]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        return read_prompts(options(*overrides, prompts=[tmp_path / "rows.jsonl"]), tmp_path / folder)

    rows = [*shades, [7], [], []]
    known = read(rows, "images")
    found = [[image.getpixel((3, 3))[0] for image in open_images(prompt.images)] for prompt in known.all]
    assert sorted(found) == sorted(shades)
    assert {prompt.tokens for prompt in known.all} == {(5, 6)} and known.with_media == 2
    assert len(list((tmp_path / "images").iterdir())) == 20
    again, other = read(rows, "elsewhere"), read([*shades[:-1], [4, 3], *rows[-3:]], "images")
    assert (again.digest, again.held_out) == (known.digest, known.held_out) and other.digest != known.digest
    assert 0 < len(known.held_out) < 12, "held out by image too"
