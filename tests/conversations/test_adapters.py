"""What others have written, unchanged: TRL's environments and tools, reasoning-gym's data sets."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rllib_llm import columns
from rllib_llm.envs.adapters.trl import TRLEnv
from rllib_llm.envs.rlhf import EnvConfigError
from tests.conversations.scripted import add, roll, settings


class Guess:
    """After TRL's guide: reset(**row), public methods as tools, get_reward()."""

    def reset(self, **row) -> str | None:
        self.secret, self.guesses = int(row["answer"]), 0
        return f" You have {row['tries']} tries."

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.

        Returns:
            Whether the number is higher, lower or right.
        """
        self.guesses += 1
        self.right = number == self.secret
        return "right" if self.right else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.right) / self.guesses


def reward_guesses(completions, environments, **kwargs):
    """A TRL reward function that asks its environments."""
    assert [c[0]["role"] for c in completions] == ["assistant"] * len(completions)
    return [0.1 * environment.guesses for environment in environments]


def call(number):
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.fixture
def make():
    made = []

    def build(**changes):
        rows = [
            {"prompt": "Guess.", "answer": "3", "tries": 2},
            {"prompt": [{"role": "user", "content": "Go."}], "answer": "4", "tries": 9},
        ]
        made.append(TRLEnv(settings(prompts=rows, **changes)))  # fmt: skip
        return made[-1]

    yield build
    for env in made:
        env.close()


def test_an_environment_of_trl_as_it_is(make):
    env = make(environment_factory=Guess, reward_functions=reward_guesses)
    attempts, judged, policy = roll(
        env, call(3), lambda row: call(4) if row > 1 else "Done.", "Done."
    )
    # The first two guess 3 of 3 at once; the others 3, then 4 of 4.
    assert judged.columns[columns.SCORES].tolist() == pytest.approx([1.1, 1.1, 0.7, 0.7])
    assert judged.components["score"].tolist() == [1, 1, 0.5, 0.5]
    asked = env.tokenizer.decode(policy.seen[0][2])
    assert "Guess. You have 2 tries.<|im_end|>" in asked and '"name": "guess"' in asked
    said = [m["content"] for m in attempts[2].conversation.messages if m["role"] == "tool"]
    assert said == ["higher", "right"]
    assert "Go. You have 9 tries." in env.tokenizer.decode(policy.seen[-1][2])


def test_tools_of_trl_as_they_are(make):
    env = make(tools=[add], reward_functions=lambda completions, **kwargs: [1.0] * len(completions),
               max_tool_calling_iterations=2)  # fmt: skip
    assert env.settings["max_turns"] == 3
    add_call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    attempts, _, _ = roll(env, add_call)
    assert {a.truncated for a in attempts} == {"turns"}
    assert attempts[0].conversation.num_turns == 3


def test_an_environment_without_reset_is_refused(make):
    with pytest.raises(EnvConfigError, match=r"must be a class with reset\(\*\*row\)"):
        make(environment_factory=dict)


def test_task_sets_of_verifiers_want_verifiers():
    from rllib_llm.envs.adapters.verifiers import VerifiersEnv

    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed: test_verifiers.py")
    with pytest.raises(ImportError, match="taskset='x' must find the package verifiers"):
        VerifiersEnv({**settings(), "taskset": "x"})


# --- reasoning-gym -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gym():
    pytest.importorskip("reasoning_gym")
    from rllib_llm.envs.adapters import reasoning_gym

    return reasoning_gym


def test_a_task_is_a_function_of_seed_and_position(gym):
    mixture = ["chain_sum", {"name": "gcd", "weight": 3.0}]
    one, two = (gym.Tasks(mixture, num_tasks=200, seed=5) for _ in range(2))
    assert two[150] == one[150]  # in any order
    assert [one[i] for i in range(20)] == two[:20]
    assert gym.Tasks(mixture, num_tasks=200, seed=6)[150] != one[150]
    names = [one[i]["dataset"] for i in range(200)]
    assert 120 <= names.count("gcd") <= 180  # three of four: 150 +- 5 standard deviations of 6


def test_half_an_answer_is_worth_nothing(gym):
    """The data sets' own score rewards whoever writes down all that might be right."""
    tasks = gym.Tasks("chain_sum", num_tasks=10)
    answer = tasks[0]["answer"]
    every = " ".join(map(str, range(-2000, 2000))) + f" {answer}"
    assert tasks.score(0, answer, "exact") == tasks.score(0, answer, "task") == 1.0
    assert tasks.score(0, every, "exact") == 0.0 < tasks.score(0, every, "task")
    assert tasks.score(0, None, "exact") == 0.0


def test_a_curriculum_grows_with_the_position(gym):
    tasks = gym.Tasks("chain_sum", num_tasks=30, tasks_per_level=10)
    easy, hard = (tasks.dataset(0, level).config for level in (0, 2))
    assert (easy.max_terms, easy.max_digits) < (hard.max_terms, hard.max_digits)
    assert tasks.level(9) == 0 and tasks.level(25) == 2


def test_unknown_data_sets_are_refused(gym):
    with pytest.raises(EnvConfigError, match="datasets='chain' must be a name of reasoning-gym"):
        gym.Tasks("chain")
    with pytest.raises(EnvConfigError, match="config={'max_terms': 'x'} must be settings of"):
        gym.Tasks([{"name": "chain_sum", "config": {"max_terms": "x"}}])[0]
    with pytest.raises(EnvConfigError, match="must be None for"):
        from reasoning_gym.factory import CURRICULA, DATASETS

        name = min(set(DATASETS) - set(CURRICULA) - {"composite"})
        gym.Tasks(name, tasks_per_level=5)[0]


def test_the_environment_judges_tagged_answers(gym):
    env = gym.create(
        {**{k: v for k, v in settings().items() if k == "tokenizer"}, "datasets": "chain_sum",
         "answer_tag": "answer", "max_prompt_len": 400, "num_tasks": 50}
    )  # fmt: skip
    _, infos = env.reset(options={"position": 0, "num_prompts": 2})
    answers = [env.prompts.row(int(i)).columns["answer"] for i in infos["prompt_index"]]
    texts = [f"so <answer>{answers[0]}</answer>", answers[1]]
    ids = [env.tokenizer(text)["input_ids"] for text in texts]
    _, rewards, _, _, infos = env.step(ids)
    assert rewards.tolist() == [1.0, 0.0] and bool(infos["valid"].all())
    assert isinstance(rewards, torch.Tensor)
