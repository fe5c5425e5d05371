"""From model to gradient: the whole batch equals any cut of it, whatever the padding."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.learners.batching import micro_batch_indices, row_lengths, take_rows, trim
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.numerics.advantages import gae, masked_whiten
from rllib_llm.numerics.kl import kl_estimate
from rllib_llm.numerics.losses import LossDenominators, policy_loss, reduce_loss, value_loss
from rllib_llm.shared import columns
from tests.modules.tiny_models import VOCAB, tiny_model
from tests.rounding import assert_as_near

MAX_COMPLETION_LEN = 9


def sampled_batch(model, critic, prompt_lengths, completion_lengths, seed):
    """Random completions with everything that a PPO update needs."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, longest = len(prompt_lengths), MAX_COMPLETION_LEN
    prompt_mask = torch.arange(5) >= 5 - torch.tensor(prompt_lengths).unsqueeze(1)
    mask = torch.arange(longest) < torch.tensor(completion_lengths).unsqueeze(1)
    batch = {
        columns.PROMPT_IDS: torch.randint(3, VOCAB, (num_rows, 5), generator=generator),
        columns.PROMPT_MASK: prompt_mask,
        columns.COMPLETION_IDS: torch.randint(3, VOCAB, (num_rows, longest), generator=generator),
        columns.COMPLETION_MASK: mask,
    }
    with torch.no_grad():
        outputs = score_completions(model, **batch, hidden=True)
        noise = 0.3 * torch.randn(2, num_rows, longest, generator=generator)
        batch[columns.OLD_LOGPROBS] = (outputs.logprobs + noise[0]) * mask
        batch[columns.REF_LOGPROBS] = (outputs.logprobs + noise[1]) * mask
        batch[columns.OLD_VALUES] = critic(outputs.hidden).squeeze(-1) * mask
        rewards = torch.randn(num_rows, longest, generator=generator) * mask
        advantages, batch[columns.RETURNS] = gae(rewards, batch[columns.OLD_VALUES], mask)
        batch[columns.ADVANTAGES] = masked_whiten(advantages, mask)
    return batch


def loss_of(model, critic, batch, reduction, denominators, logits_chunk_tokens=None):
    """PPO with a critic, k3 to the reference and an entropy bonus."""
    mask = batch[columns.COMPLETION_MASK]
    names = (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS)
    outputs = score_completions(
        model,
        *(batch[name] for name in names),
        mask,
        entropy=True,
        hidden=True,
        logits_chunk_tokens=logits_chunk_tokens,
    )
    policy = policy_loss(
        outputs.logprobs, batch[columns.OLD_LOGPROBS], batch[columns.ADVANTAGES], mask
    )
    values = critic(outputs.hidden).squeeze(-1)
    value, _ = value_loss(values, batch[columns.OLD_VALUES], batch[columns.RETURNS], mask)
    kl = kl_estimate(outputs.logprobs, batch[columns.REF_LOGPROBS], "k3")
    per_token = policy.per_token + 0.1 * value + 0.05 * kl - 0.01 * outputs.entropy
    return reduce_loss(per_token, mask, reduction, denominators)


def among_empty_rows(batch, num_more):
    """The batch and copies of its first row of which nothing counts: products of another size."""
    more = {
        name: torch.cat([column, column[:1].expand(num_more, *column.shape[1:])])
        for name, column in batch.items()
    }
    num_rows = len(batch[columns.COMPLETION_MASK])
    counted = torch.arange(num_rows + num_more) < num_rows
    more[columns.COMPLETION_MASK] = more[columns.COMPLETION_MASK] & counted.unsqueeze(1)
    return more


def gradients(model, critic):
    parameters = [*model.parameters(), *critic.parameters()]
    grads = torch.cat([parameter.grad.flatten() for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None
    return grads


@pytest.mark.parametrize("reduction", [
    pytest.param("grpo", marks=pytest.mark.slow), "dapo",
    pytest.param("dr_grpo", marks=pytest.mark.slow),
])  # fmt: skip
@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=2, max_size=7).filter(
        lambda rows: any(length for _, length in rows)
    ),
    cut=st.one_of(
        st.builds(lambda n: {"micro_batch_size": n}, st.integers(1, 3)),
        st.builds(lambda n: {"token_budget": n}, st.integers(1, 60)),
    ),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 20)),
    seed=st.integers(0, 99),
)
def test_gradient_of_the_whole_is_the_sum_over_any_micro_batches(
    reduction, rows, cut, chunk_tokens, seed
):
    model, critic = tiny_model(), torch.nn.Linear(32, 1)
    batch = sampled_batch(model, critic, *zip(*rows, strict=True), seed)
    denominators = LossDenominators.count(batch[columns.COMPLETION_MASK], MAX_COMPLETION_LEN)
    ones = torch.ones(1)

    def whole(*models, rows=batch):
        loss = loss_of(*models, rows, reduction, denominators)
        loss.backward()
        return [loss.detach(), gradients(*models)]

    plain = whole(model, critic)
    exact = whole(copy.deepcopy(model).double(), copy.deepcopy(critic).double())
    # One way may be near by luck: under `--shake` it was ten times nearer than another.
    as_good = [whole(model, critic, rows=among_empty_rows(batch, n)) for n in (1, 2, 3)]

    parts = torch.zeros(())
    for index in micro_batch_indices(row_lengths(batch), **cut):
        micro_batch = trim(take_rows(batch, index))
        share = loss_of(model, critic, micro_batch, reduction, denominators, chunk_tokens)
        share.backward()
        parts = parts + share.detach()
    both = parts, gradients(model, critic)
    for found, one, other, *near in zip(both, plain, exact, *as_good, strict=True):
        # Of a sum that nearly cancels the terms decide, which are of the size of 1.
        assert_as_near(
            [found, ones], [one, ones], [other.double(), ones.double()],
            neighbours=[[each, ones] for each in near],
        )  # fmt: skip


def test_trimming_changes_no_gradient():
    model, critic = tiny_model(), torch.nn.Linear(32, 1)
    batch = sampled_batch(model, critic, [2, 3, 1], [4, 1, 2], seed=0)
    denominators = LossDenominators.count(batch[columns.COMPLETION_MASK], MAX_COMPLETION_LEN)
    models = model, critic
    in_float64 = copy.deepcopy(model).double(), copy.deepcopy(critic).double()

    def gradient(models, rows):
        loss_of(*models, rows, "dapo", denominators).backward()
        return gradients(*models)

    trimmed, whole = gradient(models, trim(batch)), gradient(models, batch)
    assert_as_near(trimmed, whole, exact=gradient(in_float64, batch))
