"""What a trial's processes say reaches its folder, and its results tell of rows that failed."""

from __future__ import annotations

import json
import warnings

import pytest
import ray

from rllib_llm.algorithms.grpo import GRPO
from rllib_llm.learners.policy_learners import GRPOLearner
from rllib_llm.shared.messages import ACTIVITY_FILE, MESSAGES_FILE
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")
HERE = "tests.algorithms.test_messages"


def fragile(completions):
    """Fails where a completion has a 7, and says how many it was asked for."""
    print(f"asked for {len(completions)}")
    if any("7" in completion for completion in completions):
        raise KeyError("seven")
    return [float(len(completion)) for completion in completions]


class Trial(GRPO):
    """A trial whose folder can be asked for."""

    def trained(self) -> tuple[dict, str, bool]:
        """A result, the messages of the folder, and whether it says what is done now."""
        result = self.train()
        said = (self.trial_folder / MESSAGES_FILE).read_text(encoding="utf-8")
        return result, said, (self.trial_folder / ACTIVITY_FILE).is_file()


@pytest.mark.slow  # a trial in a process of its own
@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_warnings_and_prints_of_a_trial_stand_in_its_folder(num_env_runners):
    config = tiny.grpo().env_runners(num_env_runners=num_env_runners)
    config.env_config["reward_functions"] = f"{HERE}.fragile"
    trial = ray.remote(num_cpus=1)(Trial).remote(config)
    result, said, does = ray.get(trial.trained.remote())
    ray.get(trial.stop.remote())
    ray.kill(trial)
    assert does
    speaker = "sampler 1" if num_env_runners else "trial"
    rows = [json.loads(line) for line in said.splitlines()]
    assert {(row["iteration"], row["speaker"]) for row in rows} == {(1, speaker)}
    assert "asked for 12" in [row["text"] for row in rows]
    (warned,) = [row["text"] for row in rows if row["is_warning"]]
    assert warned.startswith("reward function 'fragile' failed on ")
    assert "KeyError: 'seven', raised in test_messages.py:" in warned
    # Of 12 rows those failed that were not learnt from.
    share = result["env"]["fragile_failed"]
    assert 0 < share < 1 and share * 12 == pytest.approx(result["train"]["num_invalid"])
    assert result["train"]["truncated_share"] == 0.0
    assert list(result)[:3] == ["reward", "kl", "length"]
    assert result["reward"] == result["objective"]["scores"]


class OutspokenLearner(GRPOLearner):
    """Warns in every update, and prints."""

    def prepare(self, batch):
        warnings.warn("the learner has something to say", stacklevel=1)
        print("an update")
        return super().prepare(batch)


@pytest.mark.slow  # a learner in a process of its own
def test_a_learner_in_a_process_of_its_own_is_heard():
    config = tiny.grpo(learner_class=OutspokenLearner).learners(num_learners=1)
    trial = ray.remote(num_cpus=1)(Trial).remote(config)
    _, said, _ = ray.get(trial.trained.remote())
    ray.get(trial.stop.remote())
    ray.kill(trial)
    rows = [json.loads(line) for line in said.splitlines()]
    assert {(row["iteration"], row["speaker"]) for row in rows} == {(1, "learner 0")}
    texts = [(row["text"], row["is_warning"]) for row in rows]
    assert texts.count(("the learner has something to say", True)) == 1
    assert texts.count(("an update", False)) == 1
