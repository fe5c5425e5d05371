from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rllib_llm.rollouts.errors import BrokenSamplerError
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.messages import failure_text, last_error

TRACEBACK = """ray::Bad.train() (pid=1)
  File "/venv/lib/site-packages/ray/tune/trainable.py", line 326, in train
    result = self.step()
             ^^^^^^^^^^^
  File "/home/me/bad.py", line 5, in training_step
    raise ValueError("lr=3 must be lower: it is not.\\n  Lower it.")
ValueError: lr=3 must be lower: it is not.
  Lower it.
"""
REWARD = """ray::GRPO.train() (pid=1, repr=GRPO)
RuntimeError: in sampler 1:
  File "/home/me/my_rewards.py", line 6, in boom
    return [1 / 0 for _ in completions]
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

ray::GRPO.train() (pid=1, repr=GRPO)
  File "/venv/lib/site-packages/rllib_llm/rollouts/source.py", line 132, in _next
    raise kind(failure.error) from trace
rllib_llm.rollouts.errors.BrokenSamplerError: reward function 'boom' must judge.
"""
DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: GRPO
        pid: 13648
The actor is dead because its worker process has died. Worker exits with an exit code 3.
"""
IN_CREATION = """\x1b[36mray::GRPO.__init__()\x1b[39m (pid=9093, actor_id=8fa, repr=GRPO)
  File "/venv/lib/site-packages/datasets/load.py", line 9, in load
ConnectionError: Couldn't reach 'data/mine' on the Hub

The above exception was the direct cause of the following exception:

\x1b[36mray::GRPO.__init__()\x1b[39m (pid=9093, ip=192.0.2.2, repr=GRPO)
  File "/venv/lib/site-packages/rllib_llm/data/sources.py", line 200, in _read
rllib_llm.data.rows.DataSourceError: prompts='data/mine' must be a file: there is none.
lr=3 must be at most 1.
"""


def task_error(traceback: str, cause: Exception) -> RayTaskError:
    """As Ray raises it."""
    return RayTaskError("train", traceback, cause, "ray::train", 1, "192.0.2.2")


@pytest.mark.parametrize("as_cause", [False, True])  # as Ray raises it where it is asked for it
def test_problems_reach_the_summary_as_the_object_that_was_raised(as_cause):
    problems = Problems("lr", "be at most 1", value=3)
    traceback = f'  File "{__file__.replace("tests", "site-packages")}", line 1, in f\nother.E: no'
    error = task_error(traceback, problems)
    error = error.as_instanceof_cause() if as_cause else error
    assert failure_text("rl", error) == f"rl: {problems}"


def test_a_sampler_s_error_is_its_cause_with_the_user_s_place():
    cause = BrokenSamplerError("reward function 'boom' must judge.")
    assert failure_text("rl", task_error(REWARD, cause), "/runs/a").splitlines() == [
        "rl: reward function 'boom' must judge.",
        '  File "/home/me/my_rewards.py", line 6, in boom',
        "The whole error: /runs/a/error.txt",
    ]


def test_what_a_constructor_raised_is_no_death():
    error = ActorDiedError(task_error(IN_CREATION, ValueError()))
    said = "rf: prompts='data/mine' must be a file: there is none.\nlr=3 must be at most 1."
    assert failure_text("rf", error) == said


def test_the_last_error_of_a_traceback_with_its_places():
    message, frames = last_error(TRACEBACK)
    assert message == "ValueError: lr=3 must be lower: it is not.\n  Lower it."
    assert frames == [
        'File "/venv/lib/site-packages/ray/tune/trainable.py", line 326, in train',
        'File "/home/me/bad.py", line 5, in training_step',
    ]


def test_of_other_errors_the_users_own_places_are_shown():
    text = failure_text("rl", task_error(TRACEBACK, ValueError("lr=3 must be lower")), "/runs/a")
    assert text.startswith("rl: ValueError: lr=3 must be lower\n")
    assert "/home/me/bad.py" in text and "trainable.py" not in text
    inside = TRACEBACK.replace("/home/me/bad.py", "/venv/lib/site-packages/torch/nn.py")
    assert 'torch/nn.py", line 5' in failure_text("rl", task_error(inside, ValueError()))


def test_a_process_that_died_is_told_in_a_line():
    assert failure_text("rl", RuntimeError(DEATH), "/runs/a").splitlines()[0] == (
        "rl: The actor died unexpectedly before finishing this task. The actor is dead because its "
        "worker process has died. Worker exits with an exit code 3."
    )
