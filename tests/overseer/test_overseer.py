from __future__ import annotations

import json
import re
import stat
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.overseer.phases import FOR_COMPLETIONS
from rllib_llm.overseer.service import (
    SILENT_SECONDS,
    NoOverseerError,
    Overseer,
    OverseerServer,
    find_run,
)
from rllib_llm.shared.errors import Problems
from tests.cli.said import said


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def trial(incarnation: str = "one", **more) -> dict:
    return {"part": "trial t", "kind": "trial", "trial": "t", "incarnation": incarnation,
            "pid": 1, "node": "n", "iteration": 3, "phase": "learning", "activity": "learning",
            "seconds_in_phase": 2.0, "seconds": {"learning": 2.0},
            "recent_seconds": {"learning": 2.0}, **more}  # fmt: skip


def sampler(**more) -> dict:
    return {"part": "sampler 1 of trial t", "kind": "sampler", "trial": "t", "incarnation": "s",
            "pid": 2, "node": "n", "version": 3, "phase": "generating",
            "activity": "generating for prompts 812-815, 380 of 512 tokens",
            "seconds_in_phase": 41.0, "seconds": {"generating": 41.0}, **more}  # fmt: skip


def test_a_command_is_told_until_it_is_answered():
    overseer = Overseer(Clock())
    assert overseer.report(trial()) == []
    (given,) = overseer.command("scale", {"samplers": 2})
    number = given["id"]
    for _ in range(2):  # an answer may be lost
        (told,) = overseer.report(trial())
        assert (told["id"], told["name"], told["arguments"]) == (number, "scale", {"samplers": 2})
    answer = {"id": number, "state": "done", "answer": "2 samplers instead of 1"}
    assert overseer.report(trial(answers=[answer])) == []
    (found,) = overseer.commands([number])
    assert (found["state"], found["answer"]) == ("done", "2 samplers instead of 1")


def test_a_process_that_was_started_again_is_not_told_what_the_one_before_was():
    overseer = Overseer(Clock())
    overseer.report(trial())
    (given,) = overseer.command("stop")
    assert overseer.report(trial(incarnation="two")) == []
    assert overseer.commands([given["id"]])[0]["state"] == "refused"


def test_commands_go_to_trials_that_are_alive():
    clock = Clock()
    overseer = Overseer(clock)
    overseer.report(trial())
    overseer.report(sampler())
    clock.now += SILENT_SECONDS + 1
    assert overseer.command("pause") == []
    assert [part["is_silent"] for part in overseer.status()["parts"]] == [True, True]
    assert not overseer.health()["ok"]
    overseer.report(trial())
    overseer.leave("sampler 1 of trial t")
    assert overseer.health() == {"ok": True, "parts": 1, "silent": []}
    assert len(overseer.command("pause")) == 1


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("explode", {}, "command='explode' must be one of"),
    ("scale", {}, "samplers=None must be a whole number"),
    ("scale", {"samplers": 0}, "samplers=0 must be"),
    ("pause", {"samplers": 2}, "must be left out"),
])  # fmt: skip
def test_other_commands_are_refused(name, arguments, message):
    with pytest.raises(Problems, match=message):
        Overseer(Clock()).command(name, arguments)


@pytest.fixture
def served(tmp_path: Path):
    overseer = Overseer()
    server = OverseerServer(overseer, tmp_path / "run" / "ppo")
    yield overseer, server, tmp_path / "run"
    server.close()


def test_a_run_is_found_by_its_folder_and_tells_what_it_does(served):
    overseer, server, folder = served
    overseer.report(trial())
    overseer.report(sampler())
    run = find_run(folder)
    found = run.status()
    assert [part["part"] for part in found["parts"]] == ["sampler 1 of trial t", "trial t"]
    assert found["diagnoses"]["trial t"]["bound"] == "learner"
    assert run.health()["ok"]
    assert 'rllib_llm_phase_seconds{part="trial t",phase="learning"} 2.000' in run.metrics()
    (command,) = run.tell("pause")
    assert command["state"] == "waiting"
    with pytest.raises(Problems, match="command='explode'"):
        run.tell("explode")


def test_a_run_at_a_url_is_told_by_its_url(tmp_path):
    url = f"file://{tmp_path}/run"
    with pytest.raises(Problems, match=re.escape(f"run={url!r} must be the folder of a run")):
        find_run(url)


def test_a_command_that_its_overseer_forgot_is_lost(served):
    overseer, _, folder = served
    overseer.report(trial())
    (command,) = find_run(folder).tell("pause", timeout_s=0.0)
    assert command["state"] == "waiting"
    overseer._commands.clear()  # as of one that was started again
    (found,) = find_run(folder)._updated([command])
    assert found["state"] == "lost" and "rllib status" in found["answer"]


def test_the_command_line_tells_a_run_and_shows_the_answer(served):
    overseer, _, folder = served
    overseer.report(trial())
    assert "none has reported" in invoke("pause", folder / "ppo", code=2, silent=overseer)
    overseer.report(trial())
    told = "trial t: received; carried out after the current iteration"
    assert told in invoke("pause", folder, "--wait", "0")
    assert "samplers=0 must be" in invoke("scale", folder, "--samplers", "0", code=2)
    threading.Thread(target=answer_once, args=(overseer, "refused", "no"), daemon=True).start()
    assert "trial t: no" in invoke("scale", folder, "--samplers", "9", code=2)


def invoke(command, *arguments, code=0, silent=None):
    """What `rllib` prints; `silent`: an overseer whose parts have been silent for long."""
    if silent is not None:
        silent._heard = dict.fromkeys(silent._heard, 0.0)
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return said(result.output)


def answer_once(overseer, state, text):
    """As a trial does, whatever it is told next."""
    while not (told := [one for one in overseer.report(trial()) if one["name"] == "scale"]):
        time.sleep(0.02)
    overseer.report(trial(answers=[{"id": told[0]["id"], "state": state, "answer": text}]))


def test_nobody_is_let_in_without_the_token(served):
    overseer, server, _ = served
    overseer.report(trial())
    mode = stat.S_IMODE(server.file.stat().st_mode)
    assert mode == 0o600
    right = f"Bearer {server.token}"
    evil = {"Authorization": right, "Host": "evil.example"}
    for headers in ({}, {"Authorization": "no"}, {"Authorization": "Bearer h\u00e9"}, evil):
        request = urllib.request.Request(f"{server.url}/status", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=5)
        assert raised.value.code == 401
        request.full_url, request.data = f"{server.url}/commands", b'{"name": "stop"}'
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=5)
        assert raised.value.code == 401
    assert overseer.commands() == []


def test_an_overseer_that_is_started_again_has_another_address_and_the_same_token(tmp_path):
    first = OverseerServer(Overseer(), tmp_path)
    first.close()
    second = OverseerServer(Overseer(), tmp_path)
    assert second.token == first.token
    assert json.loads(second.file.read_text())["url"] == second.url
    # Tune's, of a run that is resumed: `ExperimentStateManager.sync_down_experiment_state`.
    assert second.file.suffix not in (".json", ".pkl")
    second.close()
    with pytest.raises(NoOverseerError, match="its overseer does not answer"):
        find_run(tmp_path).status()
    with pytest.raises(Problems, match="`overseer: true` in its config"):
        find_run(tmp_path / "elsewhere")


def test_scaling_is_advised_where_there_are_samplers_to_scale():
    overseer = Overseer(Clock())
    samples = trial(recent_seconds={FOR_COMPLETIONS: 9.0})
    for report, advised in ((samples, False), (sampler(), True)):
        overseer.report(report)
        (found,) = overseer.status()["diagnoses"].values()
        assert found["bound"] == "sampler" and "num_env_runners" in found["text"]
        assert ("rllib scale" in found["text"]) is advised


def test_status_fits_80_columns(served):
    from rich.console import Console

    from rllib_llm.cli.runs import view

    overseer, _, _ = served
    overseer.report(trial(stage="ppo", algorithm="PPOPtx"))
    overseer.report(sampler())
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(overseer.status()))
    text = console.export_text()
    assert "prompts 812-815" in " ".join(text.split())
    assert "learner-bound" in text
    assert max(map(len, text.splitlines())) <= 80
