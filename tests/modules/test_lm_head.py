"""Models taken apart only where the parts add up to the model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM

from rllib_llm.modules.logprobs import ReferencePolicy, score_completions
from rllib_llm.modules.trunk import LogitTransform, take_apart
from rllib_llm.numerics.kl import full_kl
from tests.modules.test_logprobs import batch, exactly, own_logits, own_stats
from tests.modules.tiny_models import tiny_model
from tests.rounding import assert_as_near


class UndeclaredScale(LlamaForCausalLM):
    """Does something to its logits that its config does not say."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.7
        return output


class UndeclaredSoftcap(LlamaForCausalLM):
    """At logits below 1 its soft-cap changes them by less than a ten-thousandth."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 80 * torch.tanh(output.logits / 80)
        return output


@pytest.mark.parametrize(
    "family, transform",
    [
        ("llama", LogitTransform()),
        ("gemma2 (soft-cap)", LogitTransform(softcap=3.0)),
        ("cohere (logit scale)", LogitTransform(multiplier=0.3)),
        ("granite (logits scaling)", LogitTransform(divisor=0.7)),
        ("phi (head bias)", LogitTransform()),
    ],
)
def test_what_models_do_to_their_logits_is_found(family, transform):
    assert take_apart(tiny_model(family)).transform == transform


def test_a_soft_cap_is_found_on_an_untrained_head_too():
    # All logits are 0: the model's own numbers would not tell one transform from another.
    model = tiny_model("granite (logits scaling)")
    torch.nn.init.zeros_(model.lm_head.weight)
    assert take_apart(model).transform == LogitTransform(divisor=0.7)


@pytest.mark.parametrize("model_class", [UndeclaredScale, UndeclaredSoftcap])
def test_a_model_that_does_not_add_up_is_run_whole_with_one_warning(model_class):
    model = model_class(tiny_model().config).eval()
    rows = batch()
    with pytest.warns(UserWarning, match=f"{model_class.__name__} is run whole") as caught:
        outputs = score_completions(model, **rows, temperature=0.7, entropy=True, hidden=True)
        chunked = score_completions(
            model, **rows, temperature=0.7, entropy=True, logits_chunk_tokens=3
        )
    assert len([w for w in caught if "run whole" in str(w.message)]) == 1
    logprobs, entropy = own_stats(model, rows, temperature=0.7)
    for ours in (outputs, chunked):
        torch.testing.assert_close(ours.logprobs, logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.entropy, entropy, atol=1e-5, rtol=0)
    plain = LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())
    expected_hidden = score_completions(plain, **rows, hidden=True).hidden
    torch.testing.assert_close(outputs.hidden, expected_hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is run whole")
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("logits_chunk_tokens", [None, 3])
def test_gradients_of_a_model_run_whole_are_its_own(logits_chunk_tokens, with_kl):
    """Its logits belong to several: to other chunks, and to the exact KL."""
    model, rows = UndeclaredScale(tiny_model().config).eval(), batch()
    reference = ReferencePolicy(tiny_model(seed=1)) if with_kl else None
    logprobs, entropy = own_stats(model, rows)
    loss = logprobs.sum() + 0.3 * entropy.square().sum()
    if with_kl:
        kl = [
            full_kl(own_logits(model, rows, row), own_logits(reference.model, rows, row).detach())
            for row in range(3)
        ]
        loss = loss + (torch.stack(kl) * rows["completion_mask"]).sum()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    outputs = score_completions(
        model, **rows, entropy=True, full_kl_to=reference,
        logits_chunk_tokens=logits_chunk_tokens,
    )  # fmt: skip
    loss = outputs.logprobs.sum() + 0.3 * outputs.entropy.square().sum()
    (loss + (outputs.full_kl.sum() if with_kl else 0.0)).backward()
    for name, parameter in model.named_parameters():
        scale = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5 * scale, rtol=1e-4, msg=name
        )


def test_the_check_leaves_no_trace():
    model = tiny_model("gpt2").train()
    model.transformer.drop.eval()
    before = [module.training for module in model.modules()]
    take_apart(model)
    assert [module.training for module in model.modules()] == before
    assert not model.lm_head._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    follow = weakref.ref(model)
    del model
    gc.collect()
    assert follow() is None


def test_a_head_put_in_later_is_used():
    model, rows = tiny_model(), batch()
    score_completions(model, **rows)
    model.lm_head = torch.nn.Linear(32, 97, bias=True)
    torch.nn.init.normal_(model.lm_head.bias)
    plain, exact = (own_stats(one, rows)[0] for one in (model, exactly(model)))
    assert_as_near(score_completions(model, **rows).logprobs, plain, exact)


def test_lora_adapters_are_part_of_the_trunk_and_alone_get_gradients():
    model, rows = tiny_model(), batch()
    before = score_completions(model, **rows).logprobs.detach()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    plain, exact = (own_stats(one, rows)[0] for one in (adapted, exactly(adapted)))
    outputs = score_completions(adapted, **rows, logits_chunk_tokens=3)
    assert_as_near(outputs.logprobs, plain, exact)
    assert (outputs.logprobs - before).abs().max() > 1e-3
    outputs.logprobs.sum().backward()
    with_grad = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert with_grad and all("lora_" in name for name in with_grad)
    with adapted.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(score_completions(adapted, **rows).logprobs, before)


def test_virtual_tokens_are_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(tiny_model(), config)
    with pytest.raises(ValueError, match="must not prepend virtual tokens"):
        take_apart(model)


@pytest.mark.filterwarnings("ignore:.*is run whole for log-probs")
def test_a_model_whose_decoder_is_its_head_is_run_whole():
    """ModernBERT's (Ettin): its trunk's states go through another layer before the head."""
    model = tiny_model("modernbert-decoder", cls_token_id=1, sep_token_id=2)
    assert take_apart(model) is None
    rows = batch()
    scored = score_completions(model, **rows)
    torch.testing.assert_close(scored.logprobs, own_stats(model, rows)[0], rtol=1e-4, atol=1e-5)
