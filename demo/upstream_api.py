"""What the toy relies on in verl, besides what the plugin does; `used_by` is a file below `demo/`."""

from __future__ import annotations

from verl_tlt.compat.upstream_api.symbol import Symbol

DEMO = (
    Symbol("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync", used_by="toy/sampler.py"),
    Symbol(
        "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
        "sampling_params",
        used_by="toy/agent.py",
    ),
    Symbol("verl.experimental.agent_loop.agent_loop:", has="AgentLoopOutput", used_by="toy/agent.py"),
    Symbol("verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop", has="run", used_by="toy/agent.py"),
    Symbol(
        "verl.experimental.agent_loop.tool_parser:ToolParser.extract_tool_calls",
        "responses_ids tools",
        used_by="toy/agent.py",
    ),
    Symbol(
        "verl.workers.rollout.router:GlobalRequestLoadBalancer.acquire_server",
        "request_id",
        says=("self._servers", "self._inflight_requests[server_id] += 1"),
        used_by="toy/routing.py",
    ),
    Symbol(
        "verl.workers.rollout.router:get_router_handle",
        "servers router_config_path",
        used_by="toy/routing.py",
    ),
)
