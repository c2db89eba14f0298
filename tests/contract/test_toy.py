"""The toy's helpers against the verl that loads them."""

import inspect
import json

import hydra
import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.import_utils import load_extern_type, resolve_config_path

from tests.toy.agent import ToyToolParser, forced_sampling_params
from tests.toy.assets import Assets
from tests.toy.tokenizer import build_tokenizer


def test_verl_loads_the_reward_by_the_assets_string():
    score = load_extern_type(Assets.reward, "compute_score")
    assert score("toy_addition", "= z0 3 z1 0", "z0 3 z1 0") == 1.0


def test_verl_builds_the_fast_buffer_with_what_it_passes_to_custom_samplers():
    buffer = load_extern_type(Assets.sampler, "FastPollReplayBuffer")(
        trainer_mode="sync", trainer_config=OmegaConf.create({}), max_off_policy_threshold=None,
        max_off_policy_strategy="drop", sampler_kwargs=OmegaConf.create({}), refill_fn=lambda count: None,
    )  # fmt: skip
    assert isinstance(buffer, ReplayBuffer) and buffer.poll_interval == 0.2


def test_the_agent_loop_file_names_a_loop_that_verl_can_build():
    forced, tools = OmegaConf.load(resolve_config_path(str(Assets.agent_loop)))
    assert (forced.name, tools.name) == ("forced_length", "toy_tool_agent")
    assert issubclass(hydra.utils.get_class(forced._target_), SingleTurnAgentLoop)
    assert issubclass(hydra.utils.get_class(tools._target_), ToolAgentLoop)
    assert "toy" in ToolParser._registry


async def test_every_response_with_a_digit_calls_the_tool():
    parser = ToyToolParser(build_tokenizer())
    text, (call,) = await parser.extract_tool_calls(parser.tokenizer.encode("x0 7 y0 5 > z0 2"))
    assert text.endswith("z0 2") and (call.name, json.loads(call.arguments)) == ("calculate", {"expression": "0 + 2"})
    assert (await parser.extract_tool_calls(parser.tokenizer.encode("x0 y0")))[1] == []


def test_verl_tells_the_loop_which_sample_of_the_group_it_is():
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert "session_id=i" in inspect.getsource(worker._run_prompt)


def test_forced_lengths_reach_the_sampling_parameters_by_copy():
    shared = {"temperature": 1.0}
    row = {"forced_lengths": [12, 900]}
    assert forced_sampling_params(shared, row, 0, 512) == {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    assert forced_sampling_params(shared, row, 1, 512)["max_tokens"] == 512
    assert shared == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("row", "message"), [({}, "needs extra_info.forced_lengths"), ({"forced_lengths": [5]}, "has 1 lengths: too few")]
)
def test_rows_without_enough_lengths_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        forced_sampling_params({}, row, 1, 512)
