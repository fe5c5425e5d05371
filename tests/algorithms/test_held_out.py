"""What is measured on data that is never learnt from: pretraining loss, reference samples."""

from __future__ import annotations

import json

import pytest
import torch

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.data.encoding import encode_text
from rllib_llm.envs.frozen_models import RewardModelScorer
from tests.algorithms import tiny_runs

pytestmark = pytest.mark.usefixtures("ray_session")
HELD_OUT = [{"text": text} for text in ("1+2=3", "3+44=47", "9-1=8")]


def mean_cross_entropy(model, tokenizer, texts: list[str]) -> float:
    """Nats per token of whole texts with their EOS, one text at a time, from the model's logits."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([encode_text(tokenizer, text) + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1  # nothing predicts the first token
    return total / count


def test_evaluation_reports_the_loss_of_held_out_texts():
    config = tiny_runs.ppo(ptx_eval_data=HELD_OUT).evaluation(
        evaluation_interval=1, evaluation_duration=3
    )
    expected = mean_cross_entropy(*tiny_runs.build_model(), [row["text"] for row in HELD_OUT])
    with tiny_runs.built(config) as algorithm:
        algorithm.evaluate()
        assert algorithm.eval_metrics["iteration"] == 0
        assert algorithm.eval_metrics["ptx_loss"] == pytest.approx(expected, rel=1e-5)
        result = algorithm.train()
    assert result["eval"]["iteration"] == 1
    assert result["eval"]["ptx_loss"] != pytest.approx(expected, rel=1e-5)


def test_without_held_out_texts_no_loss_is_reported():
    config = tiny_runs.ppo().evaluation(evaluation_interval=1, evaluation_duration=3)
    with tiny_runs.built(config) as algorithm:
        algorithm.evaluate()
        assert "ptx_loss" not in algorithm.eval_metrics


def test_reference_samples_get_mean_0_and_deviation_1(tmp_path):
    texts = [f"{a}*{b}={a * b}" for a in range(1, 7) for b in range(1, 7)]
    config = tiny_runs.reward_model(normalization_data=[{"text": text} for text in texts])
    with tiny_runs.built(config) as algorithm:
        algorithm.train()
        algorithm.save_checkpoint(str(tmp_path))
    folder = tmp_path / MODEL_IN_CHECKPOINT
    assert json.loads((folder / "config.json").read_text())["rllib_llm_score_std"] > 0
    scores = RewardModelScorer(folder).score_texts([""] * len(texts), texts)
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(scores.std(correction=0)) == pytest.approx(1.0, abs=1e-3)
