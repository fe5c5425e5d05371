"""However a batch is cut and padded, a learner takes the same step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.learners.batching import _LEFT_PADDED, _RIGHT_PADDED
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny

LENGTHS = (3, 5, 1, 4, 2, 5)
CONFIGS = {
    "ppo-ptx": tiny_runs.ppo(
        ptx_data=[{"text": text} for text in ("1+2=3", "5", "17-1=16")], ptx_coeff=0.5,
        ptx_batch_size=3, entropy_coeff=0.01, num_epochs=1, minibatch_size=None,
    ),
    "grpo": tiny_runs.grpo(num_epochs=1, minibatch_size=None, off_policy="decoupled",
                           off_policy_weights=None),
}  # fmt: skip


def padded(batch, left: int, right: int):
    """The batch with more dead columns."""
    wider = dict(batch)
    for names, sides in ((_LEFT_PADDED, (left, 0)), (_RIGHT_PADDED, (0, right))):
        for mask, per_token in names.items():
            for name in {mask, *per_token} & set(batch) if mask in batch else ():
                wider[name] = torch.nn.functional.pad(batch[name], sides)
    return wider


def one_step(name, batch, **cut):
    config = CONFIGS[name].copy(copy_frozen=False).training(**cut)
    learner = tiny.build(config)
    metrics = tiny.update(learner, batch)
    return tiny.first_gradients(learner), metrics


@pytest.fixture(scope="module")
def whole():
    results = {}
    for name, config in CONFIGS.items():
        batch = tiny.judged(tiny.build(config), LENGTHS)
        batch[columns.VALID][3] = False
        results[name] = batch, *one_step(name, batch)
    return results


@pytest.mark.parametrize("name", list(CONFIGS))
@settings(max_examples=5, deadline=None)
@given(
    cut=st.one_of(
        st.fixed_dictionaries({"micro_batch_size": st.integers(1, 6)}),
        st.fixed_dictionaries({"micro_batch_tokens": st.integers(1, 40)}),
    ),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_any_cut_and_padding_is_the_whole_batch(whole, name, cut, padding):
    batch, gradients, metrics = whole[name]
    ours, our_metrics = one_step(name, padded(batch, *padding), **cut)
    assert ours.keys() == gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=2e-6 * scale)
    assert our_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)
