"""A set-up that takes too long ends the process; one that does not is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rllib_llm import SFTConfig

PROGRAM = """
import os, signal
from rllib_llm.algorithms.language_model import killed_after
with killed_after({seconds}):
    {block}
print("set up")
"""


def run(seconds, block):
    program = PROGRAM.format(seconds=seconds, block=block)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_a_stopped_process_is_killed():
    done = run(1.5, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert done.returncode == -signal.SIGKILL
    assert "was not set up in 2 s (setup_timeout_s)" in done.stderr


def test_a_set_up_in_time_leaves_nothing_behind():
    done = run(3600.0, "pass")  # would wait for a watcher that went on: it shares stderr
    assert (done.returncode, done.stdout, done.stderr) == (0, "set up\n", "")


def test_an_error_passes_through():
    done = run(3600.0, "raise OSError('no such model')")
    assert done.returncode == 1 and "no such model" in done.stderr


@pytest.mark.parametrize("value", [0, -1.0, "auto", True])
def test_senseless_limits_are_refused(value):
    config = SFTConfig().language_model(model="m").fault_tolerance(setup_timeout_s=value)
    said = f"setup_timeout_s={value!r} must be a number of seconds above 0"
    with pytest.raises(ValueError, match=said):
        config.validate()


FORKS = """
    import time
    if os.fork() == 0:  # as a pool of processes, in a reward function
        time.sleep(600)
"""


def test_a_process_that_was_forked_meanwhile_holds_nobody_up():
    program = PROGRAM.format(seconds=3600.0, block="pass").replace("    pass", FORKS)
    program += "import time; print('at once', flush=True); os.killpg(0, signal.SIGTERM)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    output, _ = process.communicate(timeout=60.0)
    assert "at once" in output
