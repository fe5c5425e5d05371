"""Other kernels than torch's SDPA compute the same log-probs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import varlen

from rllib_llm import GRPOConfig
from rllib_llm.config.model import precision_rules
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.packed_attention import MaskedLayout, RowLayout
from rllib_llm.modules.packing import completion_rows
from rllib_llm.modules.trunk import use_kernel, wanted_tokens
from rllib_llm.shared.errors import Problems
from tests.crossed import crossed
from tests.modules.test_dense_packing import group_batch, stats_and_gradients
from tests.modules.tiny_models import tiny_model
from tests.rounding import assert_as_near

LAYOUTS = {"flash_attention_2": RowLayout, "flex_attention": MaskedLayout}


def plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size,
                 enable_gqa):  # fmt: skip
    """torch's `varlen_attn` as its documentation has it, one row after another."""
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max()) and int(cu_seq_q[-1]) == len(query)
    rows = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        places = torch.arange(end - start)
        distance = places.unsqueeze(1) - places
        seen = distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        parts = (states[start:end].transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        attended = F.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(attended[0].transpose(0, 1))
    return torch.cat(rows)


def older_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """That of torch 2.11, for as many heads of keys as of queries."""
    assert query.shape[1] == key.shape[1]
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
                        window_size=window_size, enable_gqa=False)  # fmt: skip


@pytest.fixture(params=[plain_varlen, older_varlen])
def flash_on_a_processor(request, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", request.param)


def padded_model(family: str) -> torch.nn.Module:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


FLEX_WARNS = "ignore:flex_attention called without torch.compile"


@pytest.mark.filterwarnings(FLEX_WARNS)
@crossed(
    family=["llama", "qwen2 (tied)", "gpt2", "granite (logits scaling)"], kernel=[*LAYOUTS]
)
def test_log_probs_are_those_of_padded_rows(kernel, family, flash_on_a_processor):
    rows = group_batch()
    model, padded = tiny_model(family), padded_model(family)
    use_kernel(model, kernel)
    with torch.no_grad():
        layout = wanted_tokens(model.base_model, completion_rows(**rows)).layout
        assert type(layout) is LAYOUTS[kernel]
        expected, found, exact = (
            score_completions(one, **rows, entropy=True, hidden=True)
            for one in (padded, model, padded_model(family).double())
        )
    # Flex attention shares the prompts of 3 and 5 tokens; with flash each row has its own.
    prompts = 8 if kernel == "flex_attention" else 3 * 3 + 3 * 5
    assert (found.num_computed, found.num_padding) == (prompts + 3 + 6 + 0 + 6 + 1 + 4, 0)
    for name in ("logprobs", "entropy", "hidden"):
        assert_as_near(getattr(found, name), getattr(expected, name), getattr(exact, name).double())


def test_gradients_of_flash_attention_are_those_of_padded_rows(flash_on_a_processor):
    rows = group_batch()
    model, padded = tiny_model(), padded_model("llama")
    use_kernel(model, "flash_attention_2")
    _, found = stats_and_gradients(model, rows)
    _, expected = stats_and_gradients(padded, rows)
    _, exact = stats_and_gradients(padded_model("llama").double(), rows)
    names = list(expected)
    assert_as_near(*([gradients[name] for name in names] for gradients in (found, expected, exact)))


def test_rows_longer_than_a_window_stay_one_behind_another_with_flash(flash_on_a_processor):
    rows = group_batch()
    flash = tiny_model("mistral (sliding window)")
    use_kernel(flash, "flash_attention_2")
    padded = tiny_model("mistral (sliding window)")
    with torch.no_grad():
        expected, found, exact = (
            score_completions(one, **rows)
            for one in (padded, flash, tiny_model("mistral (sliding window)").double())
        )
    assert expected.num_padding > 0 and found.num_padding == 0
    assert_as_near(found.logprobs, expected.logprobs, exact.logprobs.double())


def test_a_model_that_cannot_be_laid_out_refuses_another_kernel():
    model = padded_model("llama")
    use_kernel(model, "flex_attention")
    with pytest.raises(Problems) as caught:
        score_completions(model, **group_batch())
    assert (caught.value.problem.name, caught.value.problem.rule) == ("attn_implementation",
                                                     "be 'sdpa' for LlamaModel")  # fmt: skip


@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_kernel_without_its_hardware_is_refused_before_anything_starts(kernel):
    config = GRPOConfig().language_model(model="any", attn_implementation=kernel)
    found, *_ = precision_rules(config)
    assert found.rule == "be 'sdpa' without a GPU for each learner"
    config.learners(num_gpus_per_learner=1)
    if kernel == "flash_attention_2":
        (found,) = precision_rules(config)
        assert found.rule == "be 'sdpa' or 'flex_attention' in float32"
    config.language_model(mixed_precision="bf16")
    assert not [*precision_rules(config)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_on_a_gpu_they_are_sdpa_up_to_bfloat16(kernel):
    rows = {name: column.cuda() for name, column in group_batch().items()}
    found = []
    for dtype, chosen in ((torch.bfloat16, "sdpa"), (torch.float64, "sdpa"),
                          (torch.bfloat16, kernel)):  # fmt: skip
        model = tiny_model().to("cuda", dtype)
        use_kernel(model, chosen)
        outputs, gradients = stats_and_gradients(model, rows)
        found.append([outputs.logprobs.double(), *(one.double() for one in gradients.values())])
    sdpa, exact, other = found
    for one, plain, true in zip(other, sdpa, exact, strict=True):
        assert float((one - true).norm()) <= 2 * float((plain - true).norm()) + 1e-6
