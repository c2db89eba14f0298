"""The toy's tokenizer in Hugging Face form: one word, one of 64 tokens."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.toy.task import BOS, EOS, IM_END, NEWLINE, PAD, TOKEN_ID

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Contents one after the other: the toy's prompts carry their own `<bos>` and `|`."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What `save_tokenizer` writes."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that splits at whitespace and keeps `\\n` as a token of its own."""
    words = Tokenizer(models.WordLevel(dict(TOKEN_ID), unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[NEWLINE, IM_END],  # as special tokens they are cut out before whitespace is split
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    build_tokenizer().save_pretrained(directory)
