from __future__ import annotations

import pytest
import torch

from rllib_llm.examples import arithmetic
from rllib_llm.examples.arithmetic import ArithmeticProblems, answer_format, correct, sft_texts
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import answer


@pytest.mark.parametrize(
    ("settings", "total"),
    [((1, "+"), 100), ((1, "+-*"), 300), ((2, "-"), 10_000)],
)
def test_problems_are_distinct_and_their_answers_true(settings, total):
    problems = ArithmeticProblems(*settings, num_problems=10**9)
    assert len(problems) == total
    texts = [row["prompt"] for row in problems]
    assert len(set(texts)) == total
    for row in problems:
        assert row["prompt"][-1] == "="
        assert row["answer"] == eval(row["prompt"][:-1])  # digits and a sign of our own


def test_a_few_problems_already_mix_sizes_and_operations():
    few = [row["prompt"] for row in ArithmeticProblems(2, "+-*", num_problems=60)]
    assert all(any(sign in text for text in few) for sign in "+-*")
    assert len({text[0] for text in few}) == 10
    assert ArithmeticProblems(2, "+-*", 60)[17] == ArithmeticProblems(2, "+-*", 60)[17]
    assert ArithmeticProblems(1, "+")[-1] == ArithmeticProblems(1, "+")[99]
    with pytest.raises(IndexError):
        ArithmeticProblems(1, "+")[100]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"digits": 0}, "digits=0 must be a whole number of at least 1 and at most 9"),
        ({"operations": "+/"}, r"operations='\+/' must be of '\+-\*'"),
        ({"operations": ""}, "operations='' must be"),
        ({"num_problems": 0}, "num_problems=0 must be"),
        ({"digit": 2}, r"digit must be a known key. Did you mean 'digits'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(Problems, match=message):
        arithmetic.create(settings)


def test_rewards_for_answer_and_format():
    assert correct(["19", " 19 and on", "9", "", "-19", "019"], [19] * 6) == [1, 1, 0, 0, 0, 1]
    stop = (1,)
    assert answer_format(["19", "-5", "19", "19.", ""], [[5, 1], [1], [5], [1], [1]], stop) == [
        1,  # an integer, then the end
        1,
        0,  # cut off, no stop token
        0,  # something else beside it
        0,
    ]


def test_the_environment_judges_with_a_model_of_its_own():
    env = arithmetic.create({"num_envs": 3, "shuffle": False, "eval_fraction": 0.0})
    assert env.vocab_size == 18  # 15 characters and 3 special tokens
    observation, _ = env.reset()
    prompts = env.tokenizer.batch_decode(observation["prompt_ids"])
    answers = [sum(int(c) for c in prompt[:-1].split("+")) for prompt in prompts]
    actions = answer(env, str(answers[0]), f"{answers[1]}=", "")
    _, rewards, _, _, infos = env.step(actions)
    assert infos["components"]["correct"].tolist() == [1, 1, 0]
    assert infos["components"]["format"].tolist() == [1, 0, 0]
    assert rewards.tolist() == pytest.approx([1.1, 1.0, 0.0])


def test_texts_for_sft_leave_out_the_held_out_problems():
    texts = sft_texts(digits=1, operations="+")
    assert len(texts) == 90  # a tenth of 100 is held out
    assert texts[0].keys() == {"prompt", "completion"}
    trained = {row["prompt"] for row in texts}
    env = arithmetic.create({"split": "eval", "num_envs": 10})
    held_out, _ = env.reset()
    asked = set(env.tokenizer.batch_decode(held_out["prompt_ids"]))
    assert len(asked) == 10 and not asked & trained


def test_the_model_is_a_function_of_its_seed():
    before = torch.random.get_rng_state()
    (one, tokenizer), (two, _), (three, _) = (arithmetic.build_model(s) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    same, other = (next(m.parameters()) for m in (two, three))
    assert torch.equal(next(one.parameters()), same)
    assert not torch.equal(next(one.parameters()), other)
    ids = tokenizer("12+7=", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "12+7=" and ids.shape == (1, 5)
    assert one(ids).logits.shape == (1, 5, len(tokenizer))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
