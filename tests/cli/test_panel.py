from __future__ import annotations

import io
import warnings

import pytest
from rich.console import Console

from rllib_llm.cli import session


@pytest.fixture
def stderr(monkeypatch) -> io.StringIO:
    """What goes to a narrow terminal."""
    out = io.StringIO()
    monkeypatch.setattr(session, "stderr", Console(file=out, width=40))
    return out


def test_words_and_paths_of_a_panel_are_whole(stderr):
    path = "/a/folder/of-many/parts/" + "deep/" * 12 + "error.txt"
    session.show(f"It failed for a reason that takes two lines.\n\nSee {path}", title="failed")
    lines = stderr.getvalue().splitlines()
    assert "failed" in lines[0]
    assert lines[1:3] == ["It failed for a reason that takes two", "lines."]
    assert path in lines  # alone on its line, longer than the terminal, in one piece


def test_a_command_in_a_panel_stays_on_one_line(stderr):
    command = "  rllib train file my.yaml --set lr=1e-6 --experiment-name my_2026 --resume"
    session.show(f"It was stopped, and goes on from iteration 3:\n{command}")
    assert command in stderr.getvalue().splitlines()


def test_warnings_are_told_once_each_on_a_line(stderr):
    with session.shown_warnings() as told:
        for _ in range(2):
            warnings.warn(
                "one that is longer than the terminal is wide, and stays whole", stacklevel=1
            )
        warnings.warn("not for the user", DeprecationWarning, stacklevel=1)
    assert told == ["one that is longer than the terminal is wide, and stays whole"]
    assert stderr.getvalue() == f"warning: {told[0]}\n"
