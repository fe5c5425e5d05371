"""Weights on their way to several nodes, which are raylets of this machine with a store each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.weights import nodes

NUM_COPIES = nodes.NUM_NODES * nodes.NUM_VERSIONS


@pytest.mark.slow
def test_in_waves_nodes_pull_from_one_another_and_at_once_all_from_the_learner():
    # A cluster of its own, in a process of its own: this one may be connected to another Ray.
    command = [sys.executable, "-m", nodes.__name__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    at_once, in_waves = json.loads(result.stdout.splitlines()[-1])
    for found in (at_once, in_waves):
        # Every node was given each version once, by somebody.
        assert found["arrived"] == [[version] * nodes.NUM_NODES for version in nodes.VERSIONS]
        assert found["holders"] == nodes.NUM_NODES + 1
        assert sum(found["copies_sent"].values()) >= NUM_COPIES
        # Who has a copy on its own node takes that one.
        assert found["sent_again"] == 0
    # At once, whoever asks finds no other copy but the first; now and then one comes late. In waves
    # of 1, 2 and 3 nodes the learner's sends 1 + 2/2 + 3/4 of 6 copies on average: 8.25 of 18. Each
    # node chooses whom it asks at random; that all should ask the learner's: (1/2 * 1/2 * (1/4)^3)
    # to the power of the number of versions, 6e-8.
    assert in_waves["copies_sent"]["learner"] < at_once["copies_sent"]["learner"]
    assert in_waves["copies_sent"]["others"] > 0
