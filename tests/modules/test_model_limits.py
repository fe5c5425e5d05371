"""How much a model reads, and references that read ids otherwise, told before any weights are."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from rllib_llm.algorithms.sft import SFTConfig
from rllib_llm.modules import model_source
from rllib_llm.modules.model_source import REFERENCE, check_vocabulary
from rllib_llm.modules.tokenizer import load_tokenizer, read_chat_template
from tests import tiny_models as tiny

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_positions_and_embeddings(tmp_path):
    folder = tiny.save(tmp_path / "llama", tiny.llama(), tiny.byte_tokenizer())
    # As tiny_models.llama_config has them; GPT-2 calls its positions otherwise.
    for model in (folder, "tests.tiny_models.build_llama"):
        assert model_source.num_positions(model) == 128
        assert model_source.num_embeddings(model) == 260
    folder = tiny.save(tmp_path / "gpt2", tiny.gpt2(), tiny.byte_tokenizer())
    assert model_source.num_positions(folder) == 128


def test_texts_end_where_longrope_would_let_rows_depend_on_their_neighbours(tmp_path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=64,
        rope_parameters={**rope, **factors},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert model_source.num_positions(tmp_path) == 20
    config = SFTConfig().update_from_dict({"model": str(tmp_path), "max_length": 32})
    assert config.longest_text() == 20


def test_prompt_and_completion_share_the_positions():
    model_source.check_lengths(None, max_prompt_len=4000, max_new_tokens=16)
    model_source.check_lengths(512, max_prompt_len=496, max_new_tokens=16)
    model_source.check_lengths(512, max_prompt_len=4000, max_new_tokens=16, longest_prompt=496)
    with pytest.raises(ValueError, match="max_prompt_len=4000 must be at most 496 with max_new_to"):
        model_source.check_lengths(512, max_prompt_len=4000, max_new_tokens=16)
    with pytest.raises(ValueError, match="the longest prompt has 500 tokens, and the model reads"):
        model_source.check_lengths(512, max_prompt_len=4000, max_new_tokens=16, longest_prompt=500)
    with pytest.raises(ValueError, match="max_new_tokens=16 must be at most 12"):
        model_source.check_lengths(16, max_prompt_len=4, max_new_tokens=16)
    model_source.check_lengths(16, max_prompt_len=4, max_new_tokens=12)
    with pytest.raises(ValueError, match="max_new_tokens=64 must be at most 48"):
        model_source.check_lengths(64, max_prompt_len=16, max_new_tokens=64, longest_prompt=40)
    with pytest.raises(ValueError, match="max_new_tokens=16 must be at most 12"):
        model_source.check_lengths(16, max_prompt_len=99, max_new_tokens=16, longest_prompt=4)
    with pytest.raises(ValueError, match="max_new_tokens=16 must be at most 1: "):
        model_source.check_lengths(16, max_prompt_len=99, max_new_tokens=16, longest_prompt=50)


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    ours = tiny.byte_tokenizer()
    other = tiny.save(tmp_path / "other", tiny.llama(), tiny.byte_tokenizer(reverse=True))
    with pytest.raises(ValueError, match="its token 4 is "):
        check_vocabulary(REFERENCE, other, ours)
    small = tiny.save(tmp_path / "small", tiny.llama(vocab_size=260), ours)
    check_vocabulary(REFERENCE, small, ours)
    larger = tiny.byte_tokenizer()
    larger.add_tokens(["<extra>"])
    with pytest.raises(ValueError, match="its largest id is 259, not 260"):
        check_vocabulary(REFERENCE, small, larger)


def test_a_reference_without_a_tokenizer_is_asked_for_its_rows(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path / "bare")
    check_vocabulary(REFERENCE, str(tmp_path / "bare"), tiny.byte_tokenizer())


def test_a_chat_template_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "chat_template.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(str(file)) == read_chat_template(TEMPLATE) == TEMPLATE
    folder = tiny.save(tmp_path / "model", tiny.llama(), tiny.byte_tokenizer())
    assert load_tokenizer(folder).chat_template is None
    assert load_tokenizer(folder, chat_template=str(file)).chat_template == TEMPLATE
    with pytest.raises(ValueError, match="chat_template='none.jinja' .* there is no such file"):
        read_chat_template("none.jinja")
    file.write_text("no template")
    with pytest.raises(ValueError, match="it holds no Jinja"):
        read_chat_template(str(file))


def test_a_chat_template_that_jinja_cannot_read_is_refused():
    with pytest.raises(
        ValueError, match="chat_template='{% for m in messages %}' must .*: line 1: "
    ):
        read_chat_template("{% for m in messages %}")
    masked = "{% generation %}{{ messages }}{% endgeneration %}"  # transformers' own tag
    assert read_chat_template(masked) == masked
