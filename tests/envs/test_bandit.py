from __future__ import annotations

import gymnasium
import pytest
import torch
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.judges.rewards import RewardError, RewardSum
from rllib_llm.envs.prompts import PromptSource
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import answer, num_words, word_env
from tests.envs.tiny_tokenizers import word_tokenizer


class HalfReference:
    """A reference to which every token has probability exp(-0.5 * temperature)."""

    def logprobs(self, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature):
        return torch.where(completion_mask, -0.5 * temperature, 0.0)

    def metrics(self):
        return {"drift/kl": 0.25}


def _texts(env, observation):
    ids, mask = observation["prompt_ids"], observation["prompt_mask"]
    return [env.tokenizer.decode(row[keep]) for row, keep in zip(ids, mask, strict=True)]


def test_spaces():
    env = word_env()
    for space, max_len in ((env.single_observation_space, 8), (env.single_action_space, 6)):
        assert isinstance(space, Repeated) and space.max_len == max_len
        assert space.child_space == gymnasium.spaces.Discrete(len(env.tokenizer))
    assert isinstance(env, gymnasium.vector.VectorEnv) and env.num_envs == 2
    assert env.action_space.sample()[1] in env.single_action_space


def test_reset_hands_out_groups_at_a_position():
    env = word_env()
    options = {"position": 1, "num_prompts": 3, "num_completions": 2}
    observation, infos = env.reset(options=options)
    prompts = ["a big dog", "red", "the dog ran"]
    assert _texts(env, observation) == [text for text in prompts for _ in range(2)]
    assert observation["prompt_ids"].shape == (6, 3)
    assert observation["prompt_ids"].dtype == torch.int64
    assert observation["prompt_mask"].dtype == torch.bool
    assert observation["prompt_mask"][2].tolist() == [False, False, True]  # "red", left-padded
    assert infos["prompt_index"].tolist() == [1, 1, 2, 2, 3, 3] and infos["position"] == 1


def test_chats_and_texts_may_stand_in_one_data_set():
    seen = []

    def judge(prompts, completions, messages):
        seen.append((prompts, messages))
        return [0.0] * len(completions)

    chat = [{"role": "user", "content": "the cat"}]
    env = word_env(
        tokenizer=word_tokenizer(chat=True),
        prompts=PromptSource([{"prompt": chat}, {"prompt": "red"}], shuffle=False),
        rewards=RewardSum(judge),
    )
    env.reset()
    *_, infos = env.step(answer(env, "sat", "ran"))
    assert seen == [(["<user> the cat <assistant>", "red"], [chat, None])]
    # For people: turns instead of a template, and the user's words.
    assert infos["turns"] == ["[user] the cat", "red"] and infos["question"] == ["the cat", ""]


def test_without_options_it_walks_on():
    env = word_env()
    first, infos = env.reset()
    assert _texts(env, first) == ["the cat", "a big dog"] and infos["position"] == 0
    second, *_, infos = env.step(answer(env, "sat", "ran"))
    assert _texts(env, second) == ["red", "the dog ran"]
    assert infos["next_position"] == 2 and infos["next_prompt_index"].tolist() == [2, 3]
    assert infos["prompt_index"].tolist() == [0, 1]
    third, infos = env.reset()
    assert _texts(env, third) == ["the cat", "a big dog"] and infos["position"] == 4  # epoch 2
    assert env.reset(seed=7)[1]["position"] == 0


def test_a_seed_of_reset_does_not_change_the_order():
    # Samplers have seeds of their own, and must all see the prompts of a position.
    source = [{"prompt": word} for word in ("the", "a", "cat", "dog", "sat", "ran")]
    one, two = (word_env(prompts=PromptSource(source, seed=5), num_envs=6) for _ in range(2))
    assert torch.equal(one.reset(seed=1)[0]["prompt_ids"], two.reset(seed=2)[0]["prompt_ids"])


def test_step_judges():
    def label(completions, label):
        return label

    env = word_env(
        rewards=RewardSum([num_words, {"function": label, "weight": 0.1}]), return_texts=True
    )
    env.reset(options={"num_prompts": 2, "num_completions": 2})
    actions = answer(env, "sat", "sat on the mat", "ran", "good and bad")
    _, rewards, terminations, truncations, infos = env.step(actions)
    # Words 1, 4, 1, 3; a tenth of the labels 10, 10, 20, 20.
    assert rewards.tolist() == pytest.approx([1 + 1, 4 + 1, 1 + 2, 3 + 2])
    assert rewards.dtype == torch.float32
    assert terminations.dtype == torch.bool and terminations.all() and not truncations.any()
    assert torch.equal(infos["scores"], rewards)
    assert infos["valid"].tolist() == [True] * 4
    assert infos["components"]["num_words"].tolist() == [1, 4, 1, 3]
    assert infos["num_completion_tokens"].tolist() == [2, 5, 2, 4]  # with EOS
    assert infos["prompt_texts"] == ["the cat"] * 2 + ["a big dog"] * 2
    # The space in front stays, so that prompt + completion is what the tokens say.
    assert infos["completion_texts"] == [" sat", " sat on the mat", " ran", " good and bad"]
    assert "ref_logprobs" not in infos and "kl" not in infos


def test_kl_share_of_the_reward():
    env = word_env(reference=HalfReference(), kl_coeff=0.1, temperature=2.0)
    env.reset()
    actions = answer(env, "sat", "sat on")
    logprobs = torch.where(actions["completion_mask"], -0.25, -99.0)  # padding must not count
    _, rewards, _, _, infos = env.step({**actions, "sampler_logprobs": logprobs})
    # log-probs -0.25 against -0.5 * 2 = -1: 0.75 for each of 2 and 3 tokens.
    assert infos["kl"].tolist() == pytest.approx([1.5, 2.25])
    assert infos["ref_logprobs"].tolist() == [[-1, -1, 0], [-1, -1, -1]]
    assert rewards.tolist() == pytest.approx([1 - 0.15, 2 - 0.225])
    assert infos["scores"].tolist() == [1, 2]
    assert infos["metrics"]["reference/drift/kl"].tolist() == [0.25, 0.25]


def test_kl_needs_the_samplers_logprobs():
    env = word_env(reference=HalfReference(), kl_coeff=0.1)
    env.reset()
    with pytest.raises(Problems, match=r"\['sampler_logprobs'\] lack"):
        env.step(answer(env, "sat", "ran"))
    env = word_env(reference=HalfReference())
    env.reset()
    assert "kl" not in env.step(answer(env, "sat", "ran"))[-1]


def test_failed_rows_are_marked():
    def fragile(completions):
        return [float("nan") if "bad" in completion else 1.0 for completion in completions]

    env = word_env(rewards=RewardSum(fragile))
    env.reset()
    with pytest.warns(UserWarning, match="'fragile' failed on completions.*prompt 'a big dog'"):
        _, rewards, _, _, infos = env.step(answer(env, "good", "bad"))
    assert rewards.tolist() == [1, 0] and infos["valid"].tolist() == [True, False]


def test_a_reward_function_changes_neither_the_data_nor_the_tokens():
    """A row that a function had changed was changed in all later epochs, and its tokens were
    trained on."""
    rows = [{"prompt": "the cat", "label": [1, 2]}, {"prompt": "red", "label": [3, 4]}]

    def pops(completions, label, completion_ids):
        for ids in completion_ids:
            ids.clear()
        return [float(each.pop()) for each in label]

    def erases(prompt_ids, prompt_mask, completion_ids, completion_mask):
        prompt_ids.zero_()
        completion_mask.zero_()
        return completion_ids.zero_().sum(-1).float()

    erases.wants_tokens = True

    def counts(completions, completion_ids):
        return [10.0 * len(ids) for ids in completion_ids]

    env = word_env(
        prompts=PromptSource(rows, shuffle=False), rewards=RewardSum([pops, erases, counts])
    )
    for position in (0, 2):
        env.reset(options={"position": position, "num_prompts": 2, "num_completions": 2})
        actions = answer(env, "big", "dog ran", "a", "a")
        given = {name: column.clone() for name, column in actions.items()}
        _, rewards, _, _, _ = env.step(actions)
        assert rewards.tolist() == [22, 32, 24, 24]  # EOS is a token
        assert all(torch.equal(given[name], actions[name]) for name in given)


def test_a_completion_of_eos_alone_has_no_text():
    env = word_env(return_texts=True, prompts=PromptSource(["red"]), num_envs=1)
    env.reset()
    *_, infos = env.step(answer(env, ""))  # EOS alone
    assert infos["completion_texts"] == [""]


@pytest.mark.parametrize("return_texts", [False, True])
def test_texts_are_told_where_they_were_decoded(return_texts):
    """For a function that wants them, so that who keeps them need not decode again; else on
    request."""

    def length(prompt_ids, prompt_mask, completion_ids, completion_mask):
        return completion_mask.sum(-1)

    length.wants_tokens = True
    for function, wants in ((length, False), (num_words, True)):
        env = word_env(
            rewards=RewardSum(function), return_texts=return_texts, prompts=PromptSource(["red"])
        )
        env.reset()
        *_, infos = env.step(answer(env, "sat", "ran"))
        told = [" sat", " ran"] if wants or return_texts else None
        assert infos.get("completion_texts") == told


def test_token_functions_need_no_texts():
    class Spy:
        wants_tokens = True

        def __call__(self, prompt_ids, prompt_mask, completion_ids, completion_mask):
            self.shapes = prompt_ids.shape, completion_ids.shape
            return completion_mask.sum(-1)

    spy = Spy()
    env = word_env(rewards=RewardSum(spy))
    env.tokenizer.batch_decode = None  # would raise when called
    env.reset()
    assert env.step(answer(env, "sat", "sat on"))[1].tolist() == [2, 3]
    assert spy.shapes == ((2, 3), (2, 3))


def _wrong(env, **changes):
    return {**answer(env, "sat", "sat on"), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"completion_ids": torch.ones(3, 3, dtype=torch.int64)},
            r"must be .* shape \[2, 3\]: it is .* shape \[3, 3\]",
        ),
        ({"completion_mask": torch.ones(2, 2).bool()}, r"completion_mask must .*shape \[2, 2\]"),
        ({"completion_ids": torch.ones(6, dtype=torch.int64)}, r"ids must .*shape \[6\]"),
        ({"completion_ids": torch.ones(2, 3)}, "must .*int64.*: it is of torch.float32"),
        ({"completion_ids": [[1, 2, 3]] * 2}, "completion_ids must .*: it is of type list"),
        ({"completion_mask": torch.ones(2, 3)}, "completion_mask must .* is of torch.float32"),
        ({"completion_mask": torch.zeros(2, 3).bool()}, r"completion_mask\[0\]=\[0, 0, 0\] must"),
        (
            {"completion_mask": torch.tensor([[True] * 3, [True, False, True]])},
            r"completion_mask\[1\]=\[1, 0, 1\] must be True for the first tokens",
        ),
        ({"completion_ids": torch.full((2, 3), 999)}, r"completion_ids\[0\]=\[999, .* 0\.\.18"),
        ({"completion_ids": torch.tensor([[1, 1, 1], [1, -2, 1]])}, r"ids\[1\]=\[-2\] must"),
        ({"sampler_logprobs": torch.zeros(2, 2)}, r"sampler_logprobs must .*shape \[2, 2\]"),
    ],
)
def test_wrong_actions(changes, message):
    env = word_env()
    assert env.vocab_size == 19
    env.reset()
    with pytest.raises(Problems, match=message):
        env.step(_wrong(env, **changes))


def test_more_wrong_uses():
    env = word_env()
    with pytest.raises(Problems, match=r"step\(\) must follow reset\(\)"):
        env.step(answer(env, "sat", "sat"))
    env.reset()
    with pytest.raises(Problems, match=r"\['completion_mask'\] lack"):
        env.step({"completion_ids": torch.ones(2, 1, dtype=torch.int64)})
    with pytest.raises(Problems, match="actions=.*Tensor.* must be a dict"):
        env.step(torch.ones(2, 1))
    with pytest.raises(Problems, match="must be 1 to 6 tokens"):
        env.step(answer(env, "a a a a a a", "a"))  # six words and EOS
    for options in ({"positoin": 1}, {"position": -1}, {"num_prompts": 0}, {"position": 1.5}):
        with pytest.raises(Problems, match="options"):
            env.reset(options=options)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_envs": 0}, Problems, "num_envs=0 must be a whole number of at least 1"),
        ({"max_prompt_len": 2.5}, Problems, "max_prompt_len=2.5 must be a whole number"),
        ({"temperature": 0.0}, Problems, "temperature=0.0 must be a number above 0"),
        ({"kl_coeff": -1.0}, Problems, "kl_coeff=-1.0 must be a number of at least 0"),
        ({"kl_coeff": 0.1}, Problems, "kl_coeff=0.1 must be 0 without a reference"),
        ({"tokenizer": word_tokenizer(pad=False)}, Problems, "pad_token_id=None must be"),
        ({"prompt_overflow": "cut"}, Problems, "prompt_overflow='cut' must be one of"),
        ({"rewards": RewardSum(lambda completions, gold: [0])}, RewardError, r"\['gold'\]"),
    ],
)
def test_wrong_settings(settings, error, message):
    with pytest.raises(error, match=message):
        word_env(**settings)


def test_prompts_outside_the_models_vocabulary():
    env = word_env(vocab_size=8)
    with pytest.raises(Problems, match="must be below vocab_size=8"):
        env.reset()


def test_a_model_may_have_more_tokens_than_its_tokenizer():
    env = word_env(vocab_size=32)
    env.reset()
    actions = _wrong(env, completion_ids=torch.full((2, 3), 31))
    assert env.step(actions)[1].tolist() == [0, 0]  # a token without a text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_stays_on_the_device():
    env = word_env(device="cuda", reference=HalfReference())
    observation, infos = env.reset()
    actions = {name: value.cuda() for name, value in answer(env, "sat", "ran").items()}
    observation, rewards, terminations, truncations, infos = env.step(actions)
    tensors = [*observation.values(), rewards, terminations, truncations, infos["scores"]]
    tensors += [infos["valid"], infos["ref_logprobs"], infos["components"]["num_words"]]
    assert all(tensor.is_cuda for tensor in tensors)


def test_it_is_a_bandit_env_by_gymnasiums_rules():
    env = word_env()
    assert isinstance(env, BanditEnv)
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.SAME_STEP
    env.close()
    assert env.closed


def test_a_sample_of_the_action_space_can_be_stepped():
    env = word_env(num_envs=3)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = env.action_space.sample()
    _, rewards, _, _, infos = env.step(actions)
    assert infos["num_completion_tokens"].tolist() == [len(ids) for ids in actions]
    assert rewards.shape == (3,)
    with pytest.raises(Problems, match=r"completion_ids must .*shape \[2, "):
        env.step(actions[:2])


def test_shares_of_rows_that_failed_or_were_cut_count_over_all_rows():
    def fragile(completions):
        if any("dog" in text for text in completions):
            raise KeyError("dog")
        return [1.0] * len(completions)

    env = word_env(num_envs=2, rewards=RewardSum(fragile), max_prompt_len=2)
    with pytest.warns(UserWarning):
        env.reset(seed=0)
        ids = [env.tokenizer(text)["input_ids"] for text in ("the dog", "cat")]
        infos = env.step(ids)[4]
    assert infos["metrics"]["fragile_failed"].tolist() == [1.0, 0.0]
    cut = infos["metrics"]["prompt_truncated"]
    assert cut.tolist() == [float(len(row.prompt.split()) > 2) for row in env_rows(env)]


def env_rows(env) -> list:
    """The rows of the first batch."""
    return env.prompts.rows(0, env.num_envs)


def test_chats_without_a_template_are_told_before_anything_is_sampled():
    chats = [{"messages": [{"role": "user", "content": "the cat"}]}]
    with pytest.raises(Problems, match="messages must become text: .* no chat template"):
        word_env(prompts=PromptSource(chats))
    assert word_env(prompts=PromptSource(chats), tokenizer=word_tokenizer(chat=True))
