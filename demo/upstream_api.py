"""What the toy relies on in verl, besides what the plugin does; `used_by` is a file below `demo/`."""

from verl_tlt.upstream.sources import Symbol, by_file

DEMO = by_file(
    {
        "toy/sampler.py": (Symbol("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"),),
        "toy/agent.py": (
            Symbol("verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run", "sampling_params"),
            Symbol("verl.experimental.agent_loop.agent_loop:", has="AgentLoopOutput"),
            Symbol("verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop", has="run"),
            Symbol("verl.experimental.agent_loop.tool_parser:ToolParser.extract_tool_calls", "responses_ids tools"),
        ),
        "toy/routing.py": (
            Symbol(
                "verl.workers.rollout.router:GlobalRequestLoadBalancer.acquire_server",
                "request_id",
                says=("self._servers", "self._inflight_requests[server_id] += 1"),
            ),
            Symbol("verl.workers.rollout.router:get_router_handle", "servers router_config_path"),
        ),
    }
)
