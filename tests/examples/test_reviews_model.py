from __future__ import annotations

import pytest
import torch

from rllib_llm.examples.reviews_grammar import prompts, sft_texts
from rllib_llm.examples.reviews_model import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_the_vocabulary_and_its_special_tokens(tokenizer):
    assert len(tokenizer) == 512
    ids = [
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ]
    assert ids == [0, 1, 2, 3]  # four tokens of their own


def test_texts_come_back_to_the_letter(tokenizer):
    for row in sft_texts(200, seed=9):
        for text in row.values():
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_prompt_and_completion_are_cut_where_the_whole_text_is(tokenizer):
    for row in sft_texts(200, seed=9):
        whole = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        assert prompt + completion == whole
        assert whole[0] == tokenizer.bos_token_id
        assert whole[-1] != tokenizer.eos_token_id


def test_prompts_and_completions_fit_the_environments_defaults(tokenizer):
    from rllib_llm.examples.reviews import DEFAULTS

    every_prompt = [row["prompt"] for split in ("train", "eval") for row in prompts(split)]
    longest = max(len(ids) for ids in tokenizer(every_prompt)["input_ids"])
    assert longest <= DEFAULTS["max_prompt_len"]
    completions = [row["completion"] for row in sft_texts(2000)]
    ids = tokenizer(completions, add_special_tokens=False)["input_ids"]
    assert max(map(len, ids)) + 1 <= DEFAULTS["max_completion_len"]  # EOS is a token too


def test_plain_english_has_no_unknown_tokens(tokenizer):
    text = "Hello, is this worth 10 dollars? It's great!"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_equal_seeds_give_equal_models_and_leave_the_random_state():
    state = torch.get_rng_state()
    model, tokenizer = build_model(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    again, tokenizer_again = build_model(seed=1)
    other, _ = build_model(seed=2)
    assert tokenizer.backend_tokenizer.to_str() == tokenizer_again.backend_tokenizer.to_str()
    weights, same, different = (m.state_dict() for m in (model, again, other))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], different["lm_head.weight"])


def test_the_model_is_small_and_knows_its_tokens():
    model, tokenizer = build_model()
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 2e6
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, name) == getattr(tokenizer, name)


def test_a_saved_model_loads_as_it_was(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = build_model()
    model.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = sft_texts(1)[0]["prompt"]
    ids = AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == [tokenizer(text)["input_ids"]]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
