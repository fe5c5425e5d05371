"""The account of killed and stopped processes: by hand, and of a short run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runs.chaos_account import kill_account, prompt_account, token_account

ROOT = Path(__file__).resolve().parents[1]


def handed_out(num_prompts=2):
    return {"event": "handed_out", "num_prompts": num_prompts}


def completed(rows):
    return {"event": "completed", "rows": list(rows)}


def updated(version, rows):
    return {"event": "updated", "version": version, "rows": list(rows)}


def test_prompts_of_a_run_that_went_back_once():
    # 2 prompts of 3 completions an iteration. The driver died while the second batch was learnt
    # from, and again after its update; each time a new one began with the first checkpoint.
    events = [
        handed_out(),
        completed(range(6)),
        updated(1, range(6)),
        handed_out(),
        completed(range(6, 12)),
        handed_out(),
        completed(range(6, 12)),
        updated(2, range(6, 12)),
        handed_out(),
        completed(range(6, 12)),
        updated(2, [11, 10, 9, 8, 7, 6]),
        handed_out(),
        completed(range(12, 18)),
        updated(3, range(12, 18)),
        handed_out(),
    ]
    assert prompt_account(events, 3, num_prompts=2, num_completions=3) == {
        "handed_out": 12, "completed": 10, "trained": 8, "kept": 6, "returned": 6,
        "violations": [],
    }  # fmt: skip


@pytest.mark.parametrize("updates, said", [
    ([updated(1, range(6))], "iteration 2 was never learnt from"),
    ([updated(1, range(6)), updated(2, range(6))], "iteration 2 learnt from rows [0, 1, 2"),
    ([updated(1, range(6)), updated(2, range(6, 11))], "rows [6, 7, 8, 9, 10]"),  # half a group
    ([updated(1, range(6)), updated(2, [6, 6, 7, 8, 9, 10, 11])], "rows [6, 6, 7"),
])  # fmt: skip
def test_what_is_lost_or_learnt_twice_is_named(updates, said):
    (violation,) = prompt_account(updates, 2, num_prompts=2, num_completions=3)["violations"]
    assert said in violation


def test_tokens_that_do_not_add_up_are_named():
    told = {"event": "tokens", "time": 1.0, "tokens_generated": 10, "tokens_trained": 6,
            "tokens_rejected": 3, "tokens_carried": 1, "rejected/late": 2}  # fmt: skip
    sums = {name: told[name] for name in told if name not in ("event", "time")}
    assert token_account([told]) == {**sums, "violations": []}
    lost = {**told, "time": 2.0, "tokens_carried": 0}
    assert token_account([told, lost, {**told, "time": 3.0}])["violations"] == [2.0]
    assert token_account([]) == {}


def test_time_lost_is_shared_by_kills_at_once():
    def step(time, version, pid=1):
        return {"event": "iteration", "time": time, "version": version, "pid": pid}

    def kill(time, version, what):
        return {"time": time, "version": version, "what": what}

    events = [step(10, 1), step(12, 2), step(14, 3), step(30, 4), step(32, 5), step(50, 5, pid=2),
              step(52, 6, pid=2), step(54, 7, pid=2)]  # fmt: skip
    kills = [
        kill(15, 3, "sampler killed"),  # 4 comes at 30
        kill(33, 5, "driver killed"),
        kill(40, 5, "sampler killed"),
    ]  # 6 comes at 52
    found = kill_account(events, kills)
    # Usually 2 s: lost are 30 - 15 - 2 = 13, and 52 - 33 - 2 = 17 for two.
    assert found == {
        "usual_iteration_seconds": 2,
        "by_kind": {
            "driver killed": {"count": 1, "median_seconds_lost": 8.5, "max_seconds_lost": 8.5},
            "sampler killed": {"count": 2, "median_seconds_lost": 10.8, "max_seconds_lost": 13.0},
        },
    }


@pytest.mark.slow
def test_a_short_run_in_which_processes_are_killed_and_stopped(tmp_path):
    """In a process of its own: it starts its own Ray, and the signals go to that one's actors."""
    import json

    out = tmp_path / "account.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.runs.chaos", "--kills", "2", "--seed", "26",
         "--out", out],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    account = json.loads(out.read_text())
    assert account["error"] == "" and account["kills"] == 2
    assert account["prompts"]["violations"] == []
    assert account["same_weights_as_undisturbed"]
