from __future__ import annotations

from types import SimpleNamespace

from rllib_llm.experiments.stages import last_saved


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
