from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nowait.training import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'][0] == 'u' and '7' or '3' }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}#{% endif %}"


def test_messages_are_rendered_by_the_chat_template_up_to_the_answer_and_text_is_taken_as_it_is(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(tiny) / "config.json").read_text())
    encode, decode, _ = load_tokenizer(str(tmp_path))
    assert decode(encode([{"role": "system", "content": "1"}, {"role": "user", "content": "2+2="}])) == "31;72+2=;#"
    assert decode(encode("2+2=")) == "2+2="


def test_messages_for_a_tokenizer_without_a_chat_template_are_an_error_with_a_remedy(tiny):
    with pytest.raises(ValueError, match="model.path: the tokenizer of .* has no chat template, .*; take a chat model"):
        load_tokenizer(tiny)[0]([{"role": "user", "content": "1"}])
