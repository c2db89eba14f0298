"""Overrides of a recipe whose policy vLLM serves on a CPU, for engines that are started as a recipe would have them."""


def tiny_recipe(policy, data):
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={policy}",
        f"{rollout}.name=vllm", f"{rollout}.dtype=float32", f"{rollout}.enforce_eager=True",
        f"{rollout}.tensor_model_parallel_size=1",
        f"++{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
    ]  # fmt: skip
