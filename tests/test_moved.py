"""Old module names lead to the modules of today."""

from __future__ import annotations

import importlib
import importlib.util
import pickle

import pytest

from rllib_llm.moved import NEW_NAMES


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("old", ["rllib_llm.sampling.params", "rllib_llm.envs.arithmetic"])
def test_an_old_name_is_the_same_module_and_says_the_new_one(old: str):
    with pytest.warns(DeprecationWarning, match=NEW_NAMES[old]):
        module = importlib.import_module(old)
    assert module is importlib.import_module(NEW_NAMES[old])
    # Whoever asks where the module lies is told so, whichever name was imported first.
    spec = importlib.util.find_spec(NEW_NAMES[old])
    assert spec is not None and spec.origin == module.__file__


def test_every_new_name_exists():
    for new in NEW_NAMES.values():
        assert importlib.util.find_spec(new) is not None


def test_what_was_pickled_under_an_old_name_is_read():
    from rllib_llm.engines.params import SamplingParams

    # Protocol 0 writes a class as module and name, each on a line.
    old = b"crllib_llm.sampling.params\nSamplingParams\n."
    assert pickle.loads(old) is SamplingParams


def test_a_tuner_of_an_earlier_version_is_read():
    """Its callbacks were pickled with it, under names of their own, and are replaced then."""
    from rllib_llm.tune.result_log import ResultLog

    for name in ("ResultJson", "ProgressCsv"):
        old = b"crllib_llm.cli.result_files\n%s\n." % name.encode()
        assert pickle.loads(old) is ResultLog
