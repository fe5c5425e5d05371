"""Population-based training on a scripted Tune: what a resumed run waits for. Tune's own scheduler
perturbs one iteration after the checkpoint, and chooses nobody to run after that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.search_space import make_scheduler


class Trial:
    """As much of Tune's `Trial` as the scheduler reads."""

    def __init__(self, saved_at: int | None):
        self.status = "PENDING"
        self.config = {"lr": 0.1}
        self.experiment_tag = "0"
        keeps = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.run_metadata = SimpleNamespace(checkpoint_manager=keeps)
        self.iteration = saved_at or 0
        self.latest_checkpoint_result = (
            None if saved_at is None else SimpleNamespace(metrics={"training_iteration": saved_at})
        )

    def is_finished(self) -> bool:
        return False


def pauses(trials: list[Trial], until: int) -> list[list[int]]:
    """The iterations at which each trial was paused on its way to `until`."""
    scheduler = make_scheduler(
        Experiment(
            "a", "PPOPtx", scheduler="pbt",
            scheduler_config={
                "time_attr": "training_iteration", "perturbation_interval": 8, "synch": True,
                "quantile_fraction": 0, "metric": "score", "mode": "max",
                "hyperparam_mutations": {"lr": [0.1, 0.2]},
            },
        )
    )  # fmt: skip
    tune = SimpleNamespace(
        search_alg=None, get_trials=lambda: list(trials), get_live_trials=lambda: list(trials)
    )
    for trial in trials:
        scheduler.on_trial_add(tune, trial)
    paused: dict[Trial, list[int]] = {trial: [] for trial in trials}
    while any(trial.iteration < until for trial in trials):
        trial = scheduler.choose_trial_to_run(tune)
        assert trial is not None, f"they wait for ever, at {[t.iteration for t in trials]}"
        trial.status = "RUNNING"
        decision = "CONTINUE"
        while decision == "CONTINUE":
            trial.iteration += 1
            result = {"training_iteration": trial.iteration, "score": 1.0}
            decision = scheduler.on_trial_result(tune, trial, result)
        trial.status = "PAUSED"
        paused[trial].append(trial.iteration)
    return list(paused.values())


@pytest.mark.parametrize(
    ("saved_at", "expected"),
    [
        ([None, None, None], [[8, 16, 24, 32]] * 3),  # a run that was never stopped
        ([16, 16, 16], [[24, 32]] * 3),
        ([24, 24, 20], [[32]] * 2 + [[24, 32]]),
        ([19, 21, 17], [[24, 32]] * 3),
    ],
)
def test_trials_meet_at_the_intervals_also_after_a_resume(saved_at, expected):
    assert pauses([Trial(iteration) for iteration in saved_at], until=32) == expected


def test_perturbed_values_stay_in_their_ranges():
    """Five times 1.2 leave each of these ranges, and top_p=1.2 ends a trial."""
    mutations = {
        "top_p": {"uniform": [0.8, 1.0]}, "num_epochs": {"randint": [1, 3]}, "lr": [0.1, 0.2],
        "env_config": {"weight": {"uniform": [1.0, 1.1]}},
    }  # fmt: skip
    scheduler = make_scheduler(
        Experiment(
            "a", "PPOPtx", metric="score", mode="max", scheduler="pbt",
            scheduler_config={"resample_probability": 0.0, "hyperparam_mutations": mutations},
        )
    )  # fmt: skip
    trial = Trial(None)
    trial.config = {
        "top_p": 0.9, "num_epochs": 2, "lr": 0.1, "env_config": {"weight": 1.05, "other": 7}
    }  # fmt: skip
    seen: set[float] = set()
    for _ in range(50):
        trial.config, _ = scheduler._get_new_config(trial, trial)
        seen.add(trial.config["top_p"])
        assert 0.8 <= trial.config["top_p"] <= 1.0
        assert trial.config["num_epochs"] in (1, 2) and trial.config["lr"] in (0.1, 0.2)
        assert 1.0 <= trial.config["env_config"]["weight"] <= 1.1
    assert {0.8, 1.0} <= seen and trial.config["env_config"]["other"] == 7
