from __future__ import annotations

import json

import pytest

from rllib_llm.runs.results import (
    before_and_after,
    fresh_series,
    read_json_lines,
    read_results,
    series,
)
from rllib_llm.shared.storage import new_lines


def test_results_are_flat_and_an_unfinished_last_line_is_left_out(tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"a": {"b": 1}}) + "\n" + '{"a": {"b": 2', encoding="utf-8")
    assert read_results(tmp_path) == [{"a/b": 1}]
    assert read_json_lines(tmp_path / "absent.jsonl") == []


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    file = tmp_path / "result.json"
    file.write_text('{"a": \n{"a": 1}\n', encoding="utf-8")
    with pytest.raises(json.JSONDecodeError):
        read_results(tmp_path)


def test_series_leave_out_what_is_no_number():
    results = [{"x": 1, "y": 2}, {"x": 2, "y": float("nan")}, {"x": 3}, {"x": 4, "y": 5}]
    assert series(results, "x", "y") == ([1.0, 4.0], [2.0, 5.0])


def test_evaluations_count_once_and_the_first_stands_before_training():
    made = [(1, 0, 0.1), (2, 0, 0.1), (3, 3, 0.7), (4, 3, 0.7), (5, 5, 0.7)]
    results = [
        {"episode": 10 * i, "training_iteration": i, "eval/iteration": at, "eval/scores": score}
        for i, at, score in made
    ]
    assert fresh_series(results, "episode", "eval/scores") == ([0.0, 30.0, 50.0], [0.1, 0.7, 0.7])


def test_without_the_iteration_of_an_evaluation_a_changed_value_is_new():
    results = [
        {"episode": 10 * i, "training_iteration": i, "eval/loss": loss}
        for i, loss in [(1, 6.0), (2, 6.0), (3, 4.0)]
    ]
    assert fresh_series(results, "episode", "eval/loss") == ([0.0, 30.0], [6.0, 4.0])


def test_completions_are_matched_by_prompt_first_against_last_evaluation():
    def row(iteration: int, index: int, split: str = "eval") -> dict:
        completion = f"{iteration}.{index}"
        return {
            "iteration": iteration,
            "split": split,
            "prompt_index": index,
            "completion": completion,
        }

    samples = [row(0, 2), row(0, 1), row(1, 1, "train"), row(5, 1), row(9, 1), row(9, 2), row(9, 3)]
    pairs = before_and_after(samples)
    assert [(a["completion"], b["completion"]) for a, b in pairs] == [
        ("0.1", "9.1"),
        ("0.2", "9.2"),
    ]
    assert before_and_after([row(0, 1)]) == []


def test_new_rows_are_read_once_and_whole(tmp_path):
    file = tmp_path / "rows"
    assert new_lines(file, 0) == ([], 0)
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"', encoding="utf-8")
    assert new_lines(file, 0) == (['{"a": 1}', '{"a": 2}'], 18)
    assert new_lines(file, 18) == ([], 18)
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n', encoding="utf-8")
    assert new_lines(file, 18) == (['{"a": 3}'], 27)


def test_rows_that_replace_known_ones_do_not_tear_new_ones(tmp_path):
    """A trial that starts again cuts its file back, and goes on writing."""
    file = tmp_path / "rows"
    file.write_text('{"a": 1}\n', encoding="utf-8")
    assert new_lines(file, 27) == ([], 9)
    file.write_text('{"a": 10}\n{"a": 2}\n', encoding="utf-8")
    assert new_lines(file, 9) == (['{"a": 2}'], 19)
