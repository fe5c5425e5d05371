from __future__ import annotations

from rllib_llm.shared.messages import PACKAGE, failure_text, last_error, place

TRACEBACK = """ray.exceptions.RayTaskError(ValueError): ray::Bad.train() (pid=1)
  File "/venv/lib/site-packages/ray/tune/trainable.py", line 326, in train
    result = self.step()
  File "/home/me/bad.py", line 5, in training_step
    raise ValueError("lr=3 must be lower: it is not.\\n  Lower it.")
ValueError: lr=3 must be lower: it is not.
  Lower it.
"""
REWARD = """ray.exceptions.RayTaskError(BrokenSamplerError): ray::GRPO.train() (pid=1, repr=GRPO)
  File "/venv/lib/site-packages/ray/tune/trainable.py", line 326, in train
rllib_llm.rollouts.errors.BrokenSamplerError: RewardError: reward function 'boom' must judge.

In the sampler:
Traceback (most recent call last):
  File "/home/me/my_rewards.py", line 6, in boom
    return [1 / 0 for _ in completions]
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/lib/site-packages/rllib_llm/envs/judges/rewards.py", line 132, in _report
    raise RewardError(
rllib_llm.envs.judges.reward_functions.RewardError: reward function 'boom' must judge.
"""
DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: GRPO
        pid: 13648
The actor is dead because its worker process has died. Worker exits with an exit code 3.
"""
IN_SETUP = """ray::GRPO.__init__() (pid=1, \
repr=<rllib_llm.algorithms.rlhf_config._modify_class.<locals>.Class object at 0x7f00>)
  File "/home/me/env.py", line 3, in create
KeyError: 'prompts' in <rllib_llm.algorithms.rlhf_config._modify_class.<locals>.Class object at 0x1>
"""
IN_CREATION = """The actor died because of an error raised in its creation task, \
\x1b[36mray::GRPO.__init__()\x1b[39m (pid=9093, ip=192.0.2.2, actor_id=8fa, repr=GRPO)
  File "/venv/lib/site-packages/datasets/load.py", line 9, in load
ConnectionError: Couldn't reach 'data/mine' on the Hub

The above exception was the direct cause of the following exception:

\x1b[36mray::GRPO.__init__()\x1b[39m (pid=9093, ip=192.0.2.2, actor_id=8fa, repr=GRPO)
  File "/venv/lib/site-packages/rllib_llm/data/sources.py", line 200, in _read
rllib_llm.data.rows.DataSourceError: prompts='data/mine' must be a file: there is none.
"""


def test_what_a_constructor_raised_is_no_death():
    said = "rf: prompts='data/mine' must be a file: there is none."
    assert failure_text("rf", IN_CREATION) == said


def test_the_last_error_of_a_traceback_with_its_places():
    message, frames = last_error(TRACEBACK)
    assert message == "ValueError: lr=3 must be lower: it is not.\n  Lower it."
    assert [place(frame) for frame in frames] == [
        "ray/tune/trainable.py:326 in train",
        "/home/me/bad.py:5 in training_step",
    ]


def test_a_text_that_is_no_traceback_is_shown_by_its_end():
    message, places = last_error("\n".join(f"line {i}" for i in range(9)))
    assert message.splitlines() == ["line 5", "line 6", "line 7", "line 8"]
    assert places == []


def test_a_mistake_that_is_explained_is_one_sentence_without_frames():
    assert failure_text("rl", REWARD, "/runs/a").splitlines() == [
        "rl: reward function 'boom' must judge.",
        "The whole error: /runs/a/error.txt",
    ]


def test_of_other_errors_the_users_own_places_are_shown():
    text = failure_text("rl", TRACEBACK, "/runs/a")
    assert "  raised in /home/me/bad.py:5 in training_step" in text and "trainable.py" not in text
    inside = TRACEBACK.replace("/home/me/bad.py", "/venv/lib/site-packages/torch/nn.py")
    assert "torch/nn.py:5 in training_step" in failure_text("rl", inside, "/runs/a")


def test_a_process_that_died_is_told_in_a_line():
    assert failure_text("rl", DEATH, "/runs/a").splitlines()[0] == (
        "rl: The actor died unexpectedly before finishing this task. The actor is dead because its "
        "worker process has died. Worker exits with an exit code 3."
    )


def test_no_class_is_called_by_rays_inner_name():
    text = failure_text("rl", IN_SETUP, "/runs/a")
    assert "_modify_class" not in text and "KeyError: 'prompts' in an actor" in text


def test_errors_of_this_package_are_shown_without_their_class_and_place():
    text = f"""Traceback (most recent call last):
  File "{PACKAGE}/rollouts/source.py", line 1, in next
    return self._next()
rllib_llm.rollouts.errors.BrokenSamplerError: 8 groups in a row got no score."""
    assert failure_text("a", text) == "a: 8 groups in a row got no score."
