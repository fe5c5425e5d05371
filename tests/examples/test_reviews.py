from __future__ import annotations

import pytest

from rllib_llm.examples import reviews
from rllib_llm.examples.reviews_grammar import UNGRAMMATICAL_SCORE
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import answer

GOOD = " It is lovely and light. I adore the {part}. Five stars."
BAD = " It is awful and heavy. I hate the {part}. One star."
NONSENSE = " It is lovely but."


def num_words(completions):
    return [float(len(completion.split())) for completion in completions]


def finished_openings(env):
    """The texts of the batch's prompts, and for each whether its first sentence is whole."""
    observation, _ = env.reset(options={"position": 0, "num_prompts": 60})
    texts = env.tokenizer.batch_decode(observation["prompt_ids"], skip_special_tokens=True)
    return texts, [text.endswith(".") for text in texts]


def part_of(text):
    from rllib_llm.examples.reviews_sentences import KINDS

    return next(kind.parts[0] for kind in KINDS if f"this {kind.name}" in text.lower())


def judged(env, template):
    texts, whole = finished_openings(env)
    completions = [
        ("" if done else " in June.") + template.format(part=part_of(text))
        for text, done in zip(texts, whole, strict=True)
    ]
    _, rewards, _, _, infos = env.step(answer(env, *completions))
    return rewards, infos


@pytest.mark.parametrize(
    ("completion", "reward", "gold_score", "grammatical"),
    [
        (GOOD, 3.0, 3.0, 1.0),
        (BAD, -3.0, -3.0, 1.0),
        (NONSENSE, UNGRAMMATICAL_SCORE, 0.0, 0.0),  # no sentence of the language, so no opinion
        (GOOD.removesuffix(" Five stars."), UNGRAMMATICAL_SCORE, 3.0, 0.0),  # no verdict
    ],
)
def test_the_grammar_judges_where_nothing_else_does(completion, reward, gold_score, grammatical):
    env = reviews.create({})
    rewards, infos = judged(env, completion)
    assert set(rewards.tolist()) == {reward}
    assert set(infos["metrics"]["gold_score"].tolist()) == {gold_score}
    assert set(infos["metrics"]["grammatical"].tolist()) == {grammatical}


def test_the_gold_score_stays_a_metric_beside_another_judge():
    env = reviews.create({"reward_functions": num_words})
    texts, whole = finished_openings(env)
    completions = [" one two three"] * len(texts)
    _, rewards, _, _, infos = env.step(answer(env, *completions))
    assert set(rewards.tolist()) == {3.0}
    assert set(infos["metrics"]["gold_score"].tolist()) == {0.0}
    # One thing is called gold; the grammar's judgement, which weighs nothing here, is another.
    assert not any(name.startswith("gold") for name in infos["components"])
    assert set(infos["metrics"]["grammatical"].tolist()) == {0.0}


def test_held_out_prompts_are_none_of_the_training_ones():
    train, _ = finished_openings(reviews.create({}))
    held_out, _ = finished_openings(reviews.create({"split": "eval"}))
    assert not set(train) & set(held_out)


def test_unknown_settings_are_refused_with_the_nearest_name():
    with pytest.raises(Problems, match="Did you mean 'reward_model'"):
        reviews.create({"reward_modle": "x"})
    with pytest.raises(Problems, match="eval_fraction"):
        reviews.create({"eval_fraction": 0.1})
