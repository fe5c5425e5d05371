from __future__ import annotations

import logging
import sys
import warnings

import pytest

from rllib_llm.shared.messages import PACKAGE, Listener, TrialMessage


def test_warnings_records_and_prints_are_noted_and_passed_on(capsys):
    listener = Listener("sampler 1")
    with pytest.warns(UserWarning, match="of the user's code"), listener:
        print("two\nlines")
        print("no end", end="")
        warnings.warn("of the user's code", stacklevel=1)
        logging.getLogger("rllib_llm.rollouts").warning("a sampler %s", "died")
        logging.getLogger("elsewhere").warning("not ours")
    said = [(message.text, message.is_warning) for message in listener.take()]
    assert said == [
        ("two", False),
        ("lines", False),
        ("of the user's code", True),
        ("a sampler died", True),
        ("no end", False),
    ]
    assert capsys.readouterr().out == "two\nlines\nno end"
    assert listener.take() == [] and sys.stdout.write  # taken, and the old one is back


def test_a_librarys_warning_is_kept_but_is_none_to_the_user():
    listener = Listener("trial")
    with listener, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("numbers", UserWarning, "/venv/site-packages/numpy/a.py", 3)
        warnings.warn_explicit("mine", UserWarning, "/home/me/my_rewards.py", 3)
    said = [TrialMessage("trial", "numbers"), TrialMessage("trial", "mine", True)]
    assert listener.take() == said


def test_a_warning_of_this_package_is_shown_without_its_source_line():
    with warnings.catch_warnings(record=True) as caught, Listener("trial"):
        for file in (f"{PACKAGE}/envs/judges/rewards.py", "/home/me/my_rewards.py"):
            warnings.warn_explicit("a judge failed", UserWarning, file, 3)
    assert [warning.line for warning in caught] == ["", None]  # None: Python looks it up


def test_it_can_listen_again_and_says_who_spoke():
    listener = Listener("sampler 2")
    for line in ("one", "two"):
        with listener:
            print(line)
    assert [message.text for message in listener.take()] == ["one", "two"]
    assert listener.speaker == "sampler 2"
