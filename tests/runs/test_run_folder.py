"""Folders of runs: each start has one of its own, and a resumed run is the one that was started."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.results import StageResult
from rllib_llm.runs.run_folder import (
    continue_run,
    new_folder,
    resumed_folder,
    set_aside,
)
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.run_layout import RUN_RECORD, RunFolder
from rllib_llm.shared.storage import UrlPath

FILE, OTHER = "/a/x.yaml", "/b/x.yaml"


def sft(**changes) -> Experiment:
    given = {"run": "SFT", "config": {"lr": 1e-3, "optimiser": {"grad_clip": 1.0}}}
    return Experiment("sft", **{**given, "stop": {"training_iteration": 5}, **changes})


def ppo(**changes) -> Experiment:
    return Experiment("ppo", **{"run": "PPOPtx", "config": {"model": "${sft.model}"}, **changes})


def resumed(root, name, chosen, source, experiments):
    folder = resumed_folder(root, name, chosen, source)
    continue_run(folder, source, experiments)
    return folder


def test_two_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "2026-01-01_00-00-00")

    def start(_):
        return new_folder(tmp_path, "x", None, FILE, [sft()])

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(start, range(8)))
    assert sorted(folder.name for folder in folders) == sorted(
        ["x_2026-01-01_00-00-00", *(f"x_2026-01-01_00-00-00_{n}" for n in range(2, 9))]
    )
    assert all(
        json.loads((folder / RUN_RECORD).read_text())["source"] == FILE for folder in folders
    )


@pytest.mark.parametrize("round_", range(5))
def test_two_runs_that_start_in_one_second_at_a_url_do_not_share_a_folder(
    tmp_path, monkeypatch, round_
):
    monkeypatch.setattr("time.strftime", lambda form: "2026-01-01_00-00-00")
    root = UrlPath(tmp_path.as_uri())  # the files of this machine, as a store of objects
    begin = threading.Barrier(8)

    def start(number):
        begin.wait()
        return new_folder(root, "x", None, f"/{number}.yaml", [sft()])

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(start, range(8)))
    for number, folder in enumerate(folders):
        assert json.loads((folder / RUN_RECORD).read_text())["source"] == f"/{number}.yaml"
        assert [each.name for each in folder.iterdir()] == [RUN_RECORD]
        assert folder.name.startswith("x_2026-01-01_00-00-00")
        found = resumed(root, "x", None, f"/{number}.yaml", [sft()])
        assert found.name == folder.name


def test_a_chosen_folder_at_a_url_is_taken_once(tmp_path):
    root = UrlPath(tmp_path.as_uri())
    new_folder(root, "x", "mine", FILE, [sft()])
    with pytest.raises(Problems, match="experiment_name='mine' must be new"):
        new_folder(root, "x", "mine", FILE, [sft()])


def test_the_newest_run_of_the_same_file_is_resumed_not_of_another_of_its_name(tmp_path):
    for name, source in (
        ("x_2026-01-01_00-00-00", FILE),
        ("x_2026-01-02_00-00-00", FILE),
        ("x_2026-01-03_00-00-00", OTHER),
        ("x_2_2026-01-04_00-00-00", FILE),
    ):
        new_folder(tmp_path, "x", name, source, [sft()])  # fmt: skip
    found = resumed(tmp_path, "x", None, FILE, [sft()])
    assert found.name == "x_2026-01-02_00-00-00"
    with pytest.raises(Problems, match=r"a run .* of /c/x.yaml must .*\(of /b/x.yaml"):
        resumed(tmp_path, "x", None, "/c/x.yaml", [sft()])
    with pytest.raises(Problems, match="a run 'y' of .* must lie in"):
        resumed(tmp_path, "y", None, "/y.yaml", [sft()])
    new_folder(tmp_path, "z", "mine", "/z.yaml", [sft()])
    with pytest.raises(Problems, match="other runs there: mine. Check --experiment-name"):
        resumed(tmp_path, "z", None, "/z.yaml", [sft()])
    # The user's word counts: the file may have been moved.
    named = resumed(tmp_path, "x", "x_2026-01-03_00-00-00", FILE, [sft()])
    assert json.loads((named / RUN_RECORD).read_text())["source"] == OTHER


def test_a_setting_that_would_not_take_effect_is_refused_by_name(tmp_path):
    folder = new_folder(tmp_path, "x", "run", FILE, [sft(), ppo()])
    (folder / "sft").mkdir()  # nothing was saved: it begins again, with what is asked for now
    resumed(tmp_path, "x", "run", FILE, [sft(config={"lr": 3e-3}), ppo()])
    resumed(tmp_path, "x", "run", FILE, [sft(), ppo()])
    (folder / "sft" / "trial" / "checkpoint_000000").mkdir(parents=True)
    changed = sft(config={"lr": 2e-3, "optimiser": {"grad_clip": 2.0}}, num_samples=3)
    with pytest.raises(Problems) as caught:
        resumed(tmp_path, "x", "run", FILE, [changed, ppo()])
    assert [(problem.name, problem.rule, problem.value) for problem in caught.value.found] == [
        ("sft.config.lr", "be 0.001", 2e-3), ("sft.config.optimiser.grad_clip", "be 1.0", 2.0),
        ("sft.num_samples", "be 1", 3),
    ]  # fmt: skip
    with pytest.raises(Problems, match="sft must be among the experiments: it has begun"):
        resumed(tmp_path, "x", "run", FILE, [ppo(config={})])


def test_what_has_not_begun_and_what_a_resumed_run_takes_anew_may_change(tmp_path):
    folder = new_folder(tmp_path, "x", "run", FILE, [sft(), ppo()])
    (folder / "sft" / "trial" / "checkpoint_000000").mkdir(parents=True)
    more = sft(stop={"training_iteration": 9}, max_failures=2, pass_criteria={"eval/loss": 0})
    resumed(tmp_path, "x", "run", FILE, [more, ppo(config={"lr": 1.0})])
    # What was asked for last is what the next start is compared with.
    recorded = json.loads((folder / RUN_RECORD).read_text())["experiments"]
    assert recorded[0]["stop"] == {"training_iteration": 9}
    assert recorded[1]["config"] == {"lr": 1.0}


def test_an_ended_stage_goes_no_further_once_a_later_one_has_begun(tmp_path):
    folder = new_folder(tmp_path, "x", "run", FILE, [sft(), ppo()])
    (folder / "sft").mkdir()
    stop = {"training_iteration": 5}
    StageResult(
        "sft", "SFT", folder / "sft", [], [], 0, None, None, {"training_iteration": 5.0}, stop
    ).save()
    longer = [sft(stop={"training_iteration": 9}), ppo()]
    continue_run(folder, "a.yaml", longer)  # it goes on
    (folder / "ppo" / "trial" / "checkpoint_000000").mkdir(parents=True)
    with pytest.raises(Problems, match=r"sft.stop=.*9.* must be .*5.*: ppo has begun"):
        continue_run(folder, "a.yaml", longer)


def test_what_begins_again_is_kept_where_no_command_takes_it_for_a_part_of_the_run(tmp_path):
    stage = tmp_path / "run" / "sft"
    for name in ("one", "two"):
        (stage / name / "rollouts").mkdir(parents=True)
        (stage / name / "result.json").write_text("{}")
        (stage / name / "rollouts" / ".store.json").write_text("{}")
    (stage / "nothing").mkdir()
    kept = tmp_path / "run" / "replaced"
    assert set_aside(stage, [stage / "one", stage / "nothing"]) == (
        f" Its files so far are in {str(kept / 'sft_1')!r}."
    )
    assert (kept / "sft_1" / "one" / "result.json").is_file()
    assert [path.name for path in stage.iterdir()] == ["two"]
    assert set_aside(stage, [stage]) == f" Its files so far are in {str(kept / 'sft_2')!r}."
    assert (kept / "sft_2" / "two" / "result.json").is_file() and not stage.exists()
    found = RunFolder(tmp_path / "run")
    assert not found.in_trials("result.json") and not found.in_trials("rollouts/.store.json")
    stage.mkdir()
    assert set_aside(stage, [stage]) == "" and not stage.exists()


def test_what_begins_again_at_a_url_is_said_to_be_removed(tmp_path):
    (tmp_path / "sft" / "one").mkdir(parents=True)
    stage = UrlPath((tmp_path / "sft").as_uri())
    assert set_aside(stage, [stage]) == f" Removed: {stage}."
    assert not (tmp_path / "sft").exists()
