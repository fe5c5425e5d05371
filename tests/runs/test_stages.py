from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_llm.runs.stages import _begins_again, _product, last_saved
from rllib_llm.shared.errors import Problems


def test_who_stops_a_stage_is_told_what_it_goes_on_from():
    def trial(*iterations: int) -> SimpleNamespace:
        saved = [(object(), {"training_iteration": iteration}) for iteration in iterations]
        return SimpleNamespace(best_checkpoints=saved)

    assert last_saved([trial()]) == "the beginning, since there is no checkpoint"
    none = last_saved([trial()], of=" of a")
    assert none == "the beginning of a, since there is no checkpoint"
    assert last_saved([trial(10)], of=" of a") == "iteration 10 of a"
    assert last_saved([trial(5, 10)]) == "iteration 10"
    assert last_saved([trial(5, 10), trial(8, 4), trial()]) == "iterations 10, 8, none"


def test_what_an_algorithm_does_not_make_is_no_text_none():
    products = {"a.model": None, "b.model": Path("/x")}
    assert _product(products, "b.model", "c.config.model") == "/x"
    with pytest.raises(Problems, match="its algorithm leaves no model") as caught:
        _product(products, "a.model", "c.config.model")
    assert caught.value.problem.name == "c.config.model"


@pytest.mark.parametrize(("metrics", "error", "checkpoint", "begins", "further"), [
    ({"trial_id": "a"}, None, None, False, False),  # it has not begun
    ({"training_iteration": 2}, None, None, True, True),
    ({"training_iteration": 2}, None, "saved", False, False),
    ({"trial_id": "a"}, ValueError(), None, True, True),  # in its first iteration
    ({"training_iteration": 2, "done": True}, None, None, False, True),
    ({"training_iteration": 2, "done": True}, ValueError(), None, True, True),
])  # fmt: skip
def test_trials_of_a_resumed_stage_that_begin_again(metrics, error, checkpoint, begins, further):
    trial = SimpleNamespace(metrics=metrics, error=error, checkpoint=checkpoint)
    assert _begins_again(trial, further=False) == begins
    assert _begins_again(trial, further=True) == further
