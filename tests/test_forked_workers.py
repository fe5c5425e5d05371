"""Forked workers are as Ray's own: they share what was imported, and nothing that is drawn."""

from __future__ import annotations

import sys

import pytest
import ray

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are not forked"),
]


@ray.remote(num_cpus=0.1)
class Told:
    """What a worker's process is."""

    def it_is(self) -> dict:
        import os
        import random
        import sys

        import numpy as np
        import ray

        return {
            "imported": {name.partition(".")[0] for name in sys.modules},
            "server": os.getppid(),
            "group": os.getpgid(0),
            "word": os.environ.get("A_WORD"),
            "drawn": (random.random(), np.random.rand(), ray.ObjectRef.from_random().hex()),
        }


def test_they_share_libraries_and_draw_other_ids_and_numbers():
    made = [Told.remote() for _ in range(3)]
    told = ray.get([each.it_is.remote() for each in made])
    assert len({each["server"] for each in told}) == 1
    assert len({each["group"] for each in told}) == 3  # Ray kills the group of one that ended
    for drawn in zip(*(each["drawn"] for each in told), strict=True):
        assert len(set(drawn)) == 3


@pytest.mark.slow
def test_other_variables_have_another_server_which_holds_nothing_of_ours():
    own = Told.options(runtime_env={"env_vars": {"A_WORD": "a word"}}).remote()
    told = ray.get([own.it_is.remote(), Told.remote().it_is.remote()])
    assert [each["word"] for each in told] == ["a word", None]
    assert told[0]["server"] != told[1]["server"]
    assert {"torch", "transformers"} <= told[0]["imported"]
    assert "rllib_llm" not in told[0]["imported"]
