"""The exact KL to the reference, in the reward and in the loss, and who owns the reference."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.modules.logprobs import ReferencePolicy, score_completions
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny
from tests.learners import two_learners as two

LORA = {"r": 4, "alpha": 8}


def without_reference(learner, **kwargs):
    batch = tiny.judged(learner, **kwargs)
    del batch[columns.REF_LOGPROBS]  # the environment has none
    return batch


def moved(learner, seed: int = 0):
    """The learner with weights a little away from where it started."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in tiny.module_of(learner).model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return learner


@pytest.mark.parametrize("lora, place", [(None, "learner"), (LORA, "policy"), (LORA, "learner")])
def test_the_learner_finds_the_reference_log_probs_itself(lora, place):
    config = two.grpo(reference_in=place, ref_kl_coeff=0.1).language_model(lora=lora)
    learner = moved(tiny.build(config))
    batch = learner.prepare(without_reference(learner))
    start = load_causal_lm(config.pretrained_model)
    with torch.no_grad():
        expected = torch.zeros_like(batch[columns.REF_LOGPROBS])
        for row in range(len(expected)):  # the plain way: one row, the model's own logits
            prompt = batch[columns.PROMPT_IDS][row][batch[columns.PROMPT_MASK][row]]
            text = batch[columns.COMPLETION_IDS][row][batch[columns.COMPLETION_MASK][row]]
            logits = start(torch.cat([prompt, text]).unsqueeze(0)).logits[0]
            chosen = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, text.unsqueeze(1))
            expected[row, : len(text)] = chosen.squeeze(1)
    torch.testing.assert_close(batch[columns.REF_LOGPROBS], expected, rtol=1e-4, atol=1e-5)


def test_full_kl_in_the_reward_is_what_is_logged():
    config = tiny_runs.ppo(
        ref_kl_estimator="full", reference_in="learner", ref_kl_coeff=0.5, minibatch_size=None,
        num_epochs=1,
    )  # fmt: skip
    learner = moved(tiny.build(config))
    batch = without_reference(learner)
    rows = [batch[name] for name in (columns.PROMPT_IDS, columns.PROMPT_MASK,
                                     columns.COMPLETION_IDS, columns.COMPLETION_MASK)]  # fmt: skip
    model, reference = tiny.module_of(learner).model, load_causal_lm(config.pretrained_model)
    with torch.no_grad():
        outputs = score_completions(model, *rows, full_kl_to=ReferencePolicy(reference))
        kl = outputs.full_kl.sum(dim=1).mean().item()
    metrics = tiny.update(learner, batch)
    assert kl > 0.01
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.5 * kl, rel=1e-4)


def test_full_kl_in_the_loss_pulls_towards_the_reference():
    """Equal scores have no advantage: the loss is β KL alone, and falls."""
    config = two.grpo(
        ref_kl_estimator="full", ref_kl_coeff=1.0, minibatch_size=None, num_epochs=20, lr=0.01,
        grad_clip=None, adam_epsilon=1e-5,
    ).language_model(lora=LORA)  # fmt: skip
    learner = moved(tiny.build(config))
    batch = without_reference(learner)
    batch[columns.SCORES][:] = 1.0
    first = learner.prepare(dict(batch))
    start = learner.forward(first, full_kl_to=learner.reference)[columns.FULL_KL].sum().item()
    tiny.update(learner, batch)
    end = learner.forward(first, full_kl_to=learner.reference)[columns.FULL_KL].sum().item()
    assert 0 <= end < 0.2 * start


def test_a_policy_at_its_reference_has_no_kl_and_no_gradient_from_it():
    config = two.grpo(
        ref_kl_estimator="full", ref_kl_coeff=1.0, minibatch_size=None, num_epochs=1
    ).language_model(lora=LORA)
    learner = tiny.build(config)
    batch = without_reference(learner)
    # `objective/kl` is of the sampler's log-probs: made here as the reference's are, so that both
    # are rounded alike.
    scored = learner.evaluate_rows(batch, [columns.LOGPROBS])
    batch[columns.SAMPLER_LOGPROBS] = scored[columns.LOGPROBS]
    batch[columns.SCORES][:] = 1.0
    before = tiny.parameters(learner)
    metrics = tiny.update(learner, batch)
    assert metrics["loss/ref_kl_avg"] == 0.0 and metrics["objective/kl"] == 0.0
    for name, tensor in tiny.parameters(learner).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"ref_kl_estimator": "full"}, "ref_kl_estimator='full' must be 'k1', 'k2' or 'k3'"),
        ({"reference_in": "policy"}, "reference_in='policy' must be"),
        ({"reference_in": "sampler"}, "reference_in='sampler' must be"),
    ],
)
def test_a_reference_that_cannot_be_there_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        two.grpo(**settings).validate()
