"""What an environment says of tokens and groups goes from `step` through the loss to gradients."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from rllib_llm.envs.judges.rewards import Invalid, UnjudgedError
from rllib_llm.rollouts.judged_batch import SampleRequest, concatenate
from rllib_llm.rollouts.sampler import Sampler, SamplingEnvironment, UnjudgedBatch
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny
from tests.learners import tiny_learners
from tests.rollouts.interrupting_env import VERSION, sampled_tokens
from tests.rollouts.tiny_samplers import build_sampler, judged, publication

ENV = "tests.rollouts.interrupting_env:Interrupting"


@pytest.fixture(scope="module")
def config():
    config = tiny.grpo(minibatch_size=None, num_epochs=1, ref_kl_coeff=0.0, grad_clip=None)
    return config.environment(ENV)


@pytest.fixture(scope="module")
def batch(config):
    return judged(build_sampler(config), SampleRequest(0, 4, 3), publication(2))


def test_the_batch_has_what_the_environment_said(batch):
    mask = batch.columns[columns.COMPLETION_MASK]
    sampled = batch.columns[columns.LOSS_MASK]
    assert torch.equal(sampled, sampled_tokens(mask)) and not torch.equal(sampled, mask)
    versions = batch.columns[columns.WEIGHTS_VERSION]  # not those of the weights in use, 2
    assert set(batch.versions.tolist()) == {VERSION}
    assert (versions[~sampled] == -1).all()
    assert batch.columns[columns.GROUP].tolist() == [0] * 6 + [1] * 6
    expected = int(sampled.sum()) / int(mask.sum())
    assert batch.env_metrics()["sampled_share"] == pytest.approx(expected)


def test_rows_that_nobody_could_judge_are_where_their_tokens_are(config):
    """The device "meta" refuses tensors of two devices as a GPU does."""
    sampler = build_sampler(config).sampler
    ids = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    made = {columns.COMPLETION_IDS: ids, columns.COMPLETION_MASK: ids > 0,
            columns.FINISHED: ids[:, 0] > 0}  # fmt: skip
    prompts = {columns.PROMPT_IDS: ids, columns.PROMPT_MASK: ids > 0}
    generated = UnjudgedBatch(SampleRequest(0, 1, 3), 2, prompts, made, 2)
    batch = sampler._unjudged(generated, UnjudgedError("it failed", "answered"))
    tensors = [*batch.columns.values(), *batch.metrics.values(), batch.rewards]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_gradients_are_those_of_the_sampled_tokens(config, batch):
    learner = tiny_learners.build(config)
    model = tiny_learners.module_of(learner).model
    rows = batch.columns
    # GRPO at ratio 1 and without KL: -mean over rows of the mean over sampled tokens of A log p,
    # A = (score - mean) / (std + 1e-4) of the six rows of a group.
    scores = rows[columns.SCORES].reshape(2, 6)
    centred = scores - scores.mean(1, keepdim=True)
    advantages = (centred / (scores.std(1, keepdim=True) + 1e-4)).flatten()
    assert advantages.abs().sum() > 1
    losses = []
    for row, advantage in enumerate(advantages):
        prompt = rows[columns.PROMPT_IDS][row][rows[columns.PROMPT_MASK][row]]
        mask = rows[columns.COMPLETION_MASK][row]
        tokens = rows[columns.COMPLETION_IDS][row][mask]
        logits = model(torch.cat([prompt, tokens]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        losses.append(-advantage * logprobs[rows[columns.LOSS_MASK][row][mask]].mean())
    torch.stack(losses).mean().backward()
    by_hand = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    metrics = tiny_learners.update(learner, rows)
    assert metrics["val/ratio"] == pytest.approx(1.0)
    assert metrics["train/output_length"] == int(rows[columns.LOSS_MASK].sum()) / 12
    found = tiny_learners.first_gradients(learner)
    for name, gradient in by_hand.items():
        torch.testing.assert_close(found[f"model.{name}"], gradient, rtol=1e-4, atol=1e-6)


class SlowEnvironment:
    """An environment of somebody else, in which a judge works while completions are sampled."""

    return_texts = False

    def __init__(self):
        self.__dict__["was_set"] = threading.Event()
        self.__dict__["is_judging"] = threading.Event()

    def __setattr__(self, name, value):
        self.__dict__[name] = value
        if name == "global_step" and self.is_judging.is_set():
            self.was_set.set()

    def reset(self, *, options):
        ones = torch.ones(options["num_prompts"] * options["num_completions"], 1)
        return {
            columns.PROMPT_IDS: ones.long(), columns.PROMPT_MASK: ones.bool()
        }, {columns.PROMPT_INDEX: ones[:, 0].long()}  # fmt: skip

    def step(self, completions):
        self.is_judging.set()
        self.was_set.wait(0.5)
        scores = torch.full((len(completions[columns.COMPLETION_IDS]),), float(self.global_step))
        return None, scores, None, None, {}


class OnesPolicy:
    takes_weights, has_weights, pad_token_id = False, True, 0

    def generate(self, prompts, asked):
        ones = torch.ones(len(asked.row_ids), 1)
        return {columns.COMPLETION_IDS: ones.long(), columns.COMPLETION_MASK: ones.bool()}


def test_a_judge_knows_the_step_of_its_completions_while_others_are_sampled():
    """The next request set the environment's `global_step` under the judge's hands."""
    environment = SamplingEnvironment(SlowEnvironment())
    params = SimpleNamespace(max_new_tokens=1)
    sampler = Sampler(environment, OnesPolicy(), params=lambda explore: params, seed=0)
    generated = sampler.generate(SampleRequest(0, 1, 2), publication(3))
    found = []
    judging = threading.Thread(target=lambda: found.append(sampler.judge(generated, beside=True)))
    judging.start()
    assert environment.env.is_judging.wait(10.0)
    sampler.generate(SampleRequest(1, 1, 2), publication(4))
    judging.join(10.0)
    assert found[0].rewards.tolist() == [3.0, 3.0]
    assert judged(sampler, SampleRequest(2, 1, 2), publication(5)).rewards.tolist() == [5.0, 5.0]


def fails_on_the_first(prompts, completions):
    """Judges no completion of the first prompt."""
    return [Invalid("no judge") if prompt == "1+1=" else 1.0 for prompt in prompts]


def test_groups_that_could_not_be_judged_count_as_failed():
    """An evaluation of two parts, of which the function failed on one, said 0 of it."""
    rewards = {"prompts": [{"prompt": f"{i}+1="} for i in (1, 2, 3)],
               "reward_functions": f"{__name__}.fails_on_the_first"}  # fmt: skip
    config = tiny.grpo().environment("rllib_llm/RLHF-v0", env_config=rewards)
    sampler = build_sampler(config)
    parts = [judged(sampler, SampleRequest(position, 1, 2), publication()) for position in range(3)]
    # In the seeded order of prompts one of three is the first; each has two rows.
    whole = concatenate(parts)
    assert whole.columns[columns.VALID].tolist().count(False) == 2
    assert "fails_on_the_first" in whole.cause
    assert whole.env_metrics()["fails_on_the_first_failed"] == pytest.approx(1 / 3)
