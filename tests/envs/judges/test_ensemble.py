"""Several reward models as one score."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import (
    RewardModelEnsemble,
    RewardModelScorer,
    combined,
)
from rllib_llm.envs.rlhf import DEFAULTS, reward_terms, with_defaults
from rllib_llm.shared.errors import Problems
from tests import tiny_models as tiny

TOKENIZER = tiny.byte_tokenizer()
TEXTS = (["How was it?", "Go"], [" Good.", " on"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = []
    for seed in (0, 1, 2):
        model = tiny.llama_classifier()
        with torch.no_grad():
            model.score.weight.mul_(seed + 1)
        made.append(str(tiny.save(tmp_path_factory.mktemp(f"judge{seed}"), model, TOKENIZER)))
    return made


def test_scores_are_combined():
    scores = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert combined(scores, "mean").tolist() == [2.0, 4.0]
    assert combined(scores, "min").tolist() == [1.0, 4.0]
    # The standard deviation of 1 and 3 is 1, of 4 and 4 it is 0.
    assert combined(scores, "mean_minus_std").tolist() == [1.0, 4.0]
    assert combined(scores, "mean_minus_std", 0.5).tolist() == [1.5, 4.0]


def test_an_ensemble_is_its_models(folders):
    singles = torch.stack([RewardModelScorer(folder).score_texts(*TEXTS) for folder in folders])
    ensemble = RewardModelEnsemble(folders, combine="min")
    scores, metrics = ensemble(prompts=TEXTS[0], completions=TEXTS[1])
    torch.testing.assert_close(scores, singles.min(dim=0).values)
    torch.testing.assert_close(metrics["reward_disagreement"], singles.std(dim=0, correction=0))
    assert ensemble.metrics()["2/num_truncated"] == 0.0


def test_an_environment_names_several_models(folders):
    chosen = {"models": [{"model": folders[0]}, folders[1]], "combine": "mean", "weight": 2.0}
    settings = with_defaults({"reward_model": chosen}, DEFAULTS)
    (term,) = reward_terms(settings, TOKENIZER)
    assert (term.name, term.weight, term.wants_tokens) == ("reward_model", 2.0, True)
    tokens = (*tiny.padded([[5, 6]], left=True), *tiny.padded([[7, 8, 2]]))
    scores, _ = term.function(*tokens)
    models = [RewardModelScorer(folder, tokenizer=TOKENIZER) for folder in folders[:2]]
    torch.testing.assert_close(scores, sum(model(*tokens) for model in models) / 2)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"models": ["a"]}, "must be two or more"),
        ({"models": ["a", "b"], "combine": "max"}, "combine='max'"),
        ({"models": ["a", "b"], "std_coeff": -1.0}, "std_coeff=-1.0"),
    ],
)
def test_ensembles_that_are_none_are_refused(chosen, message):
    with pytest.raises(ValueError, match=message):
        reward_terms({**DEFAULTS, "reward_model": chosen}, TOKENIZER)


@pytest.mark.parametrize("chosen", [{}, {"model": "a", "models": ["a", "b"]}])
def test_one_model_or_several(chosen):
    settings = {**DEFAULTS, "reward_model": {"weight": 1.0, **chosen}}
    with pytest.raises(Problems, match="must have 'model', or 'models'"):
        reward_terms(settings, TOKENIZER)
