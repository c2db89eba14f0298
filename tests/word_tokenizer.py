"""A tokenizer of the words w0, w1, ..., each its own token, for policies that the tests make."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast


def save_tokenizer(policy, count, end=0, template=None):
    """Put one with so many words beside a policy; `end`: its end token, which is also what unknown words become."""
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token=f"w{end}"))
    inner.pre_tokenizer = Split(" ", "removed")  # verl asks of a Qwen that a line end is one token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=f"w{end}", unk_token=f"w{end}")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(policy)
