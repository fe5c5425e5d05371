"""Supervised fine-tuning as an algorithm: its metrics, evaluation and data."""

from __future__ import annotations

import math

import pytest

from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def test_it_learns_and_reports():
    config = tiny.sft(lr=1e-2, eval_data=tiny.TEXTS[:5], train_batch_size_per_learner=16)
    config.evaluation(evaluation_interval=1)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(25)]
    first, last = results[0], results[-1]
    # Uniform over 18 tokens: log 18 = 2.89 nats.
    assert first["loss"]["sft"] == pytest.approx(math.log(18), abs=0.15)
    assert last["loss"]["sft"] < 1.5
    assert last["eval"]["loss"] < first["eval"]["loss"]
    assert last["eval"]["perplexity"] == pytest.approx(math.exp(last["eval"]["loss"]))
    assert last["episode"] == 25 * 16
    assert last["epoch"] == 25.0
    assert last["lr"] == pytest.approx(1e-2)
    assert last["throughput"]["tokens_per_s"] > 0


def test_evaluation_leaves_training_untouched():
    with tiny.built(tiny.sft()) as algorithm:
        metrics, weights = tiny.train(algorithm, 3), tiny.weights(algorithm)
        with pytest.raises(ValueError, match="eval_data=None must be a data set"):
            algorithm.evaluate()
    config = tiny.sft(eval_data=tiny.TEXTS[:5]).evaluation(evaluation_interval=1)
    with tiny.built(config) as algorithm:
        assert tiny.train(algorithm, 3) == metrics
        tiny.assert_same_weights(tiny.weights(algorithm), weights)


def test_batches_that_do_not_divide_the_data_go_round():
    # 16 texts, 6 a batch: 8 batches are three epochs, every text three times.
    with tiny.built(tiny.sft()) as algorithm:
        seen = [
            int(i) for k in range(8) for i in algorithm._source._order.indices(6 * k, 6)
        ]  # fmt: skip
        results = [algorithm.train() for _ in range(8)]
    assert sorted(seen) == sorted(list(range(16)) * 3)
    assert results[-1]["epoch"] == 3.0


def test_rows_that_are_never_evaluated_are_told_of():
    config = tiny.sft(eval_data=tiny.TEXTS[:5]).evaluation(evaluation_duration=3)
    with pytest.warns(UserWarning, match="evaluation_duration=3 is less than the 5 held-out rows"):
        algorithm = config.build_algo()
    algorithm.stop()


def test_texts_are_cut_to_what_the_model_reads():
    # 32 positions; the default of max_length is 256.
    warned = pytest.warns(UserWarning, match="longer than max_length=32 tokens")
    with tiny.built(tiny.sft(data=[{"text": "1" * 50}] * 6)) as algorithm, warned:
        algorithm.train()


def test_an_empty_data_set_is_refused():
    with pytest.raises(Problems, match="empty|no rows|must have"):
        tiny.sft(data=[]).build_algo()
