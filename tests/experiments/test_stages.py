from __future__ import annotations

from types import SimpleNamespace

from rllib_llm.experiments.stages import last_error, last_saved

TRACEBACK = """ray.exceptions.RayTaskError(ValueError): ray::Bad.train() (pid=1)
  File "/venv/lib/site-packages/ray/tune/trainable.py", line 326, in train
    result = self.step()
  File "/home/me/bad.py", line 5, in training_step
    raise ValueError("lr=3 must be lower: it is not.\\n  Lower it.")
ValueError: lr=3 must be lower: it is not.
  Lower it.
"""


def test_the_last_error_of_a_traceback_with_its_places():
    message, places = last_error(TRACEBACK)
    assert message == "ValueError: lr=3 must be lower: it is not.\n  Lower it."
    assert places == [
        "ray/tune/trainable.py:326 in train",
        "/home/me/bad.py:5 in training_step",
    ]


def test_a_text_that_is_no_traceback_is_shown_by_its_end():
    message, places = last_error("\n".join(f"line {i}" for i in range(9)))
    assert message.splitlines() == ["line 5", "line 6", "line 7", "line 8"]
    assert places == []


def test_who_stops_a_stage_is_told_what_it_goes_on_from():
    def trial(*iterations: int) -> SimpleNamespace:
        saved = [(object(), {"training_iteration": iteration}) for iteration in iterations]
        return SimpleNamespace(best_checkpoints=saved)

    assert last_saved([trial()]) == "the beginning, having no checkpoint"
    assert last_saved([trial(5, 10)]) == "iteration 10"
    assert last_saved([trial(5, 10), trial(8, 4), trial()]) == "iterations 10, 8, none"
