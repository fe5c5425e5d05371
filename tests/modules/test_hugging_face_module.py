"""State and checkpoints of modules: a Hugging Face folder, whatever RL adds beside it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_llm.modules.hugging_face_module import EXTRAS_FILE
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import assert_same_weights
from tests.learners.tiny_learners import completions
from tests.modules.test_causal_lm import build


def randomised(module, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_a_saved_folder_gives_the_same_module_back(tmp_path, critic):
    module = randomised(build(critic=critic))
    path = module.save_to_path(tmp_path / "module")
    other = build(critic=critic)
    other.restore_from_path(path)
    assert_same_weights(module.get_state(), other.get_state())
    assert (tmp_path / "module" / EXTRAS_FILE).exists() == (critic != "none")


def test_transformers_reads_the_folder(tmp_path):
    module = randomised(build(critic="shared"))
    module.save_to_path(tmp_path / "module")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "module")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "module")
    ids = torch.tensor([tokenizer("12+3=")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, module.model(ids).logits)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None


def test_an_inference_state_has_the_policy_alone_and_fits_a_learner():
    module = randomised(build(critic="shared"))
    state = module.get_state(inference_only=True)
    assert "value_head.linear.weight" not in state
    other = build(critic="shared")
    other.set_state(state)
    assert torch.equal(other.model.lm_head.weight, module.model.lm_head.weight)
    assert not other.value_head.linear.weight.any()  # as it was


def test_a_state_is_copied_in_place():
    module, source = build(critic="shared"), randomised(build(critic="shared"))
    places = {name: p.data_ptr() for name, p in module.named_parameters()}
    module.set_state(source.get_state())
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == places
    batch = completions()
    assert torch.equal(module.forward_train(batch)[columns.VALUES],
                       source.forward_train(batch)[columns.VALUES])  # fmt: skip


def test_a_state_that_lacks_something_is_refused_by_name():
    module = build(critic="shared")
    state = module.get_state()
    del state["model.model.norm.weight"]
    with pytest.raises(ValueError, match="1 parameters .* first 'model.model.norm.weight'"):
        module.set_state(state)


def test_a_state_of_another_architecture_is_refused_and_nothing_changes():
    module = build(critic="none")
    before = {name: tensor.clone() for name, tensor in module.get_state().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    state["model.model.norm.weight"] = state["model.model.norm.weight"][:4]
    with pytest.raises(ValueError, match="have another shape, first 'model.model.norm.weight'"):
        module.set_state(state)
    assert all(torch.equal(now, before[name]) for name, now in module.get_state().items())


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors"):
        build().load_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_survives(tmp_path, dtype):
    module = randomised(build(critic="shared", dtype=dtype))
    state = module.get_state()
    assert state["model.lm_head.weight"].dtype == getattr(torch, dtype)
    module.save_to_path(tmp_path / "module")
    other = build(critic="shared", dtype=dtype)
    other.restore_from_path(tmp_path / "module")
    assert_same_weights(state, other.get_state())
