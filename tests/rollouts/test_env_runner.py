"""The sampler: a function of request, seed and weights; EOS inside the mask; RLlib's own calls."""

from __future__ import annotations

import pytest
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_EPISODES

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.rollouts.sampler import SamplingEnvironment
from rllib_llm.shared import columns
from rllib_llm.weights.flat_buffer import pack, unpack
from rllib_llm.weights.loading import can_map_read_only
from rllib_llm.weights.published import PublishedWeights
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import (
    assert_same_batch,
    build_sampler,
    dealt,
    judged,
    publication,
)

REQUEST = SampleRequest(position=4, num_prompts=5, num_completions=3)
EOS, PAD = 1, 0  # ids of the character tokenizer


@pytest.fixture(scope="module")
def sampler():
    return build_sampler(tiny.grpo())


@pytest.fixture(scope="module")
def batch(sampler):
    return judged(sampler, REQUEST, publication())


def test_the_columns_of_a_batch(batch):
    found = {name: (tuple(c.shape), c.dtype) for name, c in batch.columns.items()}
    length = batch.columns[columns.COMPLETION_IDS].shape[1]
    prompt = batch.columns[columns.PROMPT_IDS].shape[1]
    tokens = (15, length)
    assert found == {
        columns.REPLICA: ((15,), torch.int32),
        columns.PROMPT_IDS: ((15, prompt), torch.int64),
        columns.PROMPT_MASK: ((15, prompt), torch.bool),
        columns.COMPLETION_IDS: (tokens, torch.int64),
        columns.COMPLETION_MASK: (tokens, torch.bool),
        columns.SAMPLER_LOGPROBS: (tokens, torch.float32),
        columns.REF_LOGPROBS: (tokens, torch.float32),
        columns.FINISHED: ((15,), torch.bool),
        columns.SCORES: ((15,), torch.float32),
        columns.VALID: ((15,), torch.bool),
        columns.PROMPT_INDEX: ((15,), torch.int64),
        columns.ROW_ID: ((15,), torch.int64),
        columns.GROUP: ((15,), torch.int64),
        columns.WEIGHTS_VERSION: (tokens, torch.int32),
    }
    # Positions 4 to 8, three rows each.
    assert batch.columns[columns.ROW_ID].tolist() == list(range(12, 27))
    assert batch.columns[columns.GROUP].tolist() == [i for i in range(4, 9) for _ in range(3)]
    # No weights sampled what stands behind the end.
    mask, versions = (batch.columns[n] for n in (columns.COMPLETION_MASK, columns.WEIGHTS_VERSION))
    assert torch.equal(versions, torch.zeros_like(versions).where(mask, -1))


def test_eos_is_inside_the_mask_and_ends_it():
    # Any token ends a completion with probability 1/18 here; 60 completions of up to 12 tokens.
    sampler = build_sampler(tiny.grpo().sampling(max_new_tokens=12))
    batch = judged(sampler, SampleRequest(0, 20, 3), publication())
    ids, mask = (batch.columns[n] for n in (columns.COMPLETION_IDS, columns.COMPLETION_MASK))
    finished = batch.columns[columns.FINISHED]
    assert 0 < int(finished.sum()) < 60
    for row, keep, done in zip(ids, mask, finished, strict=True):
        tokens = row[keep].tolist()
        assert (EOS in tokens) == bool(done)
        assert EOS not in tokens[:-1]
        assert done or len(tokens) == 12
        assert row[~keep].eq(PAD).all()
    scores = batch.columns[columns.SAMPLER_LOGPROBS]
    assert (scores[mask] < 0).all() and (scores[~mask] == 0).all()


def test_stop_tokens_end_a_completion_too():
    digit = tiny.build_model()[1].convert_tokens_to_ids("7")
    sampler = build_sampler(
        tiny.grpo().sampling(max_new_tokens=12, stop_token_ids=[EOS, digit], min_new_tokens=3)
    )
    batch = judged(sampler, SampleRequest(0, 20, 3), publication())
    ids, mask = (batch.columns[n] for n in (columns.COMPLETION_IDS, columns.COMPLETION_MASK))
    lasts = [row[keep].tolist()[-1] for row, keep in zip(ids, mask, strict=True)]
    finished = batch.columns[columns.FINISHED].tolist()
    assert [last in (EOS, digit) for last in lasts] == finished
    assert {EOS, digit} <= set(lasts)
    assert int(mask.sum(1).min()) >= 3


def test_another_sampler_and_other_batches_give_the_same(batch):
    assert_same_batch(judged(build_sampler(tiny.grpo(), 2), REQUEST, publication()), batch)
    in_parts = build_sampler(tiny.grpo().sampling(sampling_batch_size=4))  # one prompt at a time
    again = judged(in_parts, REQUEST, publication())
    for name in (columns.COMPLETION_IDS, columns.SCORES, columns.ROW_ID, columns.PROMPT_INDEX):
        assert torch.equal(again.columns[name], batch.columns[name]), name


def test_seeds_and_positions_give_other_noise(sampler, batch):
    other = tiny.grpo()
    other.debugging(seed=1)
    ids = batch.columns[columns.COMPLETION_IDS]
    assert not torch.equal(
        judged(build_sampler(other), REQUEST, publication()).columns[columns.COMPLETION_IDS], ids
    )
    # Positions 4 and 10 are the same prompt of 6 only by chance; their completions differ.
    later = judged(sampler, SampleRequest(10, 5, 3), publication())
    assert not torch.equal(later.columns[columns.COMPLETION_IDS], ids)


def test_sampling_leaves_the_global_random_state_alone(sampler):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    judged(sampler, REQUEST, publication())
    assert torch.equal(torch.rand(3), expected)


def test_without_exploration_the_likeliest_tokens_are_taken(sampler):
    request = SampleRequest(0, 3, 2, explore=False)
    batch = judged(sampler, request, publication())
    ids, mask = (batch.columns[n] for n in (columns.COMPLETION_IDS, columns.COMPLETION_MASK))
    assert torch.equal(ids[0::2], ids[1::2])
    for row in (0, 2, 4):
        prompt = batch.columns[columns.PROMPT_IDS][row][batch.columns[columns.PROMPT_MASK][row]]
        completion = ids[row][mask[row]]
        with torch.no_grad():
            logits = sampler.module.model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
        assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), completion)


def test_texts_come_on_request_or_where_a_reward_function_has_them_decoded(sampler):
    texts = judged(sampler, SampleRequest(0, 2, 2, return_texts=True), publication()).texts
    assert judged(sampler, SampleRequest(0, 2, 2), publication()).texts == texts
    assert texts["prompt"][0] == texts["prompt"][1] != texts["prompt"][2]
    assert len(texts["completion"]) == 4


def test_new_weights_are_loaded_before_sampling(ray_session, sampler, batch):
    remote = build_sampler(tiny.grpo(), worker_index=1)
    state = remote.module.get_state(inference_only=True)
    doubled = {name: tensor * 2 for name, tensor in state.items()}
    published = PublishedWeights(7, "doubled", (ray.put(pack(doubled)),))
    other = judged(remote, REQUEST, published)
    assert set(other.versions.tolist()) == {7}
    tiny.assert_same_weights(remote.module.get_state(inference_only=True), doubled)
    assert not torch.equal(
        other.columns[columns.COMPLETION_IDS], batch.columns[columns.COMPLETION_IDS]
    )
    # Back to a lower version, as after a restore.
    original = {name: tensor / 2 for name, tensor in doubled.items()}
    back = judged(remote, REQUEST, PublishedWeights(0, "first", (ray.put(pack(original)),)))
    assert_same_batch(back, batch)


def test_an_actors_weights_are_shared_memory_until_rllib_sets_others(ray_session):
    remote = build_sampler(tiny.grpo(), worker_index=1)
    flat = pack(remote.module.get_state(inference_only=True))
    published = PublishedWeights(1, "shared", (ray.put(flat),))
    judged(remote, REQUEST, published)
    assert remote.policy.loader.is_aliased == can_map_read_only()
    # A state that is sent away holds its own tensors, not the whole buffer once for each.
    state = remote.get_state()[COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    remote.set_state({COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: zeros}})
    assert not any(tensor.any() for tensor in remote.module.parameters())
    stored = unpack(ray.get(published.ref[0]))
    assert all(torch.equal(stored[name], state[name]) for name in state)


def test_a_sampler_that_cannot_get_the_weights_does_not_sample(ray_session):
    remote = build_sampler(tiny.grpo(), worker_index=1)
    flat = pack({"model.lm_head.weight": torch.zeros(2, 2)})
    answer = dealt(remote, REQUEST, PublishedWeights(3, "broken", (ray.put(flat),)))
    assert isinstance(answer, SampleFailure)
    assert "saved from another architecture" in answer.error
    assert remote.sampler.weights.version == -1


def test_rllib_can_sample_by_itself():
    sampler = build_sampler(tiny.grpo())
    (first,) = sampler.sample(num_episodes=4)
    (second,) = sampler.sample(num_timesteps=3, explore=False)
    rows = first.policy_batches[DEFAULT_MODULE_ID], second.policy_batches[DEFAULT_MODULE_ID]
    # 4 episodes are two groups of 3; positions go on where the last call ended.
    assert [batch[columns.ROW_ID].tolist() for batch in rows] == [list(range(6)), [6, 7, 8]]
    assert sampler.get_metrics()[NUM_EPISODES].peek() == 9
    with pytest.raises(AssertionError, match="random token ids"):
        sampler.sample(num_episodes=1, random_actions=True)


def test_a_sampler_that_was_never_given_weights_does_not_generate(ray_session):
    remote = build_sampler(tiny.grpo(), worker_index=1, has_weights=False)
    said = "sampler 1 has no weights yet"
    with pytest.raises(RuntimeError, match=said):
        remote.sample(num_episodes=3)
    # Nor on request, where the weights that the request names were not sent.
    answer = dealt(remote, REQUEST, publication())
    assert isinstance(answer, SampleFailure) and said in answer.error
    flat = pack(remote.module.get_state(inference_only=True))
    judged(remote, REQUEST, PublishedWeights(1, "first", (ray.put(flat),)))
    assert len(remote.sample(num_episodes=3)) == 1
    restored = build_sampler(tiny.grpo(), worker_index=2, has_weights=False)
    restored.set_state(remote.get_state())
    assert len(restored.sample(num_episodes=3)) == 1


def test_an_environment_without_scores_is_learnt_from_by_its_rewards(sampler):
    class Plain:
        """Hands out the same prompts, and says nothing but rewards."""

        single_observation_space = sampler.env.single_observation_space
        single_action_space = sampler.env.single_action_space

        def reset(self, *, options):
            return sampler.env.reset(options=options)

        def step(self, completions):
            observation, rewards, ends, cuts, _ = sampler.env.step(completions)
            return observation, rewards + 0.5, ends, cuts, {}

    expected = judged(sampler, REQUEST, publication())
    other = build_sampler(tiny.grpo())
    other.sampler.environment = SamplingEnvironment(Plain())
    found = judged(other, SampleRequest(4, 5, 3, return_texts=True), publication())
    torch.testing.assert_close(found.columns[columns.SCORES], expected.rewards + 0.5)
    assert found.columns[columns.VALID].all()
    assert found.texts == found.components == found.metrics == {}


def test_a_state_is_the_policy_without_its_critic():
    sampler = build_sampler(tiny.ppo(), worker_index=1)
    state = sampler.get_state()
    names = state[COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
    assert all(name.startswith("model.") for name in names)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in names.items()}
    sampler.set_state({COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: zeros}})
    assert not any(tensor.any() for tensor in sampler.module.parameters())


def test_evaluation_samplers_see_held_out_prompts_with_noise_of_their_own():
    def serve(in_evaluation):
        config = tiny.grpo()
        config.in_evaluation = in_evaluation
        config.env_config["eval_prompts"] = tiny.PROMPTS
        config.env_config["shuffle"] = False
        return judged(build_sampler(config), SampleRequest(0, 6, 3), publication())

    train, evaluation = serve(False), serve(True)
    assert torch.equal(train.columns[columns.PROMPT_IDS], evaluation.columns[columns.PROMPT_IDS])
    assert not torch.equal(
        train.columns[columns.COMPLETION_IDS], evaluation.columns[columns.COMPLETION_IDS]
    )
    assert columns.REF_LOGPROBS not in evaluation.columns  # nothing is learnt from them
