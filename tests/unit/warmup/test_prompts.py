"""The prompts of a warm-up are token for token those that verl's agent loops would send; unusable files are named."""

import json
from dataclasses import replace

import pytest

from verl_tlt.checks.recipe import compose
from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup.prompts import read_prompts
from verl_tlt.drafter.policy import DrafterError

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
TOOL_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"


@pytest.fixture
def options(policy_dir, prompts_file, tmp_path):
    def make(*overrides, **more):
        given = {"model": policy_dir, "prompts": [prompts_file], "out": tmp_path / "out", "response_length": 24, **more}
        return WarmupOptions(overrides=list(overrides) or None, **given)

    return make


def as_verl(policy_dir, overrides, messages):
    """Token ids of the chat as verl's tool and single-turn loops build them: its tokenizer, template and schemas."""
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
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs))


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
    read = read_prompts(options(*overrides, prompts=[tmp_path / "rows.jsonl"]))
    assert read.tokens == tuple(as_verl(policy_dir, overrides, messages) for messages in given)
    assert set(read.tokens[0]) >= marks and not {40, 41, 42, 44, 46, 9} & set(read.tokens[0]) - marks - {
        int(word[1:]) for word in prompt_lines[0].split()
    }


def test_a_tenth_is_held_out_whatever_else_is_in_the_file(options, tmp_path):
    lines = [f"w{i} w{j}" for i in range(1, 40) for j in range(1, 20)]
    rows = [json.dumps({"prompt": [{"role": "user", "content": line}]}) for line in lines]
    (tmp_path / "all.jsonl").write_text("\n".join(rows))
    (tmp_path / "half.jsonl").write_text("\n".join(rows[::2]))
    whole, half = (read_prompts(options(prompts=[tmp_path / f"{name}.jsonl"])) for name in ("all", "half"))
    assert len(whole.held_out) == pytest.approx(74, abs=25)  # three standard deviations
    held = {whole.tokens[i] for i in whole.held_out}
    assert {half.tokens[i] for i in half.held_out} == held & set(half.tokens)
    assert whole.digest != half.digest and whole.files_digest != half.files_digest


def test_equal_prompts_count_once_and_a_limit_holds(options, prompts_file, tmp_path):
    twice = replace(options(), prompts=[prompts_file, prompts_file])
    assert len(read_prompts(twice).tokens) == 40 and len(read_prompts(twice, limit=17).tokens) == 17


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.jsonl", '{"prompt": [{"role": "user", "content": "w1"}]}', "holds 1 different usable prompts, but at"),
        ("p.csv", "w1", "cannot be read by verl's dataset: Unsupported file format"),
        ("p.jsonl", '{"prompt": "w1"}\n{', "cannot be read by verl's dataset: "),
        ("p.jsonl", '{"text": "w1"}', "has no `prompt`, which verl reads by data.prompt_key."),
        ("p.jsonl", '{"prompt": "w1"}', "prompt 1 is no list of messages with `role` and `content`."),
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
        read_prompts(options(template, prompts=[tmp_path / name]))
    said = str(caught.value)
    assert sentence in said and str(tmp_path / name) in said and "\n" not in said and len(said) < 500


def test_long_prompts_are_left_out(options, tmp_path):
    chats = [[{"role": "user", "content": " ".join(["w5"] * 240) + f" w{i}"}] for i in range(1, 20)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": chat}) for chat in chats))
    with pytest.raises(DrafterError, match=r"19 are longer than \d+ tokens, which leaves no room for a response"):
        read_prompts(options(prompts=[tmp_path / "p.jsonl"]))
