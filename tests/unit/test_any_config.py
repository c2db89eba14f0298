"""Whatever a configuration says, it is a plan or sentences that name a key: never a traceback, never a cluster.

hypothesis writes values of every kind at every key that is read here, and at some that nobody knows. It is the flag
itself that is tried, from the driver's first look to the rewritten config.
"""

import copy
import re
import types

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

from verl_tlt import flag, plugin
from verl_tlt.config import TLTConfig

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
RECIPE = (
    "trainer.plugin", "trainer.v1.trainer_mode", "trainer.use_v1", "trainer.nnodes", "trainer.n_gpus_per_node",
    "trainer.default_local_dir", "trainer", "trainer.v1", "actor_rollout_ref", "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.model", "actor_rollout_ref.model.path", "actor_rollout_ref.model.mtp.enable", ACTOR,
    f"{ACTOR}.strategy", f"{ACTOR}.megatron", f"{ACTOR}.megatron.dynamic_context_parallel", f"{ACTOR}.fsdp_config",
    ROLLOUT, f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.pipeline_model_parallel_size", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length",
    f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.engine_kwargs", f"{ROLLOUT}.engine_kwargs.vllm", f"{ROLLOUT}.min_p",
    f"{ROLLOUT}.engine_kwargs.vllm.enforce_eager", f"{ROLLOUT}.engine_kwargs.vllm.speculative_config",
    f"{ROLLOUT}.engine_kwargs.vllm.scheduler_cls", f"{ROLLOUT}.engine_kwargs.vllm.additional_config",
    f"{ROLLOUT}.engine_kwargs.vllm.compilation_config", f"{ROLLOUT}.val_kwargs", f"{ROLLOUT}.disaggregation",
    f"{ROLLOUT}.quantization", f"{ROLLOUT}.custom", "data", "data.train_files", "data.val_files", "data.custom_cls",
    "data.custom_cls.path", "algorithm", "algorithm.rollout_correction", "ray_kwargs", "ray_kwargs.ray_init",
    "ray_kwargs.ray_init.address", "tlt", *(f"tlt.{section}" for section in TLTConfig().to_dict()),
    *(f"tlt.{section}.{key}" for section, keys in TLTConfig().to_dict().items() for key in keys),
)  # fmt: skip
KEYS = st.sampled_from(RECIPE) | st.from_regex(r"(tlt\.|trainer\.|)[a-z]{1,6}(\.[a-z]{1,6})?", fullmatch=True)
WORDS = ["tlt", "sync", "vllm", "fsdp2", "megatron", "???", "${nowhere}", "${trainer.nnodes}", "0", "-1", "a/b"]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("abk", min_size=1, max_size=3), inner),
    max_leaves=4,
)


def changed(recipe, changes):
    """The recipe with values set at keys; None where OmegaConf itself cannot hold one, as Hydra would have said."""
    config = copy.deepcopy(recipe)
    with open_dict(config):
        for key, value in changes.items():
            try:
                OmegaConf.update(config, key, value, merge=False, force_add=True)
            except Exception:
                return None
    return config


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
@example(changes={f"{ROLLOUT}.engine_kwargs.vllm": 3})
@example(changes={f"{ROLLOUT}.engine_kwargs.vllm.decode_context_parallel_size": [1]})
@example(changes={"data.train_files": 7})
@example(changes={f"{ROLLOUT}.custom": [""]})
@example(changes={"trainer.v1": None})
@example(changes={"trainer.plugin": "${nowhere}"})
def test_a_plan_or_sentences_that_name_a_key(recipe, changes):
    config = changed(recipe, changes)
    if config is None:
        return
    stock = types.ModuleType("stock")
    stock.validate_config = lambda *_: None
    plugin._wrap_validate_config(stock)
    try:
        stock.validate_config(config, False, False)
        if flag.wanted(config):
            assert TLTConfig.from_dict(OmegaConf.to_container(config.actor_rollout_ref.rollout.custom.tlt))
    except SystemExit as refusal:
        for sentence in str(refusal).split("\n"):
            assert re.match(r"verl-tlt: \S.*[.?]$", sentence), sentence
            assert re.search(r"[a-z_]+\.[a-z_]+|\btlt\b|/", sentence), sentence
