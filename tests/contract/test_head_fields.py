"""Every field of a head's config that the installed vLLM reads is carried over or refused, with vLLM's own default."""

import ast
import importlib.util
from pathlib import Path

from verl_tlt.drafter.head_config import ARCHITECTURES, LAYER_FIELDS, ONLY, SPECULATORS_DEFAULTS

VLLM = Path(importlib.util.find_spec("vllm").origin).parent
MODELS, ALGORITHMS = VLLM / "model_executor/models", VLLM / "transformers_utils/configs/speculators/algos.py"
OTHERWISE = {
    "eagle_config": "its fields are read one by one",
    "eagle_aux_hidden_state_layer_ids": "in eagle_config too, where readers count differently (`_check_nested_layers`)",
    "model_type": "another than llama is refused, or names no other network in a flat config",
    "sliding_window": "read where layer_types asks for it",
    "target_layer_count": "set by vLLM",
}
CONFIGS = {"config", "self.config", "eagle_config", "config_dict", "pre_trained_config"}


def fields_read(tree):
    """Names that are read of a config, as attributes, keys or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in CONFIGS:
            yield node.attr
        elif isinstance(node, ast.Call):
            function, words = ast.unparse(node.func), [a.value for a in node.args if isinstance(a, ast.Constant)]
            named = function in ("getattr", "hasattr") and ast.unparse(node.args[0]) in CONFIGS
            if words and (named or function.removesuffix(".get") in CONFIGS):
                yield words[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in CONFIGS and isinstance(node.ctx, ast.Load):
            yield ast.literal_eval(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) in CONFIGS:
            yield ast.literal_eval(node.left)


def parts(file, names):
    return [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) in names]


def test_every_field_that_vllm_reads_is_carried_or_refused():
    trees = [ast.parse((MODELS / "llama_eagle3.py").read_text())]
    trees += parts(MODELS / "llama.py", ("LlamaDecoderLayer", "LlamaAttention"))
    trees += parts(ALGORITHMS, ("update_eagle3",))
    read = {name for tree in trees for name in fields_read(tree)} - {"get", "items"}
    assert {"norm_before_residual", "logit_scale", "rms_norm_eps", "target_hidden_size"} <= read, (
        "the test sees nothing"
    )
    assert not read - set(SPECULATORS_DEFAULTS) - set(LAYER_FIELDS) - set(ONLY) - set(OTHERWISE)


def test_what_a_speculators_config_leaves_out_is_what_vllm_takes():
    from vllm.transformers_utils.configs.speculators.algos import update_eagle3

    made = {}
    update_eagle3({}, made)
    made.pop("architectures")
    assert made == {field: SPECULATORS_DEFAULTS[field] for field in made}
    assert all(SPECULATORS_DEFAULTS[field] is None for field in SPECULATORS_DEFAULTS.keys() - made.keys())


def test_flat_heads_are_of_one_class_in_vllm():
    registry = (MODELS / "registry.py").read_text()
    for name in set(ARCHITECTURES) - {"LlamaForCausalLM"}:  # to which vLLM adds Eagle3
        assert f'"{name}": ("llama_eagle3", "Eagle3LlamaForCausalLM")' in registry
