"""The tiny policy and drafter that the project makes itself: real models with random weights, seconds on a CPU.

The policy is a Qwen3, Qwen2 or Llama whose next token depends mostly on the present one; the informed drafter is built
by hand to know just that, so that drafts are accepted often but not always. Its tokenizer spells each token in letters,
one with the `SMALL` vocabulary, two with the other, so that text, and what looks for stop strings in it, can be tried.
"""

from pathlib import Path
from typing import Any

import torch

V, H, LAYERS, HEADS, HEAD_DIM, MLP = 512, 128, 4, 4, 32, 256
SMALL = 16  # tokens in the small vocabulary


def build_target(path: Path, family: str = "qwen3", vocab: int = V) -> None:
    """A model of the family with random weights, saved to `path`."""
    import transformers

    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab, hidden_size=H, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(vocab, H))
        model.lm_head.weight.mul_(10.0)
        for layer in model.model.layers:  # how much the context counts beside the present token
            layer.self_attn.o_proj.weight.mul_(2.0)
            layer.mlp.down_proj.weight.mul_(2.0)
    model.save_pretrained(path)
    _save_tokenizer(path, vocab)


def build_drafter_dir(path: Path, target: Path, informed: bool, **settings: Any) -> None:
    """A drafter of it: one that knows the present token, or a random head."""
    from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights, save_drafter

    model = build_drafter(target, seed=1, **settings)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(target))
    if informed:
        with torch.no_grad():
            _pass_the_token_through(model)
    save_drafter(model, path, {"made for": "tests"})


def _pass_the_token_through(model: torch.nn.Module) -> None:
    """Make the drafter's output the embedding of the present token: attention to itself, nothing else."""
    weights = dict(model.named_parameters())
    attention = "layers.0.self_attn."
    for name, scale in (("q", 4.0), ("k", 4.0), ("v", 1.0)):
        weight = weights[f"{attention}{name}_proj.weight"]  # [H, 2H]: embedding, then hidden state
        weight.zero_()
        weight[:, :H] = scale * torch.eye(H)
    weights[f"{attention}o_proj.weight"].copy_(8.0 * torch.eye(H))
    weights["layers.0.mlp.down_proj.weight"].zero_()
    weights["fc.weight"].mul_(0.1)


def spell(token: int, vocab: int = V) -> str:
    """A token as text: one letter each where the alphabet has enough of them, else two."""
    letter, following = (chr(ord("a") + digit) for digit in divmod(token, 26))
    return following if vocab <= 26 else letter + following


def _save_tokenizer(path: Path, vocab: int) -> None:
    """A tokenizer of the words that `spell` makes, not parted by anything; token 2 ends a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({spell(token, vocab): token for token in range(vocab)}, unk_token=spell(0, vocab))
    )
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=spell(2, vocab)).save_pretrained(path)
