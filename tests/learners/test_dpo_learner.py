"""Direct preference optimisation: TRL's numbers, the reference, and any split of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.algorithms.dpo import DPOConfig
from rllib_llm.data.preferences import PromptedPairSource
from rllib_llm.learners.metrics import MEANS, REPORT
from rllib_llm.modules.logprobs import ReferencePolicy
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests import tiny_models
from tests.algorithms.tiny_runs import PAIRS, assert_same_weights, build_model, dpo
from tests.crossed import crossed
from tests.learners import tiny_learners as tiny

ROWS = [
    {"prompt": "ab", "chosen": "cde", "rejected": "f"},
    {"prompt": "a", "chosen": "bc", "rejected": "cb"},
    {"prompt": "xyz", "chosen": "x", "rejected": "yzzy"},
]
# DPOTrainer.compute_loss (KTOTrainer's for kto) of TRL 1.16.0 on ROWS in one batch: policy and
# byte tokenizer of tests/tiny_models.py, the reference llama(seed). Loss and norm of its gradient.
TRL = {
    "sigmoid": ({}, 1, 0.7566447854042053, 1.9499726295471191),
    "sigmoid at 0.5": ({"ref_kl_coeff": 0.5}, 1, 1.1104155778884888, 10.806844711303711),
    "ipo": ({"loss_type": "ipo"}, 1, 31.55401611328125, 130.49034118652344),
    "kto": ({"loss_type": "kto"}, 4, 0.5204095840454102, 0.4694505035877228),
    "sigmoid_norm": ({"loss_type": "sigmoid_norm"}, 1, 0.724047839641571, 0.5945345759391785),
    "kto at 0": ({"loss_type": "kto"}, 1, 0.5143765807151794, 0.4663832187652588),
}
LOSSES = ["sigmoid", "ipo", "kto", "sigmoid_norm"]


def of_llama(seed, **training):
    """The learner of `tiny_models.llama`, its reference that of another seed, and its batch."""
    config = DPOConfig().language_model(model="tests.tiny_models.build_llama")
    config.training(data=ROWS, grad_clip=None, **training)
    learner = tiny.build(config)
    if seed is not None:
        learner.reference = ReferencePolicy(tiny_models.llama(seed))
    tokenizer = tiny_models.byte_tokenizer()
    source = PromptedPairSource(ROWS, tokenizer=tokenizer, max_length=32, shuffle=False)
    return learner, source.batch(0, 3)


def pairs(count=5):
    _, tokenizer = build_model()
    source = PromptedPairSource(PAIRS, tokenizer=tokenizer, max_length=16, shuffle=False)
    return source.batch(0, count)


@crossed(name=[*TRL], cut=[{}, {"micro_batch_size": 1}])
def test_loss_and_gradient_equal_trl(name, cut):
    settings, seed, loss, norm = TRL[name]
    metrics = tiny.update(*of_llama(seed, **settings, **cut))
    assert metrics["loss/dpo"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if name == "kto":
        assert metrics["train/kto_kl"] == pytest.approx(0.8543294072151184, rel=1e-4)


def test_metrics_equal_trl():
    metrics = tiny.update(*of_llama(1))
    recorded = {
        "rewards/chosen": -0.27021315693855286, "rewards/rejected": -0.15456444025039673,
        "rewards/margins": -0.11564872413873672, "train/accuracy": 0.3333333432674408,
        "logps/chosen": -18.24939727783203, "logps/rejected": -19.294143676757812,
    }  # fmt: skip
    assert {name: metrics[name] for name in recorded} == pytest.approx(recorded, rel=1e-4)


def test_without_a_reference_and_with_a_margin_it_is_simpo():
    learner, batch = of_llama(
        None, loss_type="sigmoid_norm", reference_free=True, ref_kl_coeff=2.0, target_margin=1.0
    )
    assert learner.reference is None
    model = tiny.module_of(learner).model

    def mean_logprob(row, name):
        """The completion's mean log-prob by transformers, the text alone and without padding."""
        prompt = batch[columns.PROMPT_IDS][row][batch[columns.PROMPT_MASK][row]]
        ids = batch[f"{name}_ids"][row][batch[f"{name}_mask"][row]]
        text = torch.cat([prompt, ids]).unsqueeze(0)
        labels = text.clone()
        labels[0, : len(prompt)] = -100
        with torch.no_grad():
            return -float(model(input_ids=text, labels=labels).loss)

    # Meng et al. 2024, eq. 6.
    margins = [2.0 * (mean_logprob(i, "chosen") - mean_logprob(i, "rejected")) for i in range(3)]
    expected = sum(math.log(1 + math.exp(1.0 - margin)) for margin in margins) / 3
    assert tiny.update(learner, batch)["loss/dpo"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 8}])
def test_it_starts_as_its_reference_and_moves_away_from_it(lora):
    learner = tiny.build(dpo(lr=1e-2).language_model(lora=lora))
    first, second = (tiny.update(learner, pairs()) for _ in range(2))
    assert first["loss/dpo"] == pytest.approx(math.log(2), rel=1e-6)
    # The same weights in two passes: a reference need not be read in the learner's cut.
    rounding = 8 * torch.finfo(torch.float32).eps * abs(first["logps/chosen"])
    assert first["rewards/margins"] == pytest.approx(0.0, abs=rounding)
    assert second["loss/dpo"] < first["loss/dpo"]
    assert second["rewards/margins"] > 0
    # Under adapters there is no second copy of the trunk.
    own = learner.reference.model is tiny.module_of(learner).model
    assert own == (lora is not None)


@pytest.mark.parametrize("loss_type", [LOSSES[0], *(
    pytest.param(name, marks=pytest.mark.slow) for name in LOSSES[1:]
)])  # fmt: skip
def test_micro_batches_change_nothing(loss_type):
    states = []
    for cut in ({}, {"micro_batch_size": 2}, {"micro_batch_tokens": 24}):
        learner = tiny.build(dpo(loss_type=loss_type, num_epochs=2, minibatch_size=3, **cut))
        metrics = [tiny.update(learner, pairs()) for _ in range(2)][-1]
        states.append((metrics, tiny.parameters(learner)))
    for metrics, weights in states[1:]:
        assert metrics["loss/dpo"] == pytest.approx(states[0][0]["loss/dpo"], rel=1e-5)
        assert_same_weights(weights, states[0][1], rtol=1e-4, atol=1e-5)


def test_evaluation_is_the_same_loss_and_changes_nothing():
    learner = tiny.build(dpo(loss_type="kto", lr=1e-2, micro_batch_size=2))
    tiny.update(learner, pairs())
    before = tiny.parameters(learner)
    sums = learner.evaluate_batch(pairs())
    assert_same_weights(tiny.parameters(learner), before)
    metrics = tiny.update(learner, pairs())
    for name, in_training in (("loss", "loss/dpo"), ("accuracy", "train/accuracy"),
                              ("rewards/margins", "rewards/margins")):  # fmt: skip
        assert sums[f"{name}_sum"] / 5 == pytest.approx(metrics[in_training], rel=1e-5)
        assert sums[f"{name}_count"] == 5


LABELLED = [
    {"prompt": "ab", "completion": "cde", "label": True},
    {"prompt": "a", "completion": "bc", "label": False},
    {"prompt": "xyz", "completion": "x", "label": True},
    {"prompt": "b", "completion": "yaz", "label": False},
    {"prompt": "c", "completion": "zz", "label": True},
]


def labelled(**training):
    config = DPOConfig().language_model(model="tests.tiny_models.build_llama")
    config.training(data=LABELLED, grad_clip=None, loss_type="kto", **training)
    learner = tiny.build(config)
    learner.reference = ReferencePolicy(tiny_models.llama(4))
    source = config.make_source(
        LABELLED, tokenizer=tiny_models.byte_tokenizer(), max_length=32, shuffle=False
    )
    return learner, source.batch(0, 5)


def kto_of_rows(learner, batch, weights):
    """KTOTrainer's loss of TRL 1.16 (`_compute_loss`, one process) in float64, its z and rewards:
    completions one by one, z from those of the row before."""
    texts = []
    for i, row in enumerate(LABELLED):
        side = "chosen" if row["label"] else "rejected"
        ids, mask = batch[f"{side}_ids"][i], batch[f"{side}_mask"][i]
        other = batch["rejected_mask" if row["label"] else "chosen_mask"][i]
        assert mask.any() and not other.any()
        prompt = batch[columns.PROMPT_IDS][i][batch[columns.PROMPT_MASK][i]]
        texts.append((prompt, ids[mask]))

    def log_ratio(prompt, completion):
        text = torch.cat([prompt, completion]).unsqueeze(0)
        found = [
            model(text).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            .gather(-1, completion.unsqueeze(-1)).sum()
            for model in (tiny.module_of(learner).model, learner.reference.model)
        ]  # fmt: skip
        return found[0] - found[1].detach()

    ratios = torch.stack([log_ratio(*text) for text in texts])
    others = [log_ratio(texts[i][0], texts[i - 1][1]) for i in range(len(texts))]
    z = torch.stack(others).mean().clamp(min=0).detach()
    sign = torch.tensor([1.0 if row["label"] else -1.0 for row in LABELLED])
    weight = torch.tensor([weights[0] if row["label"] else weights[1] for row in LABELLED])
    losses = weight * (1 - torch.sigmoid(0.1 * sign * (ratios - z)))
    return losses.mean(), z, 0.1 * ratios.detach()


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 2}])
def test_kto_of_rows_with_a_label_is_trl_s(cut):
    learner, batch = labelled(desirable_weight=0.5, undesirable_weight=1.5, **cut)
    loss, z, rewards = kto_of_rows(learner, batch, (0.5, 1.5))
    model = tiny.module_of(learner).model
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    metrics = learner.forward_backward(batch, 0)[REPORT][MEANS]  # in the order of the rows
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(param.grad, gradient.float(), rtol=1e-3, atol=1e-5)
    assert metrics["loss/dpo"] == pytest.approx(float(loss), rel=1e-4)
    assert metrics["train/kto_kl"] == pytest.approx(float(z), rel=1e-3)
    wanted = torch.tensor([row["label"] for row in LABELLED])
    assert metrics["rewards/chosen"] == pytest.approx(float(rewards[wanted].mean()), rel=1e-3)
    assert metrics["rewards/rejected"] == pytest.approx(float(rewards[~wanted].mean()), rel=1e-3)
    assert "train/accuracy" not in metrics  # no row has two completions
    totals = learner.evaluate_batch(batch)
    assert totals["loss_count"] == pytest.approx(2.5) and totals["accuracy_count"] == 0


def test_rows_with_a_label_are_for_kto_alone():
    with pytest.raises(Problems) as error:
        labelled_config = dpo(data=LABELLED)
        labelled_config.make_source(
            LABELLED, tokenizer=tiny_models.byte_tokenizer(), max_length=32, shuffle=False
        )
    assert error.value.found[0].name == "loss_type"
