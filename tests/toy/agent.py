"""Two agent loops of the toy: responses of a given length, and conversations with a tool.

**Given lengths**, so that two runs are compared on the same number of tokens: with sampling, an arm that happens to
draw one long response looks slow. Response i of a prompt stops after exactly `extra_info["forced_lengths"][i]` tokens
and not at `<eos>`, and may be sent to the same replica in every run (`tests.toy.routing`). Used by
`actor_rollout_ref.rollout.agent.agent_loop_config_path=<agent_loop.yaml>` and `.default_agent_loop=forced_length`.

**Tools**: the toy's 64 tokens cannot spell a tool call, so here every response counts as one: verl's own tool loop,
told by a parser of ours that the response asked for `calculate`. Used by `.default_agent_loop=toy_tool_agent` with
`actor_rollout_ref.rollout.multi_turn.format=toy`, to run a multi-turn recipe with the toy policy.
"""

import json
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


class _Numbered:
    """verl's client for one request, whose id tells `tests.toy.routing.ByNumber` where it belongs."""

    def __init__(self, client: Any, number: int) -> None:
        self._client, self._number = client, number

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """As the client's, under another id."""
        return await self._client.generate(request_id=f"{self._number}-{uuid4().hex}", **kwargs)


class ForcedLengthAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn loop with the response length set per sample."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Generate one response; `session_id` (0..n-1) comes from verl's `AgentLoopWorkerTQ._run_prompt`."""
        row, sample = kwargs["extra_info"], int(kwargs["session_id"])
        length = min(int(row["forced_lengths"][sample]), self.response_length)
        # A copy, since all samples of a group share the parameters.
        forced = {**sampling_params, "max_tokens": length, "ignore_eos": True}
        self.server_manager: Any = _Numbered(self.server_manager, int(row["index"]) + sample)
        return await super().run(forced, priority=priority, **kwargs)


@ToolParser.register("toy")
class ToyToolParser(ToolParser):
    """Reads a call of `calculate` out of every response: its last digit, plus nothing."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """(text, calls); a response without a digit calls nothing and so ends the conversation."""
        text = self.tokenizer.decode(responses_ids)
        digits = [word for word in text.split() if word.isdigit()]
        calls = [FunctionCall(name="calculate", arguments=json.dumps({"expression": f"0 + {d}"})) for d in digits[-1:]]
        return text, calls


class ToyToolAgentLoop(ToolAgentLoop):
    """verl's tool loop under another name: importing it makes the `toy` parser known."""
