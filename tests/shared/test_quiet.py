from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rllib_llm.shared.messages import LOGGERS, VERBOSE

ROOT = Path(__file__).resolve().parents[2]
LOAD = "import rllib_llm, torchao, ray.rllib.core.rl_module.rl_module; print('loaded')"


def said(**environment: str) -> list[str]:
    """What a fresh process says that loads what samplers load."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "loaded"
    return done.stderr.splitlines()


@pytest.mark.slow  # another process imports it all
def test_loading_libraries_says_nothing():
    assert said() == []


def test_who_sets_a_level_or_wants_to_see_it_does(monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")
    from rllib_llm.shared import messages as quiet

    logger = logging.getLogger(LOGGERS[0])
    before = logger.level
    try:
        logger.setLevel(logging.NOTSET)
        quiet.quiet_libraries()
        assert logger.level == logging.NOTSET
        monkeypatch.setenv(VERBOSE, "0")
        logger.setLevel(logging.DEBUG)
        quiet.quiet_libraries()
        assert logger.level == logging.DEBUG  # the user's own
    finally:
        logger.setLevel(before)
