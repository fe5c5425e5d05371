from __future__ import annotations

import json
from pathlib import Path

from rllib_llm.shared.messages import MAX_PRINTED, MESSAGES_FILE, MessageLog, TrialEar, TrialMessage

FAILED = "reward function 'answered' failed on {} of 16 completions, first on prompt {!r}"


def rows(folder: Path) -> list[tuple]:
    found = map(json.loads, (folder / MESSAGES_FILE).read_text(encoding="utf-8").splitlines())
    return [(row["iteration"], row["speaker"], row["is_warning"], row["text"]) for row in found]


def test_a_warning_stands_once_however_many_samplers_give_it(tmp_path):
    log = MessageLog(tmp_path / "trial")
    log.write([], 1)
    assert not (tmp_path / "trial").exists()  # who says nothing leaves nothing
    failed = TrialMessage("sampler 1", FAILED.format(5, "a"), True)
    log.write([failed, TrialMessage("trial", "hello")], 1)
    log.write([TrialMessage("sampler 2", FAILED.format(3, "b"), True)], 2)
    log.write([TrialMessage("trial", "prompts are\ncut", True)], 3)
    assert rows(tmp_path / "trial") == [
        (1, "sampler 1", True, FAILED.format(5, "a")),
        (1, "trial", False, "hello"),
        (3, "trial", True, "prompts are\ncut"),
    ]


def test_a_function_that_prints_much_does_not_fill_the_disk(tmp_path):
    log = MessageLog(tmp_path)
    log.write([TrialMessage("trial", str(i)) for i in range(MAX_PRINTED + 7)], 1)
    assert rows(tmp_path)[-1] == (1, "trial", False, "7 further lines were printed")
    assert len(rows(tmp_path)) == MAX_PRINTED + 1


def test_who_waits_hears_new_warnings_and_what_is_done(tmp_path):
    log, ear = MessageLog(tmp_path), TrialEar(tmp_path)
    assert ear.new_warnings() == [] and ear.activity() is None
    log.write([TrialMessage("trial", "first", True), TrialMessage("trial", "a print")], 1)
    assert ear.new_warnings() == ["first"]
    assert ear.new_warnings() == []
    with (tmp_path / MESSAGES_FILE).open("a") as file:
        file.write('{"text": "half a li')  # its writer is not done
    assert ear.new_warnings() == []
    with (tmp_path / MESSAGES_FILE).open("a") as file:
        file.write('ne", "is_warning": true}\n')
    assert ear.new_warnings() == ["half a line"]
    with (tmp_path / MESSAGES_FILE).open("a") as file:
        file.write('{"text": "cut off by a full di{"text": "a"}\n')
    assert ear.new_warnings() == []
    log.doing("sampling 16 completions")
    assert ear.activity()[0] == "sampling 16 completions"
    log.doing("")
    assert ear.activity() is None
    assert TrialEar(tmp_path).new_warnings() == []  # of a run that goes on: only what is new


def test_a_warning_with_half_a_character_ends_no_trial(tmp_path):
    ear = TrialEar(tmp_path)
    MessageLog(tmp_path).write([TrialMessage("trial", "judged '\ud83d'", True)], 1)
    assert ear.new_warnings() == ["judged '\\ud83d'"]
