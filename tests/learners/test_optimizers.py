"""Optimisers by name: what each is beside the library's own, and that their state resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rllib_llm.learners.optimizer import MUON, offloaded_step
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.algorithms.tiny_runs import grpo, sft
from tests.learners import tiny_learners as tiny


def texts(learner):
    batch = tiny.completions((5, 5, 5, 5, 5, 5))
    mask = batch[columns.COMPLETION_MASK]
    return {
        columns.INPUT_IDS: batch[columns.COMPLETION_IDS], columns.ATTENTION_MASK: mask,
        columns.LOSS_MASK: mask,
    }  # fmt: skip


def losses(learner, num_steps):
    batch = texts(learner)
    return [tiny.update(learner, batch)["loss/sft"] for _ in range(num_steps)]


def state_bytes(learner):
    return sum(
        value.nbytes for optimizer in learner._named_optimizers.values()
        for state in optimizer.state.values() for value in state.values()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip


def test_moments_of_8_bits_learn_as_those_of_32_in_a_quarter_of_the_memory():
    small, usual = (tiny.build(sft(optimizer=name)) for name in ("adamw_8bit", "adamw"))
    (optimizer,) = small._named_optimizers.values()
    optimizer.args.min_8bit_size = 0  # the test's matrices are small ones
    found, expected = (losses(each, 100) for each in (small, usual))
    assert found[0] == expected[0] and expected[-1] < 0.7 * expected[0]
    # Blockwise 8 bits leave each moment exact to about 1 in 128 (Dettmers et al. 2022).
    assert found == pytest.approx(expected, abs=0.02 * expected[0])
    (entry,) = {v.dtype for s in optimizer.state.values() for k, v in s.items() if k == "state1"}
    assert entry == torch.uint8


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_a_resumed_optimiser_goes_on_bit_for_bit(name):
    config = sft(optimizer=name)
    learner = tiny.build(config)
    for optimizer in learner._named_optimizers.values():
        if name == "adamw_8bit":
            optimizer.args.min_8bit_size = 0
    losses(learner, 3)
    again = tiny.build(config)
    for optimizer in again._named_optimizers.values():
        if name == "adamw_8bit":
            optimizer.args.min_8bit_size = 0
    again.set_state(copy.deepcopy(learner.get_state()))
    assert losses(again, 3) == losses(learner, 3)
    tiny_runs.assert_same_weights(tiny.parameters(again), tiny.parameters(learner))


def test_muon_has_the_matrices_between_hidden_states_and_adamw_the_rest():
    learner = tiny.build(grpo(optimizer="muon"))
    name = {id(p): n for n, p in tiny.module_of(learner).named_parameters()}
    parts = {
        key.removeprefix("default_policy_"): [name[id(p)] for g in o.param_groups
                                              for p in g["params"]]
        for key, o in learner._named_optimizers.items()
    }  # fmt: skip
    assert set(parts) == {MUON, "default_optimizer"}
    assert all("proj" in each for each in parts[MUON])
    assert not any("proj" in each for each in parts["default_optimizer"])
    assert sum(map(len, parts.values())) == len(name)


def test_muon_steps_are_those_of_the_formula():
    """One step from rest: W - lr · 0.2 √max(m, n) · NS5(g), g's five Newton-Schulz iterations
    (Jordan 2024), in bfloat16 as the library's: in more digits, directions in which the gradient
    has next to nothing would come out otherwise."""
    learner = tiny.build(sft(optimizer="muon", lr=1e-2, grad_clip=None))
    before = tiny.parameters(learner)
    tiny.update(learner, texts(learner))
    muon = learner._named_optimizers[f"default_policy_{MUON}"]
    for name, param in tiny.module_of(learner).named_parameters():
        if "o_proj" in name or "down_proj" in name:
            # The buffer is 0.05 g, the first Nesterov momentum 0.05 g + 0.95 of the buffer.
            x = (1.95 * muon.state[param]["momentum_buffer"]).bfloat16()
            x = x.T if x.shape[0] > x.shape[1] else x
            x = x / x.norm()
            for _ in range(5):
                square = x @ x.T
                mixed = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
                x = torch.addmm(x, mixed, x, beta=3.4445)
            x = x.T if x.shape != param.shape else x
            step = (before[name] - param.detach()) / (1e-2 * 0.2 * max(param.shape) ** 0.5)
            alike = torch.cosine_similarity(step.flatten(), x.float().flatten(), dim=0)
            assert float(alike) > 0.99
            assert float(step.norm()) == pytest.approx(float(x.float().norm()), rel=0.02)


def test_an_offloaded_step_is_the_step():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    usual, offloaded = (torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in models)
    for _ in range(3):
        inputs = torch.randn(5, 8)
        for model in models:
            model.zero_grad()
            model(inputs).square().sum().backward()
        usual.step()
        offloaded_step(offloaded, bucket_bytes=100)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)
    assert [len(g["params"]) for g in offloaded.param_groups] == [4]


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"optimizer": "sgd"}, "optimizer"),
        ({"optimizer": "paged_adamw_8bit"}, "optimizer"),
    ],
)
def test_optimisers_that_cannot_be_are_refused(settings, name):
    assert [p.name for p in sft(**settings).problems() if p.severity == "error"] == [name]


def test_shards_are_refused_and_offload_without_a_gpu_warns():
    config = sft(optimizer="muon").learners(strategy="fsdp", num_learners=2)
    assert "optimizer" in [p.name for p in config.problems() if p.severity == "error"]
    with pytest.warns(UserWarning, match="optimizer_offload"):
        sft(optimizer_offload=True).validate()
