"""Text policies from checkpoints whose values for text are in a config of their own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_llm.examples.characters import CHAT_SPECIAL, character_tokenizer
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.modules.tokenizer import eos_token_ids
from rllib_llm.shared import columns
from tests.learners.tiny_learners import completions
from tests.tiny_models import save


def gemma3(**text):
    """A tiny random Gemma 3 with vision tower; it has no `pad_token_id` but in its text config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3",
        text_config={
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, **text,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "v_proj"]}])
def test_a_trained_gemma_3_is_exported_as_transformers_writes_it(lora, tmp_path):
    original = gemma3(pad_token_id=None)
    tokenizer = character_tokenizer("0123", special=CHAT_SPECIAL)
    save(tmp_path / "model", original, tokenizer)
    module = CausalLMModule(model_config={
        "pretrained_model": str(tmp_path / "model"), "dtype": "float32", "temperature": 1.0,
        "critic": "none", "lora": lora,
    })  # fmt: skip
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):  # B of an adapter starts at 0, so that A has no gradient at first
        module.forward_train(completions())[columns.LOGPROBS].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    module.save_pretrained(tmp_path / "saved")
    module.export_pretrained(tmp_path / "exported")

    # The reference is what transformers saved: same names, shapes and dtypes; vision is untouched.
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "exported")
    )
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("vision" in n or "projector" in n for n in changed)
    assert any("q_proj" in name for name in changed)
    config = AutoConfig.from_pretrained(tmp_path / "exported")
    assert config.text_config.pad_token_id == tokenizer.pad_token_id is not None
    assert not hasattr(config, "pad_token_id")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.isfinite(again(torch.tensor([[5, 6]])).logits).all()


def test_ends_are_those_of_the_text_config():
    assert eos_token_ids(gemma3(eos_token_id=7).config) == (7,)
