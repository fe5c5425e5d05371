"""Adapters: the base when B is 0 or they are off, the merged model when they are on."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.examples.characters import CHAT_SPECIAL, character_tokenizer
from rllib_llm.modules.frozen import load_quantized
from rllib_llm.modules.logprobs import ReferencePolicy, score_completions
from rllib_llm.modules.lora import (
    AdapterBase,
    adapters_off,
    add_adapters,
    check_lora,
    is_adapter,
    merge_into,
    read_adapters,
    save_adapters,
)
from rllib_llm.modules.pretrained import (
    load_causal_lm,
    load_sequence_classifier,
)
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.shared.errors import Problems
from tests.crossed import crossed
from tests.modules.tiny_models import tiny_model
from tests.rounding import assert_as_near, neighbour
from tests.tiny_models import llama, save

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def base(family="llama"):
    return tiny_model(family)


def adapted(family="llama", lora=None, seed=0):
    """The model with adapters whose B is not 0 any more, and its adapters by name."""
    model = base(family)
    add_adapters(model, {"r": 4, "alpha": 8, **(lora or {})}, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, {n: p for n, p in model.named_parameters() if is_adapter(n)}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def assert_merged(found, model):
    """A model whose weights hold the adapters says what `model` says, beside whose weights they
    are: as near to float64."""
    doubles = [copy.deepcopy(model).double(), *(neighbour(model, seed) for seed in range(3))]
    for double in doubles:
        double.set_experts_implementation("eager")  # grouped products know no float64
    exact, *near = map(logits, doubles)
    assert_as_near(logits(found), logits(model), exact, neighbours=near)


def test_new_adapters_leave_the_model_as_it_is():
    model = base()
    add_adapters(model, {})
    assert torch.equal(logits(model), logits(base()))
    # 7 linear layers in each of 2 blocks, A and B in each.
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all(is_adapter(name) for name in trained)


def test_every_process_draws_the_same_adapters_and_leaves_random_state_alone():
    before = torch.get_rng_state()
    models = [base(), base()]
    torch.set_rng_state(before)
    for model in models:
        add_adapters(model, {"r": 2}, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2 (soft-cap)", "qwen2 (tied)"])
def test_adapters_off_is_the_base_and_merged_is_adapters_on(family):
    model, tensors = adapted(family)
    on, plain = logits(model), logits(base(family))
    assert (on - plain).abs().max() > 0.1
    with adapters_off(model):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), on)
    merged_model = base(family)
    merge_into(merged_model, model, tensors)
    assert_merged(merged_model, model)


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def experts(family):
    """A tiny mixture of experts, whose routers prefer some of them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **EXPERTS[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 3 + 0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_of_experts_learn_merge_and_come_back(family, tmp_path):
    """Experts are one weight [experts, out, in], each adapted by matrices of its own."""
    model = experts(family)
    add_adapters(model, {"r": 2, "alpha": 4})
    plain = logits(experts(family))
    assert torch.equal(logits(model), plain)
    tensors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".experts." in name for name in tensors) == 2 * 2 * 2  # blocks, weights, A and B
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in tensors.items():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model(IDS).logits.square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in tensors.values())
    on = logits(model)
    assert (on - plain).abs().max() > 0.1
    with adapters_off(model):
        assert torch.equal(logits(model), plain)
    experts(family).save_pretrained(tmp_path / "base")
    base = AdapterBase(str(tmp_path / "base"))
    merged = experts(family)
    merge_into(merged, model, tensors)
    assert_merged(merged, model)
    save_adapters(model, tensors, tmp_path / "adapters", base)
    for load in (load_causal_lm, AutoPeftModelForCausalLM.from_pretrained):
        assert_merged(load(tmp_path / "adapters"), model)


@pytest.mark.parametrize("wrap", ["injected", "peft model"])
def test_scores_are_those_of_the_adapted_model(wrap):
    model, _ = adapted()
    if wrap == "peft model":
        # peft's own wrapper around an equal model; seeds give equal adapters.
        inner = base()
        wrapped = get_peft_model(inner, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        wrapped.load_state_dict(
            {f"base_model.model.{n}": t for n, t in model.state_dict().items()}, strict=True
        )
        model = wrapped.eval()
    ones = torch.ones_like(IDS, dtype=torch.bool)
    scored = score_completions(model, IDS[:, :4], ones[:, :4], IDS[:, 4:], ones[:, 4:])
    own, exact = (
        logits(one).log_softmax(-1)[:, 3:-1].gather(-1, IDS[:, 4:, None]).squeeze(-1)
        for one in (model, copy.deepcopy(model).double())
    )
    assert_as_near(scored.logprobs, own, exact)
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(2,), pad_token_id=0)
    sampled = generate(
        model, IDS, ones, params, num_completions=2, noise=uniform_noise(0, torch.arange(4), 30)
    )
    rows = IDS.repeat_interleave(2, 0)
    again = score_completions(
        model, rows, torch.ones_like(rows, dtype=torch.bool), sampled.completion_ids,
        sampled.completion_mask,
    )  # fmt: skip
    torch.testing.assert_close(sampled.logprobs, again.logprobs, rtol=1e-4, atol=1e-4)


def test_full_kl_to_the_trunk_is_that_to_a_second_copy_gradient_included():
    """With the head adapted as well, which must be off for the reference, chunked or not."""
    lora = {"target_modules": ["q_proj", "lm_head"]}
    ones = torch.ones_like(IDS, dtype=torch.bool)
    rows = (IDS[:, :4], ones[:, :4], IDS[:, 4:], ones[:, 4:])
    results = []
    for chunk in (None, 3):
        for with_copy in (True, False):
            model, tensors = adapted(lora=lora)
            reference = ReferencePolicy(model, lambda model=model: adapters_off(model))
            if with_copy:
                reference = ReferencePolicy(base())
            kl = score_completions(
                model, *rows, full_kl_to=reference, logits_chunk_tokens=chunk
            ).full_kl
            grads = torch.autograd.grad(kl.sum(), list(tensors.values()))
            results.append([kl.detach(), *grads])
    # By hand: sum_v p (log p - log p_ref) from the models' own logits.
    p, ref = logits(model).log_softmax(-1)[:, 3:-1], logits(base()).log_softmax(-1)[:, 3:-1]
    torch.testing.assert_close(results[0][0], (p.exp() * (p - ref)).sum(-1), rtol=1e-4, atol=1e-5)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            # Sums of some hundred float32 terms round by that many times 2^-24 of the largest: a
            # small element of a gradient up to 47 by 5e-5, which processors do unlike each other.
            scale = max(1.0, one.abs().max().item())
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5 * scale)


def test_an_adapter_folder_is_pefts_own_and_loads_merged(tmp_path):
    model, tensors = adapted()
    base().save_pretrained(tmp_path / "base")
    save_adapters(model, tensors, tmp_path / "adapters", AdapterBase(str(tmp_path / "base")))
    held = {file.name for file in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= held
    for name, tensor in read_adapters(tmp_path / "adapters", model).items():
        assert torch.equal(tensor, tensors[name])
    by_peft = PeftModel.from_pretrained(base(), tmp_path / "adapters")
    torch.testing.assert_close(logits(by_peft), logits(model))
    by_path = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    torch.testing.assert_close(logits(by_path), logits(model))
    ours = load_causal_lm(tmp_path / "adapters")
    assert_merged(ours, model)
    assert not any(is_adapter(name) for name, _ in ours.named_parameters())


def policy(folder, targets, seed):
    """A policy module whose adapters are not 0."""
    settings = {
        "pretrained_model": str(folder), "dtype": "float32", "temperature": 1.0, "critic": "none",
        "lora": {"r": 4, "target_modules": targets},
    }  # fmt: skip
    module = CausalLMModule(model_config=settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


@crossed(
    family=["llama", "qwen2 (tied)"],
    targets=[["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]],
)
def test_adapters_of_embeddings_come_back_and_merge(family, targets, tmp_path):
    """Each side has its own also where both share their weight, which is then shared no longer."""
    save(tmp_path / "base", base(family), character_tokenizer("0123", special=CHAT_SPECIAL))
    one, other = (policy(tmp_path / "base", targets, seed) for seed in (1, 2))
    trained = logits(one.model)
    assert (trained - logits(base(family))).abs().max() > 0.1
    one.save_pretrained(tmp_path / "adapters")
    other.load_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(other.model), trained)
    one.export_pretrained(tmp_path / "exported")
    assert torch.equal(logits(one.model), trained)
    for folder, loads in (
        ("exported", (AutoModelForCausalLM.from_pretrained, load_causal_lm)),
        ("adapters", (AutoPeftModelForCausalLM.from_pretrained, load_causal_lm)),
    ):
        for load in loads:
            assert_merged(load(tmp_path / folder), one.model)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_quantised_trunk_learns_and_merges_to_what_was_trained(quantization, tmp_path):
    llama(attention_dropout=0.0).save_pretrained(tmp_path / "base")
    source = AdapterBase(str(tmp_path / "base"), quantization)
    model = load_quantized(load_causal_lm, source.model, quantization=quantization)
    plain = logits(model)
    add_adapters(model, {"r": 4})
    assert torch.equal(logits(model), plain)
    model(IDS).logits.square().mean().backward()
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(is_adapter(name) for name in tensors)
    with torch.no_grad():
        for name, parameter in tensors.items():
            if ".lora_B." in name:
                assert parameter.grad.abs().max() > 0
                parameter.copy_(0.05 * torch.randn_like(parameter))
    on = logits(model)
    # LLM.int8 and the weight-only kernels round activations; a dense product does not.
    exact = load_causal_lm(source.model)
    merge_into(exact, model, tensors)
    unquantised = load_causal_lm(source.model)
    skeleton = llama(attention_dropout=0.0)
    add_adapters(skeleton, {"r": 4})
    merge_into(unquantised, skeleton, tensors)
    near, far = ((logits(m) - on).abs().max() for m in (exact, unquantised))
    assert near < 2e-3 * on.abs().max() and near < 0.1 * far
    save_adapters(model, tensors, tmp_path / "adapters", source)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path / "adapters")), logits(exact))


@pytest.mark.parametrize(
    "lora, name, rule",
    [
        ("r=4", "lora", "be a dict"),
        ({"rank": 4}, "lora.rank", "be a known key"),
        ({"r": 0}, "lora.r", "be a whole number"),
        ({"dropout": 1.0}, "lora.dropout", "be in"),
        ({"r": True}, "lora.r", "be a whole number"),
        ({"r": 8.0}, "lora.r", "be a whole number"),
        ({"alpha": math.inf}, "lora.alpha", "be a finite number above 0"),
        ({"target_modules": []}, "lora.target_modules", "be 'all-linear', a name"),
        ({"target_modules": 5}, "lora.target_modules", "be 'all-linear', a name"),
        ({"layers_to_transform": range(2), "target_modules": ["q"]}, "lora.layers_to_transform",
         "be"),
        ({"target_modules": ["q_proj", 5]}, "lora.target_modules", "be 'all-linear', a name"),
        ({"target_modules": "("}, "lora.target_modules", "be"),  # no regular expression
        ({"exclude_modules": 5}, "lora.exclude_modules", "be a name"),
        ({"layers_pattern": "", "layers_to_transform": 0, "target_modules": ["v_proj"]},
         "lora.layers_pattern", "be a name"),
        ({"layers_to_transform": "first", "target_modules": ["v_proj"]},
         "lora.layers_to_transform", "be the number"),
        ({"rank_pattern": {"q_proj": 0}}, "lora.rank_pattern", "be a mapping"),
        ({"alpha_pattern": {"q_proj": -1}}, "lora.alpha_pattern", "be a mapping"),
        ({"layers_to_transform": [0]}, "lora.target_modules", "be a list of names"),
        ({"layers_pattern": "layers"}, "lora.layers_pattern", "come with"),
        ({"use_rslora": "no"}, "lora.use_rslora", "be True or False"),
    ],
)  # fmt: skip
def test_settings_that_are_none_are_refused(lora, name, rule):
    with pytest.raises(Problems) as caught:
        check_lora(lora)
    (problem,) = caught.value.found
    assert problem.name == name and problem.rule.startswith(rule)


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(Problems) as caught:
        check_lora({"rank": 4, "lora_alpha": 8, "dropout": 2})
    found = [(problem.name, problem.remedy) for problem in caught.value.found]
    assert found == [
        ("lora.rank", "Did you mean 'r'?"),
        ("lora.lora_alpha", "Did you mean 'alpha' or 'r'?"),
        ("lora.dropout", ""),
    ]


def test_settings_that_peft_knows_are_taken():
    check_lora({
        "r": 4, "alpha": 0.5, "target_modules": r".*layers\.\d+\.self_attn\.[qv]_proj",
        "exclude_modules": ["lm_head"], "layers_pattern": None, "layers_to_transform": None,
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1.5}, "use_rslora": True,
    })  # fmt: skip
    check_lora({"target_modules": ("q_proj",), "layers_to_transform": [0, 1]})


def test_a_wrong_setting_is_blamed_itself_not_the_layers():
    with pytest.raises(Problems, match="^lora.r=0 must be a whole number"):
        add_adapters(llama(), {"r": 0})


def test_layers_that_the_model_does_not_have_are_refused_with_those_that_it_has():
    for targets, wrong in [(["q_prj"], ["q_prj"]), (["q_proj", "v_prj"], ["v_prj"])]:
        with pytest.raises(Problems, match="must name .*: down_proj, .*, v_proj") as caught:
            add_adapters(llama(), {"target_modules": targets})
        problem = caught.value.problem
        assert (problem.name, problem.value) == ("lora.target_modules", wrong)
    with pytest.raises(Problems) as caught:
        add_adapters(llama(), {"target_modules": ["q_proj"], "layers_to_transform": [99]})
    assert caught.value.problem.rule == "number layers of the model, 0 to 1"


FOREIGN = {
    "DoRA": lambda: LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    "bias of all layers": lambda: LoraConfig(r=4, bias="all", target_modules="all-linear"),
    "bias of adapted layers": lambda: LoraConfig(r=4, bias="lora_only", target_modules=["c_attn"]),
    "bias of B": lambda: LoraConfig(r=4, lora_bias=True, target_modules=["c_attn"]),
    "modules_to_save": lambda: LoraConfig(
        r=4, target_modules=["c_attn"], modules_to_save=["ln_f", "wte"]
    ),
    "trainable tokens": lambda: LoraConfig(
        r=4, target_modules=["c_attn"], trainable_token_indices=[5, 7]
    ),
    "IA3": lambda: IA3Config(target_modules=["c_attn"], feedforward_modules=[]),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FOREIGN)
def test_adapters_of_any_kind_that_peft_merges_are_loaded_as_peft_computes_them(kind, tmp_path):
    """The reference: peft's own forward pass beside the unmerged weights."""
    family = "llama" if kind == "LoHa" else "gpt2"
    base(family).save_pretrained(tmp_path / "base")
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), FOREIGN[kind]()
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter + 0.3 * noise)
    wrapped.eval().save_pretrained(tmp_path / "adapters")
    base(family).config.save_pretrained(tmp_path / "adapters")
    assert (logits(wrapped) - logits(base(family))).abs().max() > 0.1
    loaded = load_causal_lm(tmp_path / "adapters")
    assert_merged(loaded, wrapped)
    assert all(parameter.requires_grad for parameter in loaded.parameters())  # it may be trained
    loaded.save_pretrained(tmp_path / "merged")
    again = load_causal_lm(tmp_path / "merged")
    assert torch.equal(logits(again), logits(loaded))


def test_adapters_that_cannot_be_merged_are_refused_by_name(tmp_path):
    wrapped = get_peft_model(
        base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path)
    wrapped.save_pretrained(tmp_path / "prompts")
    base().config.save_pretrained(tmp_path / "prompts")
    with pytest.raises(Problems, match="'PROMPT_TUNING', .* cannot be merged"):
        load_causal_lm(tmp_path / "prompts")


def test_a_reward_model_from_adapters_asks_to_merge_them(tmp_path):
    model, tensors = adapted()
    base().save_pretrained(tmp_path / "base")
    save_adapters(model, tensors, tmp_path / "adapters", AdapterBase(str(tmp_path / "base")))
    with pytest.raises(Problems, match="holds adapters, .* Merge them first"):
        load_sequence_classifier(tmp_path / "adapters", new_head=True)
