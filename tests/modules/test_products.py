"""float32 products by both libraries: held to float64, the same in every path that multiplies."""

from __future__ import annotations

import copy

import pytest
import torch

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.learners.shared_passes import own_reference
from rllib_llm.modules.llama_trunk import is_fusible, products_of
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.precision import (
    ONEDNN,
    TORCH,
    OneDNNLinear,
    faster_library,
    multiplies_by_onednn,
    use_onednn,
)
from rllib_llm.modules.quantization import quantize
from rllib_llm.modules.text_scores import score_text
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny
from tests.modules.test_logprobs import batch
from tests.modules.tiny_models import tiny_model
from tests.tiny_models import llama

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
UNIT = torch.finfo(torch.float32).eps / 2


def assert_near(found: torch.Tensor, exact: torch.Tensor, terms: int, size: float) -> None:
    """A float32 sum of n products of numbers of `size` is off by n units of their sum at most;
    by about the root of it where errors have either sign, and ten roots are far out."""
    bound = 10 * terms**0.5 * UNIT * size**2 * terms**0.5
    assert (found.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("products", [TORCH, ONEDNN], ids=["mkl", "onednn"])
@pytest.mark.parametrize("n, k, m", [(1, 64, 33), (7, 576, 1536), (65, 96, 32), (3, 1, 1)])
def test_products_are_held_to_float64(products, n, k, m):
    torch.manual_seed(0)
    a, b, bias, total = (torch.randn(*s) for s in ((n, k), (k, m), (m,), (n, m)))
    exact, size = a.double() @ b.double(), 4.0
    assert_near(products.mm(a, b), exact, k, size)
    assert_near(products.mm(a, b.t().contiguous().t()), exact, k, size)  # however it lies
    assert_near(products.mm(b.t(), a.t()), exact.t(), k, size)
    assert_near(products.linear(a, b.t(), bias), exact + bias, k + 1, size)
    assert_near(products.addmm(total, a, b), exact + total, k + 1, size)
    assert_near(products.addmm_(total.clone(), a, b), exact + total, k + 1, size)
    assert products.linear(a[:0], b.t(), bias).shape == (0, m)


def test_gradients_of_a_layer_are_held_to_float64():
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80)
    inputs, weights = torch.randn(3, 11, 48), torch.randn(3, 11, 80)
    exact = copy.deepcopy(layer).double()
    use_onednn(layer)
    assert type(layer) is OneDNNLinear and type(exact) is torch.nn.Linear
    x, y = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    (layer(x) * weights).sum().backward()
    (exact(y) * weights.double()).sum().backward()
    assert_near(x.grad, y.grad, 80, 4.0)
    for one, other in zip(layer.parameters(), exact.parameters(), strict=True):
        assert_near(one.grad, other.grad, 33, 4.0)
    # An expanded gradient, no rows, and what is not float32.
    layer(inputs).sum().backward()
    assert layer(inputs[:0]).shape == (0, 11, 80)
    assert products_of(layer.double(), inputs.double()) is TORCH


@pytest.mark.parametrize("family", ["llama", "qwen2 (tied)", "qwen3", "gpt2", "gemma2 (soft-cap)"])
def test_log_probs_and_gradients_are_as_near_to_float64_as_by_torch(family):
    exact_model = tiny_model(family).double()
    errors = []
    for with_onednn in (False, True):
        model = tiny_model(family)
        if with_onednn:
            use_onednn(model)
            if family in ("llama", "qwen3"):
                assert is_fusible(model.model)
        models = (model, copy.deepcopy(exact_model))
        found = [score_completions(m, **batch(), entropy=True) for m in models]
        for out in found:
            (out.logprobs.sum() + out.entropy.sum()).backward()
        one, other = (
            torch.cat([p.grad.flatten().double() for p in m.parameters()]) for m in models
        )
        of_logprobs = (found[0].logprobs.double() - found[1].logprobs).abs().max()
        errors.append((of_logprobs.item(), ((one - other).norm() / other.norm()).item()))
    (logprobs, gradient), (by_onednn, its_gradient) = errors
    # Twice MKL's error, from sums in another order; a few units where MKL has next to none.
    assert by_onednn <= 8 * max(logprobs, 8 * UNIT)
    assert its_gradient <= 8 * max(gradient, 8 * UNIT)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_what_is_sampled_has_the_trainers_log_probs(family):
    model = tiny_model(family)
    use_onednn(model)
    ids = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(2,), pad_token_id=0)
    noise = uniform_noise(0, torch.arange(8), 30)
    sampled = generate(model, ids, mask, params, num_completions=4, noise=noise)
    rows = ids.repeat_interleave(4, 0)
    again = score_completions(
        model, rows, torch.ones_like(rows, dtype=torch.bool), sampled.completion_ids,
        sampled.completion_mask,
    )  # fmt: skip
    torch.testing.assert_close(sampled.logprobs, again.logprobs, rtol=1e-4, atol=1e-4)


def test_learner_and_reference_multiply_as_the_setting_says():
    learners = [
        tiny.build(tiny_runs.grpo().language_model(float32_products=library, **more))
        for library, more in (("mkl", {}), ("onednn", {}), ("onednn", {"lora": {"r": 2}}))
    ]
    modules = [tiny.module_of(learner) for learner in learners]
    assert [multiplies_by_onednn(module) for module in modules] == [False, True, True]
    rows = tiny.judged(learners[0])
    logprobs = [module.forward_train(rows)[columns.LOGPROBS] for module in modules[:2]]
    torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-5)
    for learner in learners:
        tiny.update(learner, rows)
    reference = own_reference(learners[1], copy=True).model
    assert multiplies_by_onednn(reference)


def test_bfloat16_is_left_as_it_is():
    config = tiny_runs.grpo().language_model(float32_products="auto", mixed_precision="bf16")
    assert not multiplies_by_onednn(tiny.module_of(tiny.build(config)))


@pytest.mark.parametrize("maker, family, features, library", [
    ("AuthenticAMD", 26, {"avx2", "avx512f"}, "onednn"),  # Zen 5: 512 bits at once
    ("AuthenticAMD", 26, {"avx2"}, "mkl"),
    ("AuthenticAMD", 25, {"avx2", "avx512f"}, "onednn"),  # Zen 4
    ("AuthenticAMD", 25, {"avx2"}, "mkl"),  # Zen 3
    ("GenuineIntel", 6, {"avx2", "avx512f"}, "mkl"),
    (None, None, {"avx512f"}, "mkl"),
])  # fmt: skip
def test_the_library_follows_from_the_processor(maker, family, features, library, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    if maker is not None:
        cpuinfo.write_text(
            f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 17\n"
            f"flags\t\t: {' '.join(features)}\n\nprocessor\t: 1\n"
        )
    if not torch.backends.mkl.is_available():
        library = "mkl"
    assert faster_library(cpuinfo) == library


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_reads_texts_in_few_sizes(family):
    """oneDNN keeps code for each size of a product: memory grew with every new length."""
    model = tiny_model(family)
    assert not DecodePlan.of(model).has_recurring_sizes
    text = list(range(3, 30))
    scores = score_text(model, text, 1)
    use_onednn(model)
    assert DecodePlan.of(model).has_recurring_sizes
    sizes = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: sizes.append(inputs[0].shape[1])
    )
    found = score_text(model, text, 1)
    assert sizes == [32] and len(found.ranks) == len(text) - 1
    assert found.logprobs == pytest.approx(scores.logprobs, abs=1e-4)


@pytest.mark.parametrize("quantization, backend", [("int8", "torchao"), ("int8", "bitsandbytes")])
def test_quantised_weights_keep_their_own_products(quantization, backend):
    """torchao's linear layers are torch's, with a weight of another class."""
    model, ids = quantize(llama(), quantization, backend=backend), torch.tensor([[1, 5, 6, 7]])
    expected = model(ids).logits
    use_onednn(model)
    assert not isinstance(model.model.layers[0].mlp.up_proj, OneDNNLinear)
    # The head is not quantised; its products round otherwise.
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
