"""The reward model in training: scores at the last token, chosen and rejected in one forward."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from transformers import AutoModelForSequenceClassification

from rllib_llm.data.preferences import PairSource
from rllib_llm.modules.reward_model_module import RewardModelModule
from rllib_llm.modules.sequence_scores import read_score_normalization, write_score_normalization
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import HERE, MODEL, PAIRS, build_model
from tests.modules.test_causal_lm import SPACE
from tests.tiny_models import byte_tokenizer, llama_classifier, save


def build(model=MODEL, seed=0):
    return RLModuleSpec(
        module_class=RewardModelModule,
        observation_space=SPACE,
        action_space=SPACE,
        model_config={"pretrained_model": str(model), "dtype": "float32", "seed": seed},
    ).build()


def pairs():
    _, tokenizer = build_model()
    return PairSource(PAIRS, tokenizer=tokenizer, max_length=16, shuffle=False).batch(0, 6)


@pytest.mark.parametrize("model", [MODEL, f"{HERE}.build_classifier"])
def test_scores_are_those_of_each_text_alone(model):
    module, batch = build(model), pairs()
    with torch.no_grad():
        scores = module.forward_train(batch)[columns.SCORES]
        for row, (ids, mask) in enumerate([
            *zip(batch[columns.CHOSEN_IDS], batch[columns.CHOSEN_MASK], strict=True),
            *zip(batch[columns.REJECTED_IDS], batch[columns.REJECTED_MASK], strict=True),
        ]):  # fmt: skip
            expected = module.model(input_ids=ids[mask].unsqueeze(0)).logits[0, 0]
            assert float(scores[row]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert scores.shape == (12,)


def test_a_new_head_is_a_function_of_its_seed():
    one, same, other = (build(seed=seed).model.score.weight for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    # N(0, 1/(hidden + 1)) for 16 units: a deviation of 0.24.
    assert float(one.std()) == pytest.approx(0.24, abs=0.1)


def test_the_saved_folder_is_a_classifier(tmp_path):
    module, batch = build(), pairs()
    module.save_to_path(tmp_path / "reward")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    ids = batch[columns.CHOSEN_IDS][:1][:, batch[columns.CHOSEN_MASK][0]]
    with torch.no_grad():
        expected = module.forward_train(batch)[columns.SCORES][0]
        torch.testing.assert_close(classifier(ids).logits[0, 0], expected, rtol=1e-4, atol=1e-5)
    restored = build(seed=9)
    restored.restore_from_path(tmp_path / "reward")
    assert torch.equal(restored.model.score.weight, module.model.score.weight)


def test_a_classifier_with_two_outputs_is_refused(tmp_path):
    folder = save(tmp_path / "two", llama_classifier(num_labels=2), byte_tokenizer())
    with pytest.raises(ValueError, match="must have one output, not 2"):
        build(folder)


def test_mean_and_deviation_of_scores_do_not_outlive_the_training_that_changes_them(tmp_path):
    """A reward model that is trained on has no scale until it is measured again."""
    module = build()
    module.save_pretrained(tmp_path / "first")
    write_score_normalization(tmp_path / "first", 3.0, 2.0)
    again = build(tmp_path / "first")
    again.export_pretrained(tmp_path / "second")
    assert read_score_normalization(str(tmp_path / "first")) == (3.0, 2.0)
    assert read_score_normalization(str(tmp_path / "second")) is None
