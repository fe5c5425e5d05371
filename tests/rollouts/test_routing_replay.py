"""The experts that a sampler chose reach the learner: in batches, row by row, over the turns of a
conversation; without them log-probs of 16 bits are of other experts."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.modules.routers import routed
from rllib_llm.rollouts.groups import Lease
from rllib_llm.rollouts.judged_batch import SampleRequest, concatenate, take_trimmed
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.conversations.templates import family_tokenizer
from tests.learners import tiny_learners as tiny
from tests.rollouts.tiny_samplers import (
    NUM_COMPLETIONS,
    build_sampler,
    finish,
    judged,
    publication,
    stream,
)

N = NUM_COMPLETIONS
EXPERTS = (columns.PROMPT_EXPERTS, columns.COMPLETION_EXPERTS)


def mixture(replay=True, build="build_mixture", **model):
    made = tiny_runs.grpo(ref_kl_coeff=0.0, num_epochs=1, minibatch_size=None)
    made.language_model(model=f"{tiny_runs.HERE}.{build}", **model)
    made.experts(routing_replay=replay)
    return made.sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def sampler():
    return build_sampler(mixture(), worker_index=1).sampler


def own_choices(model, batch):
    """(the experts that a batch has, those that the model chooses) of all real tokens but each
    row's last."""
    ids, masks, experts = (
        torch.cat([batch[one], batch[other]], dim=1)
        for one, other in ((columns.PROMPT_IDS, columns.COMPLETION_IDS),
                           (columns.PROMPT_MASK, columns.COMPLETION_MASK), EXPERTS)
    )  # fmt: skip
    assert bool((experts[~masks] == columns.UNKNOWN_EXPERT).all())
    held, own = [], []
    for text, real, row in zip(ids, masks, experts, strict=True):
        with routed(model) as chosen, torch.no_grad():
            model(input_ids=text[real].unsqueeze(0))
        held.append(row[real][:-1])
        own.append(chosen.by_token()[:-1])
    return torch.cat(held), torch.cat(own)


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute"])
def test_batches_and_streams_have_the_experts_of_the_model_s_own_pass(sampler, in_flight):
    model = tiny_runs.build_mixture()[0]
    batch = judged(sampler, SampleRequest(4, 3, N), publication())
    assert torch.equal(*own_choices(model, batch.columns))
    made = stream(sampler, in_flight=in_flight)
    made.add(Lease(1, 4, 2, publication()))
    made.step()
    made.add(Lease(2, 6, 1, publication()))
    rows = concatenate([each for _, each in sorted(finish(made, sampler).items())])
    assert torch.equal(rows.columns[columns.COMPLETION_IDS], batch.columns[columns.COMPLETION_IDS])
    for name in EXPERTS:
        assert torch.equal(rows.columns[name], batch.columns[name])


def test_another_sampler_goes_on_with_them(sampler):
    """Rows that had ended bring theirs; those of the others are computed again."""
    whole = stream(sampler)
    whole.add(Lease(1, 4, 1, publication()))
    expected = finish(whole, sampler)[4].columns
    begun = stream(sampler)
    begun.add(Lease(1, 4, 1, publication()))
    shortest = int(expected[columns.COMPLETION_MASK].sum(dim=1).min())
    for _ in range(shortest):
        begun.step()
    ((_, partial),) = begun.partial().items()
    assert {row.finish for row in partial[4]} == {"stop", "aborted"}
    other = stream(sampler)
    other.add(Lease(2, 4, 1, publication(), partial=partial))
    found = finish(other, sampler)[4].columns
    for name in (columns.COMPLETION_IDS, *EXPERTS):
        assert torch.equal(found[name], expected[name])


def test_rows_without_them_are_unknown_beside_others(sampler):
    """Those of a run before replay was on, and of a data set."""
    one = judged(sampler, SampleRequest(0, 1, N), publication())
    two = judged(sampler, SampleRequest(1, 2, N), publication())
    for name in EXPERTS:
        del two.columns[name]
    both = concatenate([two, one]).columns
    for name in EXPERTS:
        assert bool((both[name][: 2 * N] == columns.UNKNOWN_EXPERT).all())
    again = take_trimmed(concatenate([two, one]), torch.arange(2 * N, 3 * N)).columns
    for name in EXPERTS:
        assert torch.equal(again[name], one.columns[name])
    assert both[columns.PROMPT_EXPERTS].shape[:2] == both[columns.PROMPT_IDS].shape


def test_without_replay_sampler_and_learner_are_apart_in_bfloat16():
    """Routers like three experts alike but for roundings of 16 bits, which choose two of them."""
    gaps = {}
    for replay in (False, True):
        config = mixture(replay, "build_tied_mixture", mixed_precision="bf16")
        sampler = build_sampler(config, worker_index=1).sampler
        batch = judged(sampler, SampleRequest(0, 6, N), publication()).columns
        gaps[replay] = tiny.update(tiny.build(config), batch)["sampler/logprob_gap"]
    assert gaps[False] > 0.1 and gaps[True] < 0.2 * gaps[False]


# --- conversations


def build_chatty():
    tokenizer = family_tokenizer("chatml")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, moe_intermediate_size=16,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=768,
        initializer_range=0.1, pad_token_id=0, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Qwen3MoeForCausalLM(config).eval(), tokenizer


def test_conversations_have_the_experts_of_all_their_turns():
    config = (
        GRPOConfig()
        .environment("tests.conversations.family_models.Chatty")
        .language_model(model="tests.rollouts.test_routing_replay.build_chatty")
        .sampling(num_completions=2, max_new_tokens=12, stop_token_ids=list(range(300, 400)))
        .training(train_batch_size_per_learner=8, ref_kl_coeff=0.0)
        .experts(routing_replay=True)
    )
    runner = build_sampler(config)
    batch = runner.sampler.sample(SampleRequest(0, 4, 2)).columns
    runner.stop()
    # Turns of the environment lie between, whose experts are known, too.
    assert int((batch[columns.COMPLETION_MASK] & ~batch[columns.LOSS_MASK]).sum()) > 20
    held, own = own_choices(build_chatty()[0], batch)
    assert torch.equal(held, own)
    learner = tiny.build(config)
    assert tiny.update(learner, batch)["sampler/logprob_gap"] < 1e-4
