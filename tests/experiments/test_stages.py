from __future__ import annotations

from types import SimpleNamespace

from rllib_llm.experiments.stages import stopped_text


def test_who_stops_a_stage_is_told_what_it_goes_on_from():
    def trial(*iterations: int) -> SimpleNamespace:
        saved = [(object(), {"training_iteration": iteration}) for iteration in iterations]
        return SimpleNamespace(best_checkpoints=saved)

    assert "it will begin anew. With --checkpoint-freq" in stopped_text("ppo", [trial()])
    assert stopped_text("pbt", [trial(5, 10), trial(8, 4), trial()]) == (
        "pbt was stopped before its end; its last checkpoint: iteration 10, 8, none."
    )
