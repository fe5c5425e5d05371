"""A run that was killed goes on from what lies in its trials' folders: Tune's record of them is of
some seconds before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.train._internal.storage import StorageContext
from ray.tune import Checkpoint, CheckpointConfig, PlacementGroupFactory
from ray.tune.experiment import Trial

from rllib_llm.checkpoints.folder import write_manifest
from rllib_llm.runs.trial_checkpoints import UseFailureCheckpoints, note_saved
from rllib_llm.shared.ray_compat import training_result, trial_of_record


@pytest.fixture
def stage(tmp_path) -> Path:
    return tmp_path / "stage"


def save(trial: Path, number: int) -> None:
    """A checkpoint of iteration `number + 1`, after 10 seconds for each."""
    folder = trial / f"checkpoint_{number:06d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"{number}")
    write_manifest(folder, {"training_iteration": number + 1, "time_total_s": 10.0 * (number + 1)})


def record(stage: Path, numbers: list[int], own: str = "t") -> None:
    """Tune's record of a trial "t" with these checkpoints, which lie in the folder `own`."""
    storage = StorageContext(str(stage.parent), stage.name, trial_dir_name="t")
    trial = Trial("counter", stub=True, storage=storage)
    trial.placement_group_factory = PlacementGroupFactory([{"CPU": 1}])
    trial.run_metadata.checkpoint_manager._checkpoint_config = CheckpointConfig(num_to_keep=3)
    for number in numbers:
        checkpoint = Checkpoint.from_directory(str(stage / own / f"checkpoint_{number:06d}"))
        trial.on_checkpoint(training_result(checkpoint, {"training_iteration": number + 1}))
    states = {"trial_data": [trial.get_json_state()], "stats": {"start_time": 1}}
    (stage / "experiment_state-2026-01-01_00-00-00.json").write_text(json.dumps(states))


def known(stage: Path) -> tuple[list[tuple[str, dict]], int]:
    """The checkpoints in the record with their results, the last of which a trial goes on from, and
    the number of the newest name."""
    (file,) = stage.glob("experiment_state-*.json")
    written = json.loads(file.read_text())
    assert written["stats"] == {"start_time": 1}
    trial = trial_of_record(written["trial_data"][0])
    manager = trial.run_metadata.checkpoint_manager
    assert manager.checkpoint_config == CheckpointConfig(num_to_keep=3)
    kept = [(Path(one.checkpoint.path).name, one.metrics) for one in manager._checkpoint_results]
    assert not kept or trial.checkpoint.path == str(stage / "t" / kept[-1][0])
    return kept, trial.storage.current_checkpoint_index


def test_checkpoints_that_the_record_does_not_know_are_gone_on_from(stage):
    record(stage, [0, 1])
    for number in (2, 3, 4):  # the first two are deleted already
        save(stage / "t", number)
    row = {"training_iteration": 4, "time_total_s": 40.0, "env_runners": {"reward": 0.5}}
    (stage / "t" / "result.json").write_text(json.dumps(row) + "\n")
    unfinished = stage / "t" / "checkpoint_000005"
    unfinished.mkdir()
    (unfinished / "weights").write_text("5")
    note_saved(stage)
    assert known(stage) == (
        [
            ("checkpoint_000002", {"training_iteration": 3, "time_total_s": 30.0}),
            ("checkpoint_000003", row),
            ("checkpoint_000004", {"training_iteration": 5, "time_total_s": 50.0}),
        ],
        4,  # the next is the one that was not finished
    )


def test_a_damaged_one_is_not_gone_on_from(stage):
    record(stage, [0])
    save(stage / "t", 0)
    save(stage / "t", 1)
    (stage / "t" / "checkpoint_000001" / "weights").write_text("cut off")
    note_saved(stage)
    assert known(stage) == ([("checkpoint_000000", {"training_iteration": 1})], 0)


def test_names_are_not_taken_twice(stage):
    """As where Tune counts fewer than there are: an older one of the same name is deleted later,
    and with it the newer one's folder."""
    record(stage, [3])
    assert known(stage)[1] == 0
    save(stage / "t", 3)
    note_saved(stage)
    assert known(stage) == ([("checkpoint_000003", {"training_iteration": 4})], 3)


def test_a_record_that_is_right_stays_as_it_is(stage):
    for own in ("t", "other"):  # a trial of population-based training goes on from another's
        record(stage, [0, 1], own)
        save(stage / own, 0)
        save(stage / own, 1)
        (file,) = stage.glob("experiment_state-*.json")
        before = file.read_text()
        note_saved(stage)
        assert file.read_text() == before


def test_what_tune_was_to_do_after_a_save_that_failed_is_not_done_later(stage):
    """A trial that had failed while saving was to stop after that: restored, it stopped after its
    next checkpoint, at 2 iterations of 8, as if it had reached its end."""
    record(stage, [0])
    save(stage / "t", 0)
    (file,) = stage.glob("experiment_state-*.json")
    pending = {"_cached_trial_decisions": {"t": "STOP"}, "_queued_trial_decisions": {}}
    written = {**json.loads(file.read_text()), "runner_data": {**pending, "_metric": "reward"}}
    file.write_text(json.dumps(written))
    note_saved(stage)
    assert json.loads(file.read_text())["runner_data"] == {"_metric": "reward"}


def test_a_later_start_that_found_the_disk_full_is_passed_over(stage):
    record(stage, [0])
    save(stage / "t", 0)
    (stage / "t" / "error.pkl").touch()
    whole = {file.name for file in stage.iterdir()}
    for name in ("experiment_state-2026-01-02_00-00-00.json",
                 "basic-variant-state-2026-01-02_00-00-00.json",
                 "callback-states-2026-01-02_00-00-00.pkl"):  # fmt: skip
        (stage / name).touch()
    note_saved(stage)
    assert {file.name for file in stage.iterdir()} == whole
    assert not (stage / "t" / "error.pkl").exists()
    (stage / "searcher-state-2026-01-01_00-00-00.pkl").touch()  # of the only start
    with pytest.raises(EOFError):
        note_saved(stage)


def test_tune_restored_without_us_knows_what_the_killed_run_had_saved(stage):
    """`Tuner.restore` alone reads the record as it is. The next checkpoint then deleted one that
    was gone: Tune logged a whole result as an error, and counted no further."""
    record(stage, [0, 1, 2])
    for number in (2, 3, 4):  # the first two are deleted already
        save(stage / "t", number)
    (file,) = stage.glob("experiment_state-*.json")
    trial = trial_of_record(json.loads(file.read_text())["trial_data"][0])
    callback = UseFailureCheckpoints()
    callback.on_step_begin(iteration=0, trials=[trial])
    manager = trial.run_metadata.checkpoint_manager
    names = [Path(one.checkpoint.path).name for one in manager.best_checkpoint_results]
    assert names == [f"checkpoint_{number:06d}" for number in (2, 3, 4)]
    assert trial.storage.current_checkpoint_index == 4

    save(stage / "t", 5)
    newest = Checkpoint.from_directory(str(stage / "t" / "checkpoint_000005"))
    trial.on_checkpoint(training_result(newest, {"training_iteration": 6}))
    assert not (stage / "t" / "checkpoint_000002").exists()
    callback.on_step_begin(iteration=1, trials=[])  # Tune counts itself from now on
    assert trial.storage.current_checkpoint_index == 5


KILLED = """
import os, signal, sys
from pathlib import Path
import ray
from ray import tune
from rllib_llm import default_callbacks
from rllib_llm.checkpoints.folder import write_manifest

class Counter(tune.Trainable):
    def setup(self, config):
        self.count = 0
    def step(self):
        self.count += 1
        return {"count": self.count}
    def save_checkpoint(self, folder):
        with open(folder + "/count", "w") as file:
            file.write(str(self.count))
        write_manifest(Path(folder), {"training_iteration": self.count, "time_total_s": 0.0})
    def load_checkpoint(self, folder):
        self.count = int(open(folder + "/count").read())

class Killed(tune.Callback):
    def on_trial_result(self, trial, result, **info):
        if sys.argv[2] == "kill" and result["count"] == 6:
            os.kill(os.getpid(), signal.SIGKILL)

os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "3600"
folder = sys.argv[1]
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
if sys.argv[2] == "kill":
    run = tune.RunConfig(
        name="run", storage_path=folder, stop={"count": 9},
        callbacks=[*default_callbacks(), Killed()],
        checkpoint_config=tune.CheckpointConfig(num_to_keep=2, checkpoint_frequency=1),
    )
    tuner = tune.Tuner(Counter, run_config=run)
else:
    tuner = tune.Tuner.restore(folder + "/run", trainable=Counter)
(result,) = tuner.fit()
print("COUNT", result.metrics["count"], result.checkpoint.path)
"""


@pytest.mark.slow  # two runs in processes of their own
def test_tuner_restore_after_a_kill_logs_no_error(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def run(how: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(script), str(tmp_path), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=500)

    assert run("kill").returncode == -signal.SIGKILL
    restored = run("restore")
    assert "COUNT 9" in restored.stdout, restored.stderr[-2000:]
    assert "Error handling checkpoint" not in restored.stdout + restored.stderr
    kept = sorted(path.name for path in tmp_path.glob("run/Counter*/checkpoint_0*"))
    assert kept == ["checkpoint_000007", "checkpoint_000008"]
