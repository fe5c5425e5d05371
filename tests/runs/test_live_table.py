from __future__ import annotations

import io
import json
import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from rich.console import Console

from rllib_llm.overseer.phases import PAUSED
from rllib_llm.runs import live_table
from rllib_llm.runs.live_table import SILENT_S, LiveTable, TrialRow, places
from rllib_llm.runs.results import local_folder
from rllib_llm.shared.messages import MessageLog, TrialEar, TrialMessage


def trial(name: str, **params: object) -> SimpleNamespace:
    return SimpleNamespace(
        trial_id=name, status="", evaluated_params=params, config=dict(params), checkpoint=None
    )


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=110)


def result(iteration: int, **values: float) -> dict:
    return {"training_iteration": iteration, "episode": 10 * iteration, **values}


def rendered(table: LiveTable) -> str:
    out = Console(file=io.StringIO(), width=110)
    out.print(table.view())
    return out.file.getvalue()


def test_one_row_per_trial_with_the_settings_that_vary():
    table = LiveTable("ppo · PPOPtx", {"training_iteration": 4}, console(terminal=True))
    slow, fast = trial("a", lr=1e-5), trial("b", lr=1e-3)
    table.on_trial_start(0, [], slow)
    table.on_trial_result(fast, result(2, objective={"scores": 1.5, "kl": 0.25}))
    text = rendered(table)
    assert "lr=1e-05" in text and "lr=0.001" in text and "starting" in text
    row = next(line for line in text.splitlines() if "lr=0.001" in line)
    assert "2/4" in row and "20" in row and "1.500" in row and "0.250" in row


def test_markup_in_a_trial_s_values_is_text():
    table = LiveTable("ppo · PPOPtx", {}, console(terminal=True))
    table.on_trial_result(trial("a", template="<s>[/INST]"), result(1))
    assert "template=<s>[/INST]" in rendered(table)


def test_a_single_trial_carries_the_name_of_its_stage():
    table = LiveTable("sft · SFT", {}, console(terminal=True))
    assert "sft" in rendered(table)  # also before the trial starts
    table.on_trial_result(trial("a"), result(1, loss={"sft": 2.0}))
    assert "2.000" in rendered(table)
    table.on_trial_error(trial("a"))
    assert "failed" in rendered(table)


def test_a_full_row_fits_a_terminal_of_80_columns():
    table = LiveTable("ppo · PPOPtx", {"training_iteration": 100}, console(terminal=True))
    scores = {"objective": {"scores": -1.5, "kl": 12.25}, "env": {"gold_score": -2.5}}
    throughput = {"throughput": {"tokens_per_s": 12345.0}}
    table.on_trial_result(trial("a"), result(50, **scores, **throughput))
    out = Console(file=io.StringIO(), width=80)
    out.print(table.table())
    text = out.file.getvalue()
    assert "12,345" in text and "…" not in text.replace(" … ", "")  # … alone is an unknown ETA


def test_without_a_terminal_there_are_plain_lines_not_too_many():
    out = console(terminal=False)
    with LiveTable("sft · SFT", {"training_iteration": 9}, out) as table:
        for iteration in range(1, 10):
            table.on_trial_result(trial("a"), result(iteration, loss={"sft": 2.0}))
        table.on_trial_complete(trial("a"))
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 2  # the first and the last; those between came within ten seconds
    assert lines[0].startswith("sft  iteration 1/9  episodes 10  loss 2.000")
    assert lines[-1].endswith("done")


def test_a_held_out_result_of_an_earlier_iteration_says_of_which():
    table = LiveTable("sft · SFT", {"training_iteration": 3}, console(terminal=True))
    for made in (2, 0):
        held_out = {"eval": {"loss": 6.5, "iteration": made}}
        table.on_trial_result(trial("a"), result(2, loss={"sft": 2.0}, **held_out))
        assert ("6.500 (at 0)" in rendered(table)) == (made == 0)


def test_pairs_that_all_tie_have_no_accuracy():
    """Before the first step of DPO the policy is the reference."""
    table = LiveTable("dpo · DPO", {"training_iteration": 3}, console(terminal=True))
    for margin, accuracy in ((0.0, 0.0), (0.5, 0.9)):
        held_out = {"accuracy": accuracy, "rewards": {"margins": margin}, "iteration": 1}
        table.on_trial_result(trial("a"), result(1, loss={"dpo": 0.7}, eval=held_out))
        assert ("held-out accuracy" in rendered(table)) == (margin > 0)


def test_the_end_of_a_trial_is_one_line():
    out = console(terminal=False)
    with LiveTable("sft · SFT", {"training_iteration": 1}, out) as table:
        table.on_trial_result(trial("a"), result(1, loss={"sft": 2.0}, done=True))
        table.on_trial_complete(trial("a"))
    (line,) = out.file.getvalue().splitlines()
    assert line.endswith("loss 2.000  done")


def test_a_trial_that_a_scheduler_ended_early_is_stopped_not_done():
    out = console(terminal=False)
    with LiveTable("sft · SFT", {"training_iteration": 6}, out) as table:
        table.on_trial_result(trial("a"), result(4, loss={"sft": 2.0}, done=True))
        table.on_trial_complete(trial("a"))
    (line,) = out.file.getvalue().splitlines()
    assert "iteration 4/6" in line and line.endswith("stopped")


def test_a_trial_is_named_by_the_settings_it_was_started_with_last():
    table = LiveTable("pbt · PPOPtx", {}, console(terminal=True))
    mutated, other = trial("a", lr=1e-5, **{"env_config/x": 1}), trial("b", lr=1e-3)
    for one in (mutated, other):
        table.on_trial_start(0, [], one)
    mutated.config = {"lr": 2e-5, "env_config": {"x": 2}}
    assert "lr=1e-05, x=1" in rendered(table)
    table.on_trial_start(1, [], mutated)
    assert "lr=2e-05, x=2" in rendered(table) and "lr=1e-05" not in rendered(table)


def test_a_trial_that_goes_on_from_another_one_is_told_once():
    out = console(terminal=False)
    table = LiveTable("pbt · PPOPtx", {"training_iteration": 16}, out)
    worst, best = trial("a", lr=1e-5), trial("b", lr=1e-3)
    for one in (worst, best):
        one.storage = SimpleNamespace(trial_fs_path=f"/run/pbt/{one.trial_id}")
        table.on_trial_start(0, [worst, best], one)
    # As Tune's scheduler leaves the worse trial: with the other's checkpoint, and new settings.
    worst.checkpoint = SimpleNamespace(path="/run/pbt/b/checkpoint_000001")
    worst.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 8})
    worst.config = {"lr": 2e-3}
    table.on_trial_start(1, [worst, best], worst)
    table.on_trial_start(2, [worst, best], worst)  # again from there, after a failure
    assert out.file.getvalue().splitlines() == [
        "replaced: lr=1e-05 goes on from iteration 8 of lr=0.001, as lr=0.002"
    ]
    resumed = LiveTable("pbt · PPOPtx", {"training_iteration": 16}, out)
    resumed.on_trial_start(0, [worst, best], worst)
    assert out.file.getvalue().count("replaced") == 1


def test_tune_can_pickle_it_while_it_is_live():
    with LiveTable("sft · SFT", {}, console(terminal=True)) as table:
        assert isinstance(pickle.loads(pickle.dumps(table)), LiveTable)


def test_the_time_left_follows_the_pace_since_the_first_result():
    row = TrialRow("a", {"training_iteration": 10})
    row.update({"training_iteration": 2})
    assert row.eta_s() is None
    row._first = (row._last_time - 4.0, 0.2)  # as if the first result were 4 s old
    row.update({"training_iteration": 6})
    # 0.4 of the way in 4 s, 0.4 to go: 4 s more.
    assert abs(row.eta_s() - 4.0) < 0.5


def stored(name: str, folder: Path) -> SimpleNamespace:
    """A trial whose folder lies on this disk."""
    storage = SimpleNamespace(storage_filesystem=LocalFileSystem(), trial_fs_path=str(folder))
    return SimpleNamespace(
        trial_id=name,
        status="",
        evaluated_params={},
        config={},
        storage=storage,
        checkpoint=None,
    )


def test_warnings_of_the_trials_processes_are_printed_once(tmp_path):
    out = console(terminal=False)
    trials = [stored(name, tmp_path / name) for name in "ab"]
    with LiveTable("rl · GRPO", {}, out) as table:
        table.on_step_end(0, trials)
        for index, one in enumerate(trials):
            text = f"{index + 3} of the first 16 prompts are longer than max_prompt_len"
            MessageLog(tmp_path / one.trial_id).write([TrialMessage("trial", text, True)], 1)
        table._last_poll = 0.0
        table.on_step_end(1, trials)
    (line,) = out.file.getvalue().splitlines()
    assert line.startswith("warning: 3 of the first 16 prompts are longer")


def test_a_trial_without_a_result_shows_what_it_does(tmp_path):
    out = console(terminal=False)
    with LiveTable("rl · GRPO", {}, out) as table:
        table.on_step_end(0, [stored("a", tmp_path)])
        (row,) = table._rows.values()
        row._started -= SILENT_S + 1  # as if it had been silent for so long
        assert "waiting for its process, for 0:05" in rendered(table)  # SILENT_S + 1
        MessageLog(tmp_path).doing("sampling and judging 16 completions")
        assert "rl: sampling and judging 16 completions, for 0:00" in rendered(table)
        table._last_line = table._last_poll = -1000.0
        table.on_step_end(1, [stored("a", tmp_path)])
        assert "rl  sampling and judging 16 completions, for 0:0" in out.file.getvalue()
        table.on_trial_result(stored("a", tmp_path), result(1))
        assert "sampling" not in rendered(table)  # it has just been heard of


def test_what_a_trial_waits_for_is_told_where_the_cluster_says_it():
    def of(name: str, status: str, **bundle: float) -> SimpleNamespace:
        factory = SimpleNamespace(bundles=[bundle])
        return SimpleNamespace(trial_id=name, status=status, placement_group_factory=factory)

    def group(state: str, **bundle: float) -> dict:
        return {"state": state, "bundles": {0: bundle}}

    trials = [of("first", "PENDING", CPU=1, GPU=0), of("next", "PENDING", CPU=1)]
    trials += [
        of("runs", "RUNNING", CPU=1),
        of("big", "PENDING", CPU=9),
        of("over", "ERROR", CPU=9),
    ]
    groups = [group("CREATED", CPU=1.0), group("CREATED", CPU=1.0), group("PENDING", CPU=9.0)]
    known = places(trials, [*groups, group("REMOVED", CPU=1.0)])
    assert known == {"runs": True, "first": True, "next": False, "big": False}
    row = TrialRow("a", {})
    row._started -= SILENT_S + 1
    for has_place, text in ((None, "waiting for its process"), (True, "its process imports"),
                            (False, "waiting for CPUs or GPUs, of which")):  # fmt: skip
        row.place(has_place)
        assert row.waits_for().startswith(text)


def test_what_a_trial_waits_for_has_a_time_of_its_own(monkeypatch):
    """Complaint: it waited for CPUs for three minutes, and then imported for as long at once."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(
        live_table, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    )
    row = TrialRow("a", {})
    row.place(False)
    clock.now += 90.0
    row.place(False)
    assert row.waits_for().endswith("has not enough free, for 1:30")
    row.place(True)
    clock.now += 5.0
    assert row.waits_for() == "its process imports libraries, for 0:05"


def test_what_a_process_before_this_one_did_is_past(tmp_path):
    MessageLog(tmp_path).doing("learning")
    os.utime(tmp_path / "doing_now.txt", (1e9, 1e9))  # killed long ago
    with LiveTable("rl · GRPO", {}, console(terminal=False)) as table:
        table.on_trial_start(0, [], stored("a", tmp_path))
        table.on_step_end(0, [stored("a", tmp_path)])
        (row,) = table._rows.values()
        row._started -= SILENT_S + 1
        assert "waiting for its process, for 0:05" in rendered(table)


def test_a_sign_that_something_is_wrong_is_told_once():
    out = console(terminal=False)
    with LiveTable("rl · GRPO", {}, out) as table:
        for iteration in range(1, 7):
            objective = {"scores": 1.0, "scores_std": 0.0}
            table.on_trial_result(trial("a"), result(iteration, objective=objective))
    told = [line for line in out.file.getvalue().splitlines() if line.startswith("look:")]
    assert len(told) == 1
    assert told[0].startswith("look: rl, iteration 3: every completion gets the same reward, 1,")


def test_a_sign_compares_with_the_first_results_also_after_a_resume(tmp_path):
    out = console(terminal=False)
    with (tmp_path / "result.json").open("w") as file:
        for iteration in range(1, 6):
            row = result(iteration, policy={"entropy_avg": 2.0 - 0.1 * iteration})
            file.write(json.dumps(row) + "\n")
    table = LiveTable("rl · GRPO", {}, out)
    for iteration in range(6, 10):
        values = {"entropy_avg": 0.3 / iteration}
        table.on_trial_result(stored("a", tmp_path), result(iteration, policy=values))
    assert "the entropy fell from 1.9 to 0.037 nats per token" in out.file.getvalue()


def test_of_many_trials_that_wait_the_first_are_told():
    out = console(terminal=False)
    with LiveTable("rl · GRPO", {}, out) as table:
        trials = [trial(f"t{index}", lr=index) for index in range(9)]
        for one in trials:
            table.on_trial_start(0, trials, one)
            table._rows[one.trial_id]._started -= SILENT_S + 6
        table._last_line = table._last_poll = -1000.0
        table.on_step_end(1, trials)
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 4 and lines[0].startswith("lr=0  waiting for its process, for 0:1")
    assert lines[3] == "and 6 further trials"


def test_a_warning_that_was_told_before_is_not_told_again():
    out = console(terminal=False)
    table = LiveTable("rl · GRPO", {}, out, ["A warning of a setting."])
    table.warn("A warning of a setting.")
    table.warn("another")
    assert out.file.getvalue() == "warning: another\n"


def test_warnings_of_a_trial_whose_results_go_to_a_url_are_heard(tmp_path):
    """Its process writes on this machine; Tune uploads what it wrote from time to time."""
    storage = SimpleNamespace(
        storage_filesystem=SubTreeFileSystem("/", LocalFileSystem()), trial_fs_path="bucket/a",
        trial_working_directory=str(tmp_path),
    )  # fmt: skip
    table = LiveTable("ppo", {}, console(terminal=False))
    far = trial("a")
    far.storage = storage
    table.on_trial_start(0, [far], far)
    table.on_step_end(0, [far])
    log = MessageLog(tmp_path)
    log.write([TrialMessage("trial", "prompts are cut", True)], 1)
    log.doing(f"{PAUSED}: rllib resume goes on")
    table.__exit__()
    assert "warning: prompts are cut" in table._console.file.getvalue()
    assert TrialEar(local_folder(far)).activity()[0].startswith(PAUSED)  # so it is not killed
