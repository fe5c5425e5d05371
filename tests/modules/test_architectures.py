"""Every model that transformers registers as a causal language model or as one that answers about
images: log-probs and gradients of tiny random models, packed and with the head apart, against plain
passes of one row after the other; and the decode loop, or its refusal.

Configs that know `is_decoder` are decoders here; an encoder sees later tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rllib_llm.engines.engine import check_decoding
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.multimodal import other_parts
from rllib_llm.modules.pretrained import generator_class, load_causal_lm
from rllib_llm.shared.errors import Problems
from tests.engines.tiny_generations import ragged_prompts, sampled
from tests.modules.test_logprobs import batch, own_logits
from tests.modules.tiny_models import VOCAB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of models that are run whole, and of slow paths
]
# What is small, under all the names that configs have for it.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "word_embed_proj_dim",
                     "embedding_size", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size",
                     "dense_intermediate_size", "intermediate_size_mlp", "decoder_ffn_dim",
                     "encoder_ffn_dim", "mamba_ssm_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers",
                     "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads",
                     "decoder_attention_heads", "encoder_attention_heads", "mamba_n_heads",
                     "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "d_head", "q_lora_rank",
                     "kv_lora_rank", "v_head_dim", "moe_intermediate_size",
                     "expert_ffn_hidden_size", "shared_expert_intermediate_size",
                     "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state", "state_size",
                     "ssm_state_size", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                     "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k",
                     "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_target_positions"), 128),
    # Towers of multimodal models.
    **dict.fromkeys(("depth", "perceiver_layers", "resampler_depth"), 2),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim"), 32),
    "image_size": 28, "patch_size": 14, "num_image_tokens": 4,
    "num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What a type needs beside them.
FURTHER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text",
         "qwen3_vl_text"), {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
    ),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), {"rope_parameters": {
        **ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5
    }}),
    "step3p5": {"sliding_window": 8},
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), {"head_dim": 8}),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), LINEAR),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), {
        **LINEAR, "mlp_layer_types": ["dense", "sparse"], "linear_num_heads": 2,
        "linear_head_dim": 16, "head_dim": 8, "num_expert_group": 1, "topk_group": 1,
    }),
    **dict.fromkeys(("lfm2_moe", "lfm3"), {"layer_types": ["conv", "full_attention"]}),
    **dict.fromkeys(("zamba", "zamba2"), {
        "num_hidden_layers": 4, "attention_head_dim": 32, "attention_hidden_size": 64,
        "mamba_headdim": 32, "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    }),
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 2, "head_dim": 32},
    "mimo_v2_flash": {"num_attention_heads": 8, "rope_parameters": dict.fromkeys(
        ("full_attention", "sliding_attention"), {**ROPE, "partial_rotary_factor": 0.5}
    )},
    "qwen4_exp_text": {**LINEAR, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Types that are left out, and why.
LEFT_OUT = {
    "blt": "reads bytes in patches that another model chooses",
    "dots3_note": "settings of single layers; its text model is tested",
    "gemma3n": "its image tower needs timm; its text model is tested",
    "gemma4_assistant": "reads the states of another model",
    "gemma4_unified_assistant": "reads the states of another model",
    "musicgen": "its config has no text model that could be built alone",
    "musicgen_melody": "its config has no text model that could be built alone",
    "prophetnet": "its numbers depend on the length of the row beyond a token",
    "reformer": "has gradients in train mode alone",
    "rwkv": "its own gradient fails on a processor: written in place",
    "xlnet": "sees later tokens",
    "xlstm": "its own forward fails at this size: its state has another shape than its layers",
}
# Types that do not decode as they compute: their states are lost or padding enters them, their
# positions are those of the padded row, or they take no cache of ours or no tokens one by one.
NOT_DECODED = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "cpmant",
    "data2vec-text", "falcon_mamba", "git", "mamba", "mamba2", "marian", "mbart", "minimax", "mvp",
    "openai-gpt", "pegasus", "plbart", "recurrent_gemma", "roberta", "roberta-prelayernorm",
    "roformer", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# In float32, in which the others run (not all can in float64), its log-probs of -13 nats differ by
# 125 roundings on a processor with AMX, instead of forty.
IN_FLOAT64 = {"xlm"}


def tiny_config(model_type: str) -> Any:
    """A small config of that type, its parts (a text model in a larger one) small as well."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()

    def small(config: Any) -> dict[str, Any]:
        own = config.to_dict()
        sizes = {name: size for name, size in SIZES.items() if name in own}
        return {**sizes, **FURTHER.get(config.model_type, {})}

    parts = {
        name: small(part)
        for name in getattr(default, "sub_configs", {})
        if hasattr(part := getattr(default, name, None), "to_dict")
    }
    return config_class(**{"is_decoder": True, **parts, **small(default)})


def spread_out(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model in eval mode whose weights spread its logits; zero biases would not show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 2 + 0.05 * torch.randn_like(parameter))
    return model


# Of those that answer about images: no text alone, or not in one order.
REFUSED = {
    "blip", "blip-2", "florence2", "idefics", "instructblip", "instructblipvideo", "kosmos-2",
    "paligemma", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder",
}  # fmt: skip
# Of those that answer about images: types that are left out, and why.
LEFT_OUT_OF_SEEING = {
    **dict.fromkeys(("chameleon", "emu3"), "their config needs a table of image tokens"),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "their image tower needs timm"),
    **dict.fromkeys(
        ("cosmos3_edge", "deepseek_ocr2", "ernie4_5_vl_moe", "exaone4_5", "glm5_next",
         "granite4_vision", "hunyuan_vl", "inkling2", "molmo2", "muse_spark", "nemotron_h_omni"),
        "their config refuses these sizes",
    ),
    **dict.fromkeys(("janus", "muse_glimmer", "pi0", "unlimited_ocr"), "not small at these sizes"),
    "diffusion_gemma": "writes blocks, not tokens",
    "dots3_note": LEFT_OUT["dots3_note"],
    "evolla": "reads proteins; transformers builds it by another class",
}
SEEING = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - REFUSED - {*LEFT_OUT_OF_SEEING}
TYPES = (set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*LEFT_OUT} - REFUSED | SEEING) - {
    *LEFT_OUT_OF_SEEING
}


@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_log_probs_and_gradients_are_the_models_own(model_type):
    torch.manual_seed(0)
    dtype = torch.float64 if model_type in IN_FLOAT64 else torch.float32
    config = tiny_config(model_type)
    model = generator_class(config).from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # spreads logits; zero biases would not show
            parameter.copy_(parameter * 2 + 0.05 * torch.randn_like(parameter))
    rows = batch()
    weights = torch.randn(3, 7) * rows["completion_mask"]

    def by_rows() -> torch.Tensor:
        logprobs = torch.stack([own_logits(model, rows, row) for row in range(3)]).log_softmax(-1)
        return logprobs.gather(-1, rows["completion_ids"].unsqueeze(-1)).squeeze(-1)

    found = []
    for logprobs in (by_rows(), score_completions(model, **rows).logprobs):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((logprobs.detach() * rows["completion_mask"], torch.cat(grads)))
    (plain, its_gradient), (ours, gradient) = found
    # float32 over some forty roundings of numbers of the logits' size, which are a few nats.
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-5)
    assert (gradient - its_gradient).norm() <= 1e-4 * its_gradient.norm()
    if model_type in SEEING:
        towers = {p for name in other_parts(model) for p in model.get_submodule(name).parameters()}
        assert all(p.grad is None or not p.grad.any() for p in towers)
        try:
            check_decoding(model)
        except Problems as error:
            assert error.problem.name == "model"


@pytest.mark.parametrize("model_type", sorted(REFUSED - {"florence2", "t5gemma2"}))
def test_what_does_not_continue_text_alone_is_refused_by_name(model_type, tmp_path):
    config = tiny_config(model_type)
    generator_class(config).from_config(config).save_pretrained(tmp_path)
    with pytest.raises(Problems) as error:
        load_causal_lm(tmp_path)
    assert error.value.problem.name == "model"


@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*LEFT_OUT}))
def test_it_decodes_as_it_computes_or_is_refused(model_type):
    model = spread_out(model_type)
    try:
        check_decoding(model)
    except Problems as error:
        assert [problem.name for problem in error.found] == ["model"]
        assert model_type in NOT_DECODED
        return
    assert model_type not in NOT_DECODED
    ids, mask = ragged_prompts()
    out = sampled(model, ids, mask, n=2, max_new_tokens=12)
    rows = [part.repeat_interleave(2, dim=0) for part in (ids, mask)]
    with torch.no_grad():
        exact = score_completions(model, *rows, out.completion_ids, out.completion_mask).logprobs
    # A fifth of what the probe lets pass of the logits' spread, which is about one nat.
    torch.testing.assert_close(out.logprobs, exact * out.completion_mask, rtol=0, atol=2e-4)
