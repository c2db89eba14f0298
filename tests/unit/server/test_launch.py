"""The arguments with which a command starts vLLM are those of verl's rollout server."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.doctor.standalone_engine import set_up

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from tiny_policy import make_policy
    from word_tokenizer import save_tokenizer

    path = tmp_path_factory.mktemp("launch") / "policy"
    make_policy(max_position_embeddings=1 << 20, eos_token_id=47).save_pretrained(path)
    save_tokenizer(path, 48, 7)
    return path


async def arguments(policy, more, *overrides, changes=None):
    from verl_tlt.server.launch import Launch

    setup = set_up(Recipe((f"actor_rollout_ref.model.path={policy}", f"{ROLLOUT}.name=vllm", *overrides)), changes)
    server = Launch(setup.rollout, setup.model, lambda user: more)
    await server.launch_server()
    return server.arguments


async def test_what_a_recipe_says_reaches_vllm(policy):
    told = await arguments(
        policy,
        {"disable_log_stats": False, "speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}},
        "data.max_prompt_length=20", "data.max_response_length=30", f"{ROLLOUT}.dtype=float16",
        f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.max_num_seqs=9", f"{ROLLOUT}.quantization=fp8",
        "actor_rollout_ref.model.trust_remote_code=True", "actor_rollout_ref.model.lora_rank=8",
        f"{ROLLOUT}.enable_prefix_caching=False", f"{ROLLOUT}.cudagraph_capture_sizes=[1,2]",
        f"++{ROLLOUT}.engine_kwargs.vllm.block_size=32",
    )  # fmt: skip
    assert told.model == str(policy) and not told.skip_tokenizer_init and told.generation_config == "auto"
    assert told.max_model_len == 50, "not the policy's million positions"
    assert (told.dtype, told.tensor_parallel_size, told.max_num_seqs, told.block_size) == ("float16", 2, 9, 32)
    assert told.trust_remote_code and told.enable_lora and told.max_lora_rank >= 8 and told.quantization == "fp8"
    assert not told.enable_prefix_caching and told.compilation_config.cudagraph_capture_sizes == [1, 2]
    assert told.override_generation_config["max_new_tokens"] == 30
    assert not told.disable_log_stats and told.speculative_config["num_speculative_tokens"] == 2
    assert told.load_format == "auto", "no trainer sends it weights"
    assert told.worker_extension_cls.endswith("vLLMColocateWorkerExtension")


async def test_what_the_user_tells_vllm_itself_wins_and_what_we_need_wins_over_it(policy):
    user = f"++{ROLLOUT}.engine_kwargs.vllm"
    told = await arguments(
        policy, {"seed": 5}, f"{user}.load_format=dummy", f"{user}.seed=3", f"{ROLLOUT}.max_model_len=77"
    )
    assert (told.load_format, told.seed, told.max_model_len) == ("dummy", 5, 77)
    told = await arguments(policy, {}, changes={f"{ROLLOUT}.dtype": "auto", f"{ROLLOUT}.max_model_len": 88})
    assert (told.dtype, told.max_model_len) == ("auto", 88)
