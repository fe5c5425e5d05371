"""A learner and samplers in processes of their own, each with the pretend GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import remote_run

pytestmark = pytest.mark.slow  # a Ray of its own, whose workers have a GPU
ROOT = Path(__file__).resolve().parents[2]


def in_a_process(*words: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", remote_run.__name__, *words], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_learner_and_samplers_on_one_gpu():
    """The weights go through the object store, and by CUDA IPC; nothing that is learnt differs."""
    found = in_a_process("store", "cuda_ipc")
    for transport, said in found.items():
        assert said["devices"] == {"learner": ["cuda:0"], "samplers": ["cuda:0", "cuda:0"]}
        assert said["shares"] == [0.2, 0.2], "a sampler plans with its share of the memory"
        assert said["differing"] == {}, transport
        assert said["republished"] == 0 and said["version"] == 3
    assert found["store"]["rewards"] == found["cuda_ipc"]["rewards"]
