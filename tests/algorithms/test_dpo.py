"""Direct preference optimisation as an algorithm: it learns, is evaluated and restored."""

from __future__ import annotations

import math

import pytest

import rllib_llm
from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.cli.evaluate import config_for_evaluation, run_evaluation
from rllib_llm.modules.pretrained import load_causal_lm
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "kto", "sigmoid_norm"])
def test_it_learns_to_tell_the_pairs_apart_and_reports(loss_type):
    config = tiny.dpo(
        lr=1e-2, loss_type=loss_type, eval_data=tiny.PAIRS, train_batch_size_per_learner=8
    )
    config.evaluation(evaluation_interval=5)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(10)]
    first, last = results[0], results[-1]
    if loss_type.startswith("sigmoid"):
        assert first["loss"]["dpo"] == pytest.approx(math.log(2))
    assert last["loss"]["dpo"] < first["loss"]["dpo"]
    assert last["train"]["accuracy"] == last["eval"]["accuracy"] == 1.0
    # 0.1 times differences of sums of some 20 nats: four roundings of 2^-23 each. The reference
    # reads the pairs in another order than the policy, so they are not computed alike.
    assert first["rewards"]["margins"] == pytest.approx(0.0, abs=0.1 * 20 * 4 * 2**-23)
    assert last["eval"]["rewards/margins"] > 0
    assert last["eval"]["loss"] < first["eval"]["loss"]
    assert last["logps"]["rejected"] < first["logps"]["rejected"]
    assert last["episode"] == 80


def test_a_restored_run_goes_on_from_the_same_reference(tmp_path):
    with tiny.built(tiny.dpo(lr=1e-2)) as algorithm:
        tiny.train(algorithm, 2)
        algorithm.save_to_path(str(tmp_path / "checkpoint"))
        expected = tiny.train(algorithm, 2)
    with tiny.built(tiny.dpo(lr=1e-2)) as algorithm:
        algorithm.restore_from_path(str(tmp_path / "checkpoint"))
        assert tiny.train(algorithm, 2) == expected
    # The policy alone is kept, as an ordinary folder.
    load_causal_lm(str(tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT))


def test_an_evaluation_has_the_reference_that_training_had(tmp_path):
    config = tiny.dpo(lr=1e-2, eval_data=tiny.PAIRS).evaluation(evaluation_interval=1)
    with tiny.built(config) as algorithm:
        trained = [algorithm.train() for _ in range(2)][-1]["eval"]
        algorithm.save_to_path(str(tmp_path / "checkpoint"))
    settings = config_for_evaluation(tmp_path / "checkpoint", {})
    found = run_evaluation(tmp_path / "checkpoint", settings)
    assert trained["rewards/margins"] > 0.01
    assert found["rewards/margins"] == pytest.approx(trained["rewards/margins"], rel=1e-5)
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-6)


def test_its_config_is_public():
    assert rllib_llm.DPOConfig is tiny.DPOConfig


@pytest.mark.parametrize("settings, message", [
    ({"loss_type": "dpo"}, "loss_type='dpo' must be one of"),
    ({"ref_kl_coeff": 0.0}, "ref_kl_coeff=0.0 must be a number above 0"),
    ({"label_smoothing": 0.5}, r"label_smoothing=0.5 must be in \[0, 0.5\)"),
    ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing=0.1 must be 0 with loss_type"),
    ({"target_margin": 1.0, "loss_type": "kto"}, "target_margin=1.0 must be 0 with loss_type"),
    ({"loss_type": "kto", "reference_free": True}, "reference_free=True must be False with"),
    ({"loss_type": "kto", "minibatch_size": 1}, "minibatch_size=1 must be at least 2"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny.dpo(**settings).validate()
