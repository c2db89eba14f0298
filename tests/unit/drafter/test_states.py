"""What a drafter takes from its policy: shape, decoder, tensors, and the hidden states of texts; or one sentence."""

import pytest
import torch
from tiny_policy import FAMILIES, SHAPE, make_policy, observe, random_texts

from verl_tlt.drafter.build import drafter_config
from verl_tlt.drafter.capture import Library, PolicyStates, Text, find_decoder, load_policy, plan_epoch
from verl_tlt.drafter.policy import policy_shape, rope_of
from verl_tlt.drafter.verifier import VerifierWeights, policy_part
from verl_tlt.errors import DrafterError

LENGTHS = (9, 30, 4, 17, 30, 2)
VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_side_by_side_have_the_states_of_each_alone(family):
    policy, texts = make_policy(family), random_texts(*((length, 2) for length in LENGTHS))
    for (tokens, prompt), found in zip(texts, observe(policy, texts, layers=(0, 2, 3)), strict=True):
        alone = policy(tokens[None], output_hidden_states=True).hidden_states  # [i]: layer i's input; last: normed
        assert torch.equal(found.tokens, tokens) and found.prompt_len == prompt
        torch.testing.assert_close(found.aux, torch.cat([alone[i][0] for i in (0, 2, 3)], -1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(policy.model.norm(found.last), alone[-1][0], rtol=1e-4, atol=1e-5)


def test_a_library_keeps_what_its_memory_allows():
    runs = []

    class Counting(PolicyStates):
        def __call__(self, texts):
            runs.append([len(t.tokens) for t in texts])
            return super().__call__(texts)

    texts = [Text(tuple(range(length)), 2) for length in LENGTHS]
    per_token = 4 * 32 * 4 + 8  # four states of 32 floats, and the token
    library = Library(Counting(make_policy(), (1, 2, 3)), texts, max_bytes=20 * per_token)
    first = library.get([1, 0, 2, 1])
    assert [len(s) for s in first] == [30, 9, 4, 30]
    assert library.nbytes == 13 * per_token  # the short ones fit, the long one does not
    runs.clear()
    library.get([1])
    assert not runs, "the next window of a long text"
    library.get([0])
    again = library.get([2, 0, 1])
    assert runs == [[30]]
    assert torch.equal(again[0].aux, first[2].aux)


def test_an_epoch_has_every_row_once_within_the_budget():
    plan = plan_epoch(LENGTHS, 8, (0, 3))
    rows = [(s.number, t) for batch in plan for s in batch for t in range(s.begin, s.end - 1)]
    assert sorted(rows) == [(n, t) for n, length in enumerate(LENGTHS) for t in range(length - 1)]
    assert all(sum(s.end - s.begin - 1 for s in batch) <= 8 for batch in plan)
    assert plan == plan_epoch(LENGTHS, 8, (0, 3)) != plan_epoch(LENGTHS, 8, (0, 4))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(a small vision-language policy whose vision tower has as many layers, its directory)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    text = {**SHAPE, "head_dim": 8, "max_position_embeddings": 300, "rope_parameters": rope}
    tokens = {"image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43}
    policy = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=VISION, **tokens)).eval()
    with torch.no_grad():
        policy.model.language_model.norm.weight.uniform_(0.5, 1.5)
    directory = tmp_path_factory.mktemp("seeing")
    policy.requires_grad_(False).save_pretrained(directory)
    return policy, directory


def test_a_larger_models_drafter_is_its_language_models(seeing):
    policy, directory = seeing
    shape = policy_shape(directory)
    assert (shape.model_type, shape.nested, shape.max_position_embeddings) == ("qwen3_vl", True, 300)
    assert (shape.hidden_size, shape.vocab_size, shape.num_layers, shape.tied) == (32, 48, 4, False)
    assert shape.architectures == ("Qwen3VLForConditionalGeneration",)
    layer = drafter_config(directory).transformer_layer_config
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}, "its RoPE has one position"
    parts = VerifierWeights.from_policy_dir(directory)
    assert torch.equal(parts.embed, policy.get_input_embeddings().weight)
    assert torch.equal(parts.lm_head, policy.lm_head.weight)
    assert torch.equal(parts.norm, policy.model.language_model.norm.weight)


def test_a_larger_models_states_are_captured_from_text_and_images(seeing):
    """Texts side by side, some with images, have the states of each alone in the whole policy."""
    policy, directory = seeing
    patches = {"small": torch.randn(16, 3 * 2 * 16 * 16), "wide": torch.randn(32, 3 * 2 * 16 * 16)}
    grids = {"small": [1, 4, 4], "wide": [1, 4, 8]}  # [frames, height, width]; four patches are a token

    def image_inputs(files):
        pixels = torch.cat([patches[file] for file in files])
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grids[file] for file in files])}

    small, wide = (42, *[40] * 4, 43), (42, *[40] * 8, 43)
    texts = [
        Text((5, *small, 6, 7, 8), 9, ("small",)),
        Text((9, 10, 11), 1),
        Text((*wide, 5, *small, 6, 7), 17, ("wide", "small")),
    ]
    states = PolicyStates(load_policy(directory, "cpu"), (1, 2, 3), image_inputs)
    inputs = {}
    policy.model.language_model.layers[2].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.update(mid=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    for kept, text in zip(states(texts), texts, strict=True):
        ids = torch.tensor([text.tokens])
        images = image_inputs(text.images) | {"mm_token_type_ids": (ids == 40).int()} if text.images else {}
        alone = policy.model(input_ids=ids, **images).last_hidden_state[0]
        torch.testing.assert_close(policy.model.language_model.norm(kept.last), alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept.aux[:, 32:64], inputs["mid"][0], rtol=1e-4, atol=1e-5)
    (blind,) = states([Text(texts[0].tokens, 9)])
    assert not torch.allclose(blind.last[-1], states(texts[:1])[0].last[-1], atol=1e-2), (
        "the answer depends on the image"
    )


def test_no_decoder_or_two_are_refused_in_one_sentence():
    policy = make_policy()
    assert find_decoder(policy, "model.path").model is policy.model, "no logits are computed for states"
    policy.second = make_policy().model
    with pytest.raises(DrafterError, match=r"^model\.path is a Qwen3ForCausalLM, in which 2 modules hold a list of 4 "):
        find_decoder(policy, "model.path")
    policy.second, policy.model.layers = None, torch.nn.ModuleList(policy.model.layers[:3])
    with pytest.raises(DrafterError, match=r"in which no modules hold a list of 4 layers with one norm beside it"):
        find_decoder(policy, "model.path")


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        ({"architecture": "x86_64", "avx2": True}, torch.float32),
        ({"architecture": "x86_64", "avx512_bf16": True}, torch.bfloat16),
        ({"architecture": "aarch64"}, torch.bfloat16),
    ],
)
def test_states_are_computed_in_float32_where_products_of_16_bits_are_slow(tmp_path, monkeypatch, processor, dtype):
    make_policy().bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    (kept,) = PolicyStates(load_policy(tmp_path, "cpu"), (1, 2, 3))([Text((5, 6, 7, 8, 9), 2)])
    assert kept.aux.dtype == kept.last.dtype == dtype


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("language_model.model.norm.weight", "norm"),
        ("model.visual.merger.norm.weight", None),
        ("model.layers.61.embed_tokens.weight", None),
        ("model.norm.weight_scale", None),
    ],
)
def test_the_shared_parts_by_name(name, part):
    assert policy_part(name) == part


def test_a_mixture_of_experts_without_a_dense_layer_is_as_wide_as_what_a_token_passes():
    fields = {**SHAPE, "model_type": "qwen3_vl_moe", "moe_intermediate_size": 16, "num_experts_per_tok": 3}
    del fields["intermediate_size"]
    shape = policy_shape({**fields, "num_experts": 8})
    assert (shape.intermediate_size, shape.num_experts, shape.experts_per_token, shape.expert_width) == (48, 8, 3, 16)
    dense = policy_shape({**SHAPE, "model_type": "qwen3"})
    assert (dense.intermediate_size, dense.num_experts, dense.experts_per_token, dense.expert_width) == (64, 0, 0, 0)
    del fields["moe_intermediate_size"]
    with pytest.raises(DrafterError, match="no field 'intermediate_size'"):
        policy_shape(fields)


def test_a_drafters_rope_rotates_whole_heads_by_one_position():
    def rope(**fields):
        config = drafter_config({**SHAPE, "model_type": "glm", "head_dim": 8, **fields})
        return config.transformer_layer_config.rope_parameters

    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert rope(rope_parameters={**plain, "partial_rotary_factor": 0.5}) == plain
    assert rope(rope_theta=10000.0, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}) == plain
    linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert rope(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}) == linear, "older configs"
    factors = {"type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4}
    phi3 = rope(rope_theta=10000.0, rope_scaling=factors, model_type="phi3")
    assert phi3 == plain, "vLLM would choose another factor than training"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for given, scale in (
        ({}, 1.1386294),
        ({"attn_factor": 0.8782488562869419}, 1.1386294),  # which transformers does not read
        ({"attention_factor": 2.0}, 2.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ):
        found = rope(rope_scaling=yarn | given)
        assert found["attention_factor"] == pytest.approx(scale)
        assert found["attn_factor"] * 1.1386294 == pytest.approx(scale), "vLLM 0.28's name for it"
        assert not {"mscale", "mscale_all_dim"} & found.keys()
    beside = {"rope_parameters": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}
    assert rope_of(beside) == linear
    by_kind = {"full_attention": {**plain, "rope_theta": 5.0}, "sliding_attention": plain}
    assert rope_of({"rope_parameters": by_kind}) == {"rope_type": "default", "rope_theta": 5.0}
