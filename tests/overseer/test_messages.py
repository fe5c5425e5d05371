from __future__ import annotations

from pathlib import Path

from rllib_llm.shared.messages import MAX_PRINTED, MESSAGES_FILE, Message, MessageLog, TrialEar

FAILED = "reward function 'answered' failed on {} of 16 completions, first on prompt {!r}"


def lines(folder: Path) -> list[str]:
    return (folder / MESSAGES_FILE).read_text(encoding="utf-8").splitlines()


def test_a_warning_stands_once_however_many_samplers_give_it(tmp_path):
    log = MessageLog(tmp_path / "trial")
    log.write([], 1)
    assert not (tmp_path / "trial").exists()  # who says nothing leaves nothing
    log.write([Message("sampler 1", FAILED.format(5, "a"), True), Message("trial", "hello")], 1)
    log.write([Message("sampler 2", FAILED.format(3, "b"), True)], 2)
    log.write([Message("trial", "prompts are\ncut", True)], 3)
    assert lines(tmp_path / "trial") == [
        f"[1 sampler 1] warning: {FAILED.format(5, 'a')}",
        "[1 trial] hello",
        "[3 trial] warning: prompts are cut",
    ]


def test_a_function_that_prints_much_does_not_fill_the_disk(tmp_path):
    log = MessageLog(tmp_path)
    log.write([Message("trial", str(i)) for i in range(MAX_PRINTED + 7)], 1)
    assert lines(tmp_path)[-1] == "[1] 7 further lines were printed"
    assert len(lines(tmp_path)) == MAX_PRINTED + 1


def test_who_waits_hears_new_warnings_and_what_is_done(tmp_path):
    log, ear = MessageLog(tmp_path), TrialEar(tmp_path)
    assert ear.new_warnings() == [] and ear.activity() is None
    log.write([Message("trial", "first", True), Message("trial", "a print")], 1)
    assert ear.new_warnings() == ["first"]
    assert ear.new_warnings() == []
    with (tmp_path / MESSAGES_FILE).open("a") as file:
        file.write("[2 trial] warning: half a li")  # its writer is not done
    assert ear.new_warnings() == []
    with (tmp_path / MESSAGES_FILE).open("a") as file:
        file.write("ne\n")
    assert ear.new_warnings() == ["half a line"]
    log.doing("sampling 16 completions")
    assert ear.activity()[0] == "sampling 16 completions"
    log.doing("")
    assert ear.activity() is None
    assert TrialEar(tmp_path).new_warnings() == []  # of a run that goes on: only what is new


def test_a_warning_with_half_a_character_ends_no_trial(tmp_path):
    MessageLog(tmp_path).write([Message("trial", "judged '\ud83d'", True)], 1)
    assert lines(tmp_path) == ["[1 trial] warning: judged '\\ud83d'"]
