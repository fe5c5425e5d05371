"""Frozen models on the pretend GPU: the reference and reward models."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import FrozenReference, RewardModelScorer
from tests.algorithms import tiny_runs as tiny

# A row's numbers are sums of some dozen products in other orders: a few float32 roundings.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def batch(device: str):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 13, (6, 11), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :4] = mask[2, 8:] = mask[5, 7:] = False  # prompts on the left, completions on the right
    return [part.to(device) for part in (ids[:, :6], mask[:, :6], ids[:, 6:], mask[:, 6:])]


@pytest.mark.parametrize("batch_device", ["cpu", "cuda"])
def test_a_reference_gives_the_processor_s_log_probs(batch_device, gpu):
    here = FrozenReference(f"{tiny.HERE}.build_model").logprobs(*batch("cpu"), 0.7)
    reference = FrozenReference(f"{tiny.HERE}.build_model", device="cuda", batch_tokens=30)
    there = reference.logprobs(*batch(batch_device), 0.7)
    assert there.device.type == batch_device  # whose batch it is
    torch.testing.assert_close(there.cpu(), here, **CLOSE)


def test_a_reward_model_gives_the_processor_s_scores(gpu):
    source = f"{tiny.HERE}.build_classifier"
    here, there = (
        RewardModelScorer(source, device=device, batch_tokens=30) for device in ("cpu", "cuda")
    )
    expected = here.score_tokens(*batch("cpu"))
    for device in ("cpu", "cuda"):
        scores = there.score_tokens(*batch(device))
        assert scores.device.type == device
        torch.testing.assert_close(scores.cpu(), expected, **CLOSE)
    texts = (["1+2=", "3+4="], ["3", "77"])
    torch.testing.assert_close(there.score_texts(*texts).cpu(), here.score_texts(*texts), **CLOSE)


def test_bfloat16_and_its_drift_are_measured_there(gpu):
    reference = FrozenReference(
        f"{tiny.HERE}.build_model", device="cuda", quantization="bf16", measure_drift=4
    )
    reference.logprobs(*batch("cuda"))
    assert next(reference.model.parameters()).dtype == torch.bfloat16
    assert 0 <= reference.drift["kl"] < 0.01 and reference.drift["top1"] > 0.5
