from __future__ import annotations

import pytest

from rllib_llm.envs.judges.reward_functions import RewardError, RewardTerm
from rllib_llm.shared.messages import is_library, raised, short_traceback


def divides():
    return 1 / 0


def caught(function) -> Exception:
    with pytest.raises(Exception) as info:
        function()
    return info.value


def test_an_exception_is_told_with_the_users_place():
    text = raised(caught(divides))
    assert text.startswith("ZeroDivisionError: division by zero, raised in test_tracebacks.py:")
    assert text.endswith("(divides)")
    assert raised(SystemExit(3)) == "SystemExit: 3"  # never raised: without a place
    inside = raised(caught(lambda: int("x", base=99)))
    assert "test_tracebacks.py" in inside


def test_files_of_libraries_are_told_from_the_users():
    import json

    assert is_library(json.__file__) and is_library(pytest.__file__) and is_library("<string>")
    assert not is_library(__file__) and not is_library("/home/me/my_rewards.py")


def test_what_explains_itself_is_shown_without_internal_frames():
    def fails():
        try:
            divides()
        except ZeroDivisionError as error:
            raise RewardError("reward function 'f' must judge: it failed. Correct it.") from error

    error = caught(fails)
    lines = short_traceback(error).splitlines()
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-1].endswith("RewardError: reward function 'f' must judge: it failed. Correct it.")
    assert len(lines) <= 12


def test_other_errors_keep_their_whole_traceback():
    error = caught(divides)
    assert short_traceback(error).startswith("Traceback (most recent call last)")
    assert "Traceback" in short_traceback(caught(lambda: int("x")))  # not of this package
    assert "Traceback" not in short_traceback(caught(lambda: RewardTerm.from_spec({"wieght": 1})))
