import random

import pytest
from transformers import AutoTokenizer

from demo.toy import task
from demo.toy.tokenizer import TOKENIZER_FILES, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    assert sorted(p.name for p in directory.iterdir()) == sorted(TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(directory)


def test_texts_survive_the_round_trip(tokenizer):
    rng = random.Random(0)
    for _ in range(20):
        text = " ".join(task.sample_response(task.sample_problem(rng), rng))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [task.TOKEN_ID[t] for t in text.split()]
        assert tokenizer.decode(ids) == text


def test_it_has_what_verl_asks_of_a_qwen3_tokenizer(tokenizer):
    content = " ".join(task.prompt_tokens(task.Problem((1,), (2,))))
    messages = [{"role": "user", "content": content}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == content
    assert len(tokenizer) == 64
    assert tokenizer.encode("\n", add_special_tokens=False) == [task.TOKEN_ID[task.NEWLINE]]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == task.TOKEN_ID[task.IM_END]
    assert tokenizer.eos_token_id == task.TOKEN_ID[task.EOS]
    assert tokenizer.pad_token_id == task.TOKEN_ID[task.PAD]
