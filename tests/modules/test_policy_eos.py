"""What other engines are told about a policy is what our own loop reads from the loaded model."""

from __future__ import annotations

import json

import pytest

from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer, policy_eos_ids
from tests.tiny_models import byte_tokenizer, llama, save


@pytest.mark.parametrize("generation_eos", [None, [4, 5]])
def test_eos_ids_of_the_config_count(tmp_path, generation_eos):
    save(tmp_path, llama(), byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 3]}))
    settings = tmp_path / "generation_config.json"
    settings.unlink(missing_ok=True)
    if generation_eos is not None:
        settings.write_text(json.dumps({"eos_token_id": generation_eos}))
    tokenizer = load_tokenizer(str(tmp_path))
    found = policy_eos_ids(str(tmp_path), tokenizer)
    assert {2, 3, *(generation_eos or ())} <= set(found)
    assert found == eos_token_ids(load_causal_lm(str(tmp_path)), tokenizer)
