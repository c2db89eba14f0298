"""`verl-tlt warmup` and `evaluate` of a policy that is asked about images: engine, capture and run see the same ones.

Run by `make test-vision`: transformers and vLLM cut images with torchvision.
"""

import io

import families
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cli import cli
from PIL import Image
from rich.console import Console
from shared_engines import part_of
from tiny_engine import sampled
from tiny_recipe import tiny_recipe
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup import engine
from verl_tlt.commands.warmup.prompts import open_images, read_prompts
from verl_tlt.commands.warmup.train import PolicyTexts
from verl_tlt.drafter import build_drafter, save_drafter
from verl_tlt.drafter.capture import Text

pytest.importorskip("torchvision", reason="vLLM and transformers cut images with it: run by `make test-vision`")
pytestmark = pytest.mark.engine

FAMILY = "qwen2_5_vl"
MARKS = {500: "<|image_pad|>", 501: "<|video_pad|>", 502: "<|vision_start|>", 503: "<|vision_end|>"}
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %} {% endfor %}w47"
)
SIDE = 28
"""Pixels of a token's side."""


def save_processor(path):
    """Put one beside a policy of `families`: words are w0, w1, ..., and an image is cut into up to 16 tokens."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    inner = Tokenizer(WordLevel({MARKS.get(i, f"w{i}"): i for i in range(512)}, unk_token="w2"))
    inner.pre_tokenizer = Split(" ", "removed")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="w2", unk_token="w2", additional_special_tokens=list(MARKS.values())
    )
    sizes = {"patch_size": 14, "min_pixels": SIDE**2, "max_pixels": 16 * SIDE**2}
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen3VLVideoProcessor(patch_size=14),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(path)


def picture(rng, height, width):
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (SIDE * height, SIDE * width, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}  # as verl's data of geometry problems keeps them


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A recipe with images, its warm-up's options, prompts, and the greedy responses of the warm-up's engine."""
    folder = tmp_path_factory.mktemp(FAMILY)
    policy = folder / "policy"
    families.build_family(policy, FAMILY)
    (policy / "preprocessor_config.json").unlink()
    save_processor(policy)
    rng, rows = np.random.default_rng(0), []
    for i in range(24):
        images = [picture(rng, 2 + i % 3, 4) for _ in range((0, 1, 1, 2)[i % 4])]
        text = "<image>" * len(images) + f"w{5 + i // 8} w6"
        rows.append({"prompt": [{"role": "user", "content": text}], "images": images})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    rollout = "actor_rollout_ref.rollout"
    script = [
        *tiny_recipe(policy, folder / "train.parquet"),
        "data.max_prompt_length=64", "data.max_response_length=32",
        f"{rollout}.temperature=0", f"{rollout}.max_num_seqs=4", f"++{rollout}.ignore_eos=True",
    ]  # fmt: skip
    given = {"overrides": script, "out": folder / "drafter"}
    options = WarmupOptions(**WarmupOptions.completed(given))
    prompts = read_prompts(options, options.work / "images")
    job, stage = (
        engine.generation_job(options, prompts.all),
        engine.Stage(engine.make_bars(Console(quiet=True)), "", ""),
    )
    responses, _ = engine.generate(job, options.work / "responses", stage)
    return script, options, prompts, responses


def test_what_is_captured_is_what_the_engine_saw(answered):
    _, options, prompts, responses = answered
    assert {len(prompt.images) for prompt in prompts.all} == {0, 1, 2} and len(responses) == len(prompts.all)
    assert max(prompt.tokens.count(500) for prompt in prompts.all) == 32, "two images of sixteen tokens"
    drafter, texts = build_drafter(options.model), engine.as_texts(prompts.all, responses)
    blind = [Text(text.tokens, text.prompt_len) for text in texts]
    agreed = {}
    for name, some in (("seeing", texts), ("blind", blind)):
        library = PolicyTexts(drafter, options, some, "cpu", max_bytes=0)
        agreed[name] = []
        for i, states in enumerate(library.get(range(len(some)))):
            if texts[i].images:
                with torch.no_grad():
                    said = drafter.verifier_lm_head(drafter.verifier_norm(states.last)).argmax(-1)
                agreed[name] += (said[states.prompt_len - 1 : -1] == states.tokens[states.prompt_len :]).tolist()
    assert all(agreed["seeing"]), f"{sum(agreed['seeing'])} of {len(agreed['seeing'])} tokens"
    assert sum(agreed["blind"]) < 0.95 * len(agreed["blind"]), "the answers depend on the images"


def test_drafts_behind_an_image_have_their_own_places_in_the_drafters_cache(answered, models, engine_of, tmp_path):
    _, options, prompts, _ = answered
    drafter = save_drafter(build_drafter(options.model), tmp_path / "drafter", {}, policy=options.model)
    models |= {part_of(FAMILY, "target"): options.model, part_of(FAMILY, "good"): drafter}
    asked = [
        {
            "prompt_token_ids": qwen2_5_vl_dedup_image_tokens(list(p.tokens), hf_processor(str(options.model))),
            "multi_modal_data": {"image": open_images(p.images)} if p.images else {},
        }
        for p in prompts.all
    ]
    with engine_of("good", family=FAMILY) as engine:
        if hasattr(engine.runner, "speculator"):
            pytest.skip("vLLM's V2 model runner has no M-RoPE in drafts")
        proposer, off = engine.runner.drafter, []
        update = proposer._update_positions_dependent_metadata

        def noted(positions, metadata, *rest):
            after = update(positions, metadata, *rest)
            off.extend((after + 1 - metadata.seq_lens).tolist())
            return after

        engine.patch.setattr(proposer, "_update_positions_dependent_metadata", noted)
        engine.llm.generate(asked, sampled(16), use_tqdm=False)
    assert len(off) > 100 and not any(off)


def test_a_warmup_goes_on_from_these_responses_and_its_drafter_drafts_as_is_predicted(answered, monkeypatch):
    script, options, _, _ = answered

    def run(*words):
        code, said = cli(*words)
        assert code == 0, said
        return said

    training = ("--epochs", 20, "--batch-tokens", 512, "--learning-rate", 3e-3, "--objective", "eagle")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_job", lambda *_, **__: pytest.fail("all responses were there"))
        said = run("warmup", *script, "--out", options.out, *training)
    assert "left out" not in said and not options.work.exists()
    said = run("evaluate", options.out, *script, "--draft-length", 3)
    assert "within 5 %" in said, said
