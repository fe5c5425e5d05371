"""Text policies from multimodal checkpoints: the text decoder is trained, all else is kept."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ForSequenceClassification,
    Gemma3ImageProcessor,
    Qwen2VLImageProcessor,
    SmolVLMImageProcessor,
)

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.torch_engine import copy_weights
from rllib_llm.examples.characters import CHAT_SPECIAL, CHAT_TEMPLATE, character_tokenizer
from rllib_llm.modules.frozen import load_quantized
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.lora import is_adapter
from rllib_llm.modules.multimodal import other_parts, other_tensors, text_decoder
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.quantization import is_quantized
from rllib_llm.modules.reward_model_module import RewardModelModule
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from rllib_llm.weights.flat_buffer import pack
from rllib_llm.weights.loading import ModuleLoader
from tests import tiny_models
from tests.crossed import crossed
from tests.engines.tiny_generations import ragged_prompts, sampled
from tests.learners.tiny_learners import completions
from tests.modules.test_logprobs import batch, own_stats
from tests.tiny_models import save

TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip
# Of each family: its parts, and the names of those that are frozen.
FAMILIES = {
    "gemma3": (
        {"text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4,
         "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
        ["model.vision_tower", "model.multi_modal_projector"],
    ),
    "qwen2_5_vl": (
        {"text_config": {**TEXT, "rope_parameters": MROPE}, **QWEN_IDS, "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 14, "fullatt_block_indexes": [0],
        }},
        ["model.visual"],
    ),
    "qwen3_vl": (
        {"text_config": {**TEXT, "rope_parameters": MROPE}, **QWEN_IDS, "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 14, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }},
        ["model.visual"],
    ),
    "smolvlm": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": SIGLIP,
         "image_token_id": 90, "scale_factor": 1},
        ["model.vision_model", "model.connector"],
    ),
}  # fmt: skip
PROCESSORS = {
    "gemma3": Gemma3ImageProcessor, "qwen2_5_vl": Qwen2VLImageProcessor,
    "qwen3_vl": Qwen2VLImageProcessor, "smolvlm": SmolVLMImageProcessor,
}  # fmt: skip
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}  # towers have layers of these names


def tiny(family: str, **text):
    """A tiny random model of a family; its logits are spread over several nats."""
    torch.manual_seed(0)
    settings = dict(FAMILIES[family][0])
    settings["text_config"] = {**settings["text_config"], **text}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 2 + 0.05 * torch.randn_like(parameter))
    return model


def checkpoint(folder, family: str, **text):
    """The folder of such a model, with tokenizer and what belongs to its processor."""
    save(folder, tiny(family, **text), character_tokenizer("0123", special=CHAT_SPECIAL))
    PROCESSORS[family]().save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def module(folder, **settings):
    return CausalLMModule(model_config={
        "pretrained_model": str(folder), "dtype": "float32", "temperature": 1.0, "critic": "none",
        **settings,
    })  # fmt: skip


def train(policy, num_steps: int = 2) -> None:
    """Steps uphill; B of an adapter starts at 0, so that A has no gradient at first."""
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    for _ in range(num_steps):
        policy.forward_train(completions())[columns.LOGPROBS].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(model, weights, plain, ours) -> dict[str, torch.Tensor]:
    """Log-probs of two ways, and gradients of their weighted sums; returns the second one's."""
    found = []
    for logprobs in (plain, ours):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), grads))
    (own, expected), (scored, gradients) = found
    torch.testing.assert_close(scored, own, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)
    return gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(family):
    model, rows = tiny(family).double(), batch()
    weights = torch.randn(3, 7, dtype=torch.float64) * rows["completion_mask"]
    assert_alike(
        model, weights, own_stats(model, rows)[0], score_completions(model, **rows).logprobs
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_sampled_with_transformers_log_probs(family):
    model = tiny(family)
    ids, mask = ragged_prompts()
    out = sampled(model, ids, mask, n=2, max_new_tokens=6)
    rows = {
        "prompt_ids": ids.repeat_interleave(2, 0), "prompt_mask": mask.repeat_interleave(2, 0),
        "completion_ids": out.completion_ids, "completion_mask": out.completion_mask,
    }  # fmt: skip
    for row in range(10):
        one = {name: value[[row] * 3] for name, value in rows.items()}
        expected = own_stats(model, one)[0][0]
        torch.testing.assert_close(out.logprobs[row], expected, rtol=1e-5, atol=2e-5)


def test_a_decoder_of_llamas_shape_takes_the_fast_step():
    plans = {family: DecodePlan.of(tiny(family)) for family in FAMILIES}
    assert {family for family, plan in plans.items() if plan.is_llama} == {"smolvlm"}
    assert all(plan.shares_prompts for plan in plans.values())


@crossed(lora=[None, LORA], family=[*FAMILIES])
def test_a_trained_model_is_exported_as_transformers_wrote_it(family, lora, tmp_path):
    folder = checkpoint(tmp_path / "model", family)
    policy = module(folder, lora=lora)
    train(policy)
    policy.save_pretrained(tmp_path / "saved")
    policy.export_pretrained(tmp_path / "exported")

    # The reference is what transformers saved: same names, shapes and dtypes; what sees is as it
    # was, bit for bit.
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported")
    )
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # On disk some have older names, of which the last part is the same.
    towers = [f"{part.rpartition('.')[2]}." for part in FAMILIES[family][1]]
    kept = {name for name in before if any(part in name for part in towers)}
    assert any("q_proj" in name for name in changed)
    assert kept and not kept & changed
    for file in ("preprocessor_config.json", "chat_template.json"):
        for saved in ("saved", "exported"):
            assert (tmp_path / saved / file).read_bytes() == (folder / file).read_bytes()

    written, config = (AutoConfig.from_pretrained(f) for f in (folder, tmp_path / "exported"))
    tokenizer = load_tokenizer(tmp_path / "exported")
    assert config.text_config.pad_token_id == tokenizer.pad_token_id is not None
    assert vars(config).keys() == vars(written).keys()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    expected = policy.forward_train(completions())[columns.LOGPROBS]
    taken = module(tmp_path / "exported").forward_train(completions())[columns.LOGPROBS]
    torch.testing.assert_close(taken, expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(again(torch.tensor([[5, 6]])).logits).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_newer_checkpoints_are_kept(family, tmp_path):
    # transformers writes the names of the time before it was 5; others write its own.
    folder = checkpoint(tmp_path / "model", family)
    state = load_causal_lm(folder).state_dict()
    names = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(state.items())}
    names = dict(names.values())
    save_file(names, folder / "model.safetensors", metadata={"format": "pt"})
    module(folder).export_pretrained(tmp_path / "exported")
    assert set(load_file(tmp_path / "exported" / "model.safetensors")) == set(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_never_travel(family, tmp_path):
    folder = checkpoint(tmp_path / "model", family)
    policy, sampler = module(folder), module(folder)
    sampler.inference_only = True
    assert other_parts(policy.model) == FAMILIES[family][1]
    towers = {f"model.{name}" for name in other_tensors(policy.model)}
    published = policy.published_tensors()
    assert towers and towers.isdisjoint(published)
    assert set(published) | towers == set(policy.own_tensors())
    frozen = {f"model.{n}" for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert frozen and frozen <= towers

    train(policy)
    for alias in (True, False):
        ModuleLoader(alias=alias).load(sampler, pack(policy.published_state()))
        held = sampler.model.state_dict()
        assert all(torch.equal(t, held[name]) for name, t in policy.model.state_dict().items())
    server = load_causal_lm(folder)  # one that follows the run
    copy_weights(server, policy.published_state())
    assert all(torch.equal(t, server.state_dict()[n]) for n, t in policy.model.state_dict().items())


def test_a_tower_is_trained_where_it_is_asked_for(tmp_path):
    policy = module(checkpoint(tmp_path / "model", "qwen2_5_vl"), train_vision=True)
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert set(policy.published_tensors()) == set(policy.own_tensors())


def test_a_model_of_text_has_no_tower_to_train(tmp_path):
    save(tmp_path, tiny_models.llama(), tiny_models.byte_tokenizer())
    with pytest.raises(Problems) as error:
        module(tmp_path, train_vision=True)
    assert error.value.problem.name == "train_vision"


@crossed(
    family=[*FAMILIES], targets=["all-linear", ["q_proj", "v_proj"], ".*(q_proj|proj|fc1)"]
)
def test_adapters_are_put_into_the_decoder_alone(family, targets, tmp_path):
    policy = module(checkpoint(tmp_path, family), lora={"r": 2, "target_modules": targets})
    adapted = {n for n, _ in policy.model.named_parameters() if is_adapter(n)}
    towers = tuple(f"{part}." for part in FAMILIES[family][1])
    assert adapted and not any(name.startswith(towers) for name in adapted)


def test_adapters_are_put_into_a_tower_that_is_named(tmp_path):
    targets = r".*(visual\.blocks.*qkv|q_proj)"
    lora = {"r": 2, "target_modules": targets, "exclude_modules": ["layers.0.self_attn.q_proj"]}
    policy = module(checkpoint(tmp_path, "qwen2_5_vl"), lora=lora)
    adapted = {n for n, _ in policy.model.named_parameters() if is_adapter(n)}
    assert any("visual" in name for name in adapted) and any("q_proj" in name for name in adapted)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_towers_stay_unquantised(quantization, tmp_path):
    folder = checkpoint(tmp_path, "qwen2_5_vl")
    model = load_quantized(load_causal_lm, folder, quantization=quantization)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    quantised = {name for name, layer in linear.items() if is_quantized(layer)}
    decoder = {n for n in linear if n.startswith("model.language_model.")}
    assert quantised == decoder


def test_a_critic_of_its_own_reads_text_alone(tmp_path):
    policy = module(checkpoint(tmp_path, "gemma3"), critic="separate")
    assert isinstance(policy.critic, type(text_decoder(policy.model)))
    assert torch.isfinite(policy.forward_train(completions())[columns.VALUES]).all()


def test_a_reward_model_keeps_its_tower_frozen(tmp_path):
    folder = checkpoint(tmp_path / "model", "gemma3")
    scorer = RewardModelModule(model_config={
        "pretrained_model": str(folder), "dtype": "float32", "seed": 0,
    })  # fmt: skip
    assert isinstance(scorer.model, Gemma3ForSequenceClassification)
    frozen = {name for name, p in scorer.model.named_parameters() if not p.requires_grad}
    assert frozen and all("vision_tower" in n or "multi_modal_projector" in n for n in frozen)


def test_ends_are_those_of_the_text_config():
    assert eos_token_ids(tiny("gemma3", eos_token_id=7).config) == (7,)


def test_the_processors_template_is_read_unless_the_run_has_one(tmp_path):
    folder = checkpoint(tmp_path / "model", "gemma3")
    assert load_tokenizer(folder).chat_template == CHAT_TEMPLATE
    policy = module(folder, chat_template="{{ messages[0].content }}")
    policy.save_pretrained(tmp_path / "saved")  # a processor prefers the older file
    assert not (tmp_path / "saved" / "chat_template.json").exists()
    assert load_tokenizer(tmp_path / "saved").chat_template == "{{ messages[0].content }}"
