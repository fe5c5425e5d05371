from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import FrozenReference
from rllib_llm.shared.errors import Problems
from tests import tiny_models as tiny

PROMPTS = [[1, 10, 11], [1], [1, 20, 21, 22, 23]]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [50]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("lm"), tiny.llama(), tiny.byte_tokenizer())


def batch(extra: int = 0):
    prompts = tiny.padded(PROMPTS, left=True, extra=extra)
    return (*prompts, *tiny.padded(COMPLETIONS, extra=extra))


@torch.no_grad()
def expected_logprobs(model, temperature: float) -> torch.Tensor:
    """Row by row, without padding: log_softmax(logits / temperature) of the next token."""
    rows = torch.zeros(3, 5)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
        logprobs = logits.log_softmax(-1)
        for t, token in enumerate(completion):
            rows[i, t] = logprobs[len(prompt) - 1 + t, token]
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_tokens", [1, 12, 10_000])
def test_logprobs_are_the_models_own(folder, temperature, batch_tokens):
    reference = FrozenReference(folder, batch_tokens=batch_tokens)
    logprobs = reference.logprobs(*batch(), temperature)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(
        logprobs, expected_logprobs(tiny.llama(), temperature), atol=2e-5, rtol=0
    )


def test_padding_changes_nothing_and_gets_zero(folder):
    reference = FrozenReference(folder)
    plain, wide = reference.logprobs(*batch()), reference.logprobs(*batch(extra=4))
    torch.testing.assert_close(wide[:, :5], plain, atol=2e-5, rtol=0)
    assert not wide[:, 5:].any()


def test_nothing_of_it_can_be_trained(folder):
    reference = FrozenReference(folder)
    with torch.enable_grad():
        assert not reference.logprobs(*batch()).requires_grad
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert not reference.model.training


@pytest.mark.parametrize("quantization", ["bf16", "int8", "nf4"])
def test_quantised_reference_reports_its_drift_on_the_first_batch(folder, quantization):
    reference = FrozenReference(folder, quantization=quantization, measure_drift=2)
    assert reference.metrics() == {}
    logprobs = reference.logprobs(*batch())
    drift = reference.metrics()
    assert set(drift) == {"drift/kl", "drift/top1"}
    assert 0 < drift["drift/kl"] < (0.1 if quantization == "nf4" else 0.01)
    torch.testing.assert_close(logprobs, expected_logprobs(tiny.llama(), 1.0), atol=1.5, rtol=0)
    reference.logprobs(*batch())
    assert reference.metrics() == drift


def test_bad_settings(folder, tmp_path):
    with pytest.raises(Problems, match="no config.json"):
        FrozenReference(tmp_path)
    with pytest.raises(ValueError, match="measure_drift=-1 must be a whole number"):
        FrozenReference(folder, measure_drift=-1)
    with pytest.raises(ValueError, match="batch_tokens=0"):
        FrozenReference(folder, batch_tokens=0)
    with pytest.warns(UserWarning, match="measure_drift has no effect"):
        FrozenReference(folder, measure_drift=4)
