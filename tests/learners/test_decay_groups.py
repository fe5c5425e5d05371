"""Norms and biases do not decay: transformers' rule, for every family; older checkpoints load."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Trainer

from rllib_llm.learners.optimizer import decay_groups
from tests.algorithms.tiny_runs import ppo
from tests.learners import tiny_learners as tiny
from tests.modules.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decays_is_what_transformers_has_decay(family):
    model = tiny_model(family)
    expected = set(Trainer.get_decay_parameter_names(None, model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = decay_groups(model, list(model.parameters()))
    assert {names[id(parameter)] for parameter in decayed["params"]} == expected & set(
        names.values()
    )
    assert kept["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_a_step_with_decay_moves_norms_and_biases_as_one_without():
    """AdamW takes lr * weight_decay of a weight away: 0.01 * 0.5 here, of what decays."""
    batch = tiny.judged(tiny.build(ppo()))
    settings = {"minibatch_size": None, "num_epochs": 1, "lr": 0.01}
    plain, decayed = (tiny.build(ppo(weight_decay=decay, **settings)) for decay in (0.0, 0.5))
    before = tiny.parameters(plain)
    effective = [tiny.update(learner, batch) for learner in (plain, decayed)][1]
    without, with_decay = tiny.parameters(plain), tiny.parameters(decayed)
    for name, weight in before.items():
        stays = "norm" in name or name.endswith("bias")
        expected = without[name] - (0.0 if stays else 0.01 * 0.5) * weight
        torch.testing.assert_close(with_decay[name], expected, rtol=1e-6, atol=1e-7)
    assert effective["effective/weight_decay"] == 0.5


def test_an_optimiser_state_of_one_group_is_taken():
    """As checkpoints hold that were written when all weights decayed: moments in model order."""
    old = tiny.build(ppo(weight_decay=0.1))
    tiny.update(old, tiny.judged(old))
    state = copy.deepcopy(old.get_state())
    (entry,) = state["optimizer"].values()
    group = entry["state"]["param_groups"][0]
    count = len(entry["state"]["state"])
    entry["state"]["param_groups"] = [{**group, "params": list(range(count))}]
    new = tiny.build(ppo(weight_decay=0.1))
    new.set_state(state)
    moments = [
        {
            name: optimizer.state[parameter]["exp_avg"]
            for name, parameter in tiny.module_of(learner).named_parameters()
        }
        for learner in (old, new)
        for optimizer in learner._named_optimizers.values()
    ]
    assert len(moments[0]) == count
    for name, moment in moments[0].items():
        assert torch.equal(moment, moments[1][name])
    # Numbered as the module names its parameters, not as they are grouped.
    for number, moment in enumerate(moments[0].values()):
        assert torch.equal(entry["state"]["state"][number]["exp_avg"], moment)
