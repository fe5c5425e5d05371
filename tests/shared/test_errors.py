"""Mistakes, the names that may have been meant, all complaints at once."""

from __future__ import annotations

import pytest

from rllib_llm.shared.errors import all_complaints, complain, noted


def test_complaints_are_raised_unless_all_are_asked_for():
    with pytest.raises(ValueError, match="one"), noted():
        complain(ValueError("one"))
    with all_complaints() as found:
        complain(ValueError("one"))
        with noted():
            raise ValueError("two")
        complain(ValueError("one"))  # again
        raise ValueError("three")
    assert [str(error) for error in found] == ["one", "two", "three"]


def test_consequences_are_dropped_and_bugs_are_not():
    with all_complaints() as found:
        complain(ValueError("one"))
        raise TypeError("its consequence")
    assert len(found) == 1
    with pytest.raises(TypeError), all_complaints():
        raise TypeError("a bug")
    with pytest.raises(ValueError):
        complain(ValueError("outside again"))
