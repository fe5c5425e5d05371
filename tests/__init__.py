"""The tests. A process that imports them is shaken where the one that started it is (shaker.py)."""

import os

if "RLLIB_LLM_TESTS_SHAKE" in os.environ:
    from tests.shaker import shake_process  # and torch, which other processes may do without

    shake_process(int(os.environ["RLLIB_LLM_TESTS_SHAKE"]))
