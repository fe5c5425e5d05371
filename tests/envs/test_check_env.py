from __future__ import annotations

import gymnasium
import pytest
import torch
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.check_env import check_env
from rllib_llm.envs.judges.rewards import RewardSum
from rllib_llm.envs.prompts import PromptSource
from rllib_llm.envs.registry import make
from rllib_llm.examples.arithmetic import MODEL
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import PROMPTS, num_words
from tests.envs.tiny_tokenizers import word_tokenizer


class GoodEnv(BanditEnv):
    """What the broken ones are made from, each by changing one answer."""

    def __init__(self, **settings):
        defaults = {
            "tokenizer": word_tokenizer(),
            "prompts": PromptSource(PROMPTS, seed=1),
            "rewards": RewardSum(num_words),
            "num_envs": 2,
            "max_prompt_len": 8,
            "max_completion_len": 8,
        }
        super().__init__(**{**defaults, **settings})

    def change_reset(self, observation, infos):
        return observation, infos

    def change_step(self, actions, result):
        return result

    def reset(self, *, seed=None, options=None):
        return self.change_reset(*super().reset(seed=seed, options=options))

    def step(self, actions):
        return self.change_step(actions, super().step(actions))


class PlainEnv(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)


class WrongSpaces(GoodEnv):
    def __init__(self):
        super().__init__()
        self.single_action_space = gymnasium.spaces.MultiDiscrete([19] * 8)


class OtherVocabulary(GoodEnv):
    def __init__(self):
        super().__init__()
        self.single_action_space = Repeated(gymnasium.spaces.Discrete(7), 8)


class NumpyPrompts(GoodEnv):
    def change_reset(self, observation, infos):
        return {name: value.numpy() for name, value in observation.items()}, infos


class Int32Prompts(GoodEnv):
    def change_reset(self, observation, infos):
        return {**observation, "prompt_ids": observation["prompt_ids"].int()}, infos


class ListObservation(GoodEnv):
    def change_reset(self, observation, infos):
        return observation["prompt_ids"], infos


class RightPadded(GoodEnv):
    def change_reset(self, observation, infos):
        return {name: value.flip(1) for name, value in observation.items()}, infos


class StrangePad(GoodEnv):
    def change_reset(self, observation, infos):
        ids = torch.where(observation["prompt_mask"], observation["prompt_ids"], -100)
        return {**observation, "prompt_ids": ids}, infos


class ScatteredGroups(GoodEnv):
    def change_reset(self, observation, infos):
        half = len(infos["prompt_index"]) // 2
        order = torch.arange(2 * half).reshape(2, half).T.flatten()
        return {name: value[order] for name, value in observation.items()}, infos


class ForgetsIndex(GoodEnv):
    def change_reset(self, observation, infos):
        return observation, {"position": infos["position"]}


class ForgetsPosition(GoodEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={**(options or {}), "position": self.position})


class CountsBatches(GoodEnv):
    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        options["position"] = options.get("position", 0) * 3
        observation, infos = super().reset(seed=seed, options=options)
        return observation, {**infos, "position": options["position"] // 3}


def _replace(result, place, value):
    return (*result[:place], value, *result[place + 1 :])


class FourResults(GoodEnv):
    def change_step(self, actions, result):
        return result[:4]


class ColumnRewards(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 1, result[1][:, None])


class NanRewards(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 1, result[1] * float("nan"))


class GoesOn(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 2, ~result[2])


class Truncates(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 3, ~result[3])


class WritesIntoActions(GoodEnv):
    def change_step(self, actions, result):
        actions["completion_ids"].zero_()
        return result


def _infos_with(result, **changes):
    return _replace(result, 4, {**result[4], **changes})


class RewardsAlone(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 4, {})


class ScoresAlone(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 4, {"scores": result[4]["scores"]})


class OwnRewards(GoodEnv):
    def change_step(self, actions, result):
        return _replace(result, 1, result[1] + 1)


class CountsPadding(GoodEnv):
    def change_step(self, actions, result):
        counts = torch.full_like(result[4]["num_completion_tokens"], 6)
        return _infos_with(result, num_completion_tokens=counts)


class ScoredThoughInvalid(GoodEnv):
    def change_step(self, actions, result):
        return _infos_with(
            result, valid=torch.zeros_like(result[4]["valid"]), scores=result[4]["scores"] + 1
        )


class ListComponents(GoodEnv):
    def change_step(self, actions, result):
        return _infos_with(result, components={"length": [1.0] * len(result[1])})


class UnmaskedReference(GoodEnv):
    def change_step(self, actions, result):
        return _infos_with(result, ref_logprobs=-torch.ones(actions["completion_ids"].shape))


class PositiveReference(GoodEnv):
    def change_step(self, actions, result):
        return _infos_with(result, ref_logprobs=actions["completion_mask"].float())


class ScoresPadding(GoodEnv):
    def change_step(self, actions, result):
        width = actions["completion_ids"].shape[1]
        return _infos_with(result, scores=result[4]["scores"] + width)


class JudgesAnything(GoodEnv):
    """Judges whatever comes, as long as there is a completion for every prompt."""

    def step(self, actions):
        ids = actions["completion_ids"].clamp(0, self.vocab_size - 1)
        mask = torch.arange(ids.shape[1]).expand(ids.shape) < 1
        given = {"completion_ids": ids, "completion_mask": mask}
        result = super().step(given)
        counts = actions.get("completion_mask", mask).sum(-1)
        return _infos_with(result, num_completion_tokens=counts)


def test_nothing_is_found_in_good_environments():
    assert check_env(GoodEnv) == []
    assert check_env(GoodEnv(max_completion_len=1)) == []
    assert check_env(RewardsAlone) == []  # which are learnt from then
    assert check_env(f"{__name__}:GoodEnv", {"num_envs": 5}, num_prompts=7, seed=3) == []
    assert check_env("rllib_llm/Arithmetic-v0", {"operations": "+-"}, raise_error=True) == []


def test_random_scores_are_no_finding():
    generator = torch.Generator().manual_seed(0)

    def noise(completions):
        return torch.rand(len(completions), generator=generator)

    assert check_env(GoodEnv(rewards=RewardSum(noise))) == []


@pytest.mark.parametrize(
    ("env", "name", "rule"),
    [
        (PlainEnv, "env", "be a gymnasium.vector.VectorEnv"),
        (WrongSpaces, "single_action_space", "be Repeated(Discrete(vocab_size), max_len)"),
        (OtherVocabulary, "vocabulary sizes of both spaces", "be the same"),
        (NumpyPrompts, "reset() prompt_ids", "be a torch tensor of torch.int64"),
        (Int32Prompts, "reset() prompt_ids", "be a torch tensor of torch.int64, shape [6, 'any']"),
        (ListObservation, "reset() observation", "be a dict with ['prompt_ids', 'prompt_mask']"),
        (RightPadded, "reset() prompt_mask[4]", "be False for padding at the left"),
        (StrangePad, "reset() prompt token id", "be in 0..18, padding too"),
        (ScatteredGroups, "prompts of a group", "be the same"),
        (ForgetsIndex, "reset() infos", "be a dict with ['prompt_index', 'position']"),
        (ForgetsPosition, "reset() infos['position']", "be the position asked for, 1"),
        (ForgetsPosition, "prompts of reset() at the same position twice", "be the same"),
        (CountsBatches, "prompts of reset() at position 2", "be those of position 1 without"),
        (FourResults, "step()", "return (observation, rewards"),
        (ColumnRewards, "step() rewards", "be a torch tensor of torch.float32, shape [6]"),
        (NanRewards, "step() rewards", "be finite"),
        (GoesOn, "step() terminations", "be all True"),
        (Truncates, "step() truncations", "be all False"),
        (WritesIntoActions, "actions after step()", "be as they were before"),
        (ScoresAlone, "step() infos", "be a dict with ['scores', 'valid', 'components'"),
        (OwnRewards, "step() rewards", "be infos['scores']"),
        (CountsPadding, "step() infos['num_completion_tokens']", "be [1, 2, 3, 4, 5, 6]"),
        (ScoredThoughInvalid, "step() infos['scores'] where not valid", "be 0"),
        (ListComponents, "step() infos['components']['length']", "be a torch tensor"),
        (UnmaskedReference, "step() infos['ref_logprobs']", "be at most 0, and exactly 0 where"),
        (PositiveReference, "step() infos['ref_logprobs']", "be at most 0"),
        (ScoresPadding, "scores with two more columns of padding", "be ["),
        (JudgesAnything, "step() given a token id outside the vocabulary", "be an error"),
        (JudgesAnything, "step() given a mask with a hole", "be an error"),
        (JudgesAnything, "step() given no completion_mask", "be an error"),
    ],
)
def test_each_break_is_found(env, name, rule):
    found = {problem.name: problem.rule for problem in check_env(env)}
    assert found[name].startswith(rule)


@pytest.mark.parametrize(
    "env",
    [Int32Prompts, RightPadded, ScatteredGroups, GoesOn, CountsPadding, ScoresPadding, OwnRewards],
)
def test_one_break_is_one_finding(env):
    assert len(check_env(env)) == 1


def test_findings_are_raised_together():
    with pytest.raises(Problems) as caught:
        check_env(JudgesAnything, raise_error=True)
    assert len(caught.value.found) == 3


def test_exceptions_of_the_environment_pass_through():
    class Fails(GoodEnv):
        def change_step(self, actions, result):
            raise ZeroDivisionError("in the user's code")

    with pytest.raises(ZeroDivisionError, match="in the user's code"):
        check_env(Fails())


def test_one_prompt_is_too_few_to_see_groups():
    with pytest.raises(Problems) as caught:
        check_env(GoodEnv(), num_prompts=1)
    assert caught.value.problem.name == "num_prompts"


def taking_all_settings(env_config):
    return make("rllib_llm/Arithmetic-v0", env_config)


def taking_no_reference(env_config):
    return make("rllib_llm/Arithmetic-v0", {**env_config, "reference": None})


def test_what_the_default_beta_would_refuse_is_warned_of(recwarn):
    settings = {"model": MODEL, "num_problems": 20}
    assert check_env("rllib_llm/Arithmetic-v0", {"num_problems": 20}) == []
    assert check_env(taking_all_settings, settings) == []
    assert not recwarn  # samplers' reference reaches both
    with pytest.warns(UserWarning, match="no 'ref_logprobs'.*ref_kl_coeff.*reference_in='learner'"):
        assert check_env(taking_no_reference, settings) == []
