"""A process that has started is not searched for garbage again."""

from __future__ import annotations

import gc
import subprocess
import sys

COUNT = """
import gc
from rllib_llm.garbage import forget_startup
kept = [[] for _ in range(1000)]
cycle = []
cycle.append(cycle)
del cycle
forget_startup()
seen = len(gc.get_objects())
later = [[] for _ in range(10)]
print(gc.get_freeze_count() > 1000, gc.garbage, seen < 100, len(gc.get_objects()) - seen)
"""


def test_what_was_made_until_now_is_not_looked_at_again():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    # Ten lists and the one that holds them.
    assert done.stdout.split() == ["True", "[]", "True", "11"]
    assert gc.get_freeze_count() == 0  # of this process, which nobody waits for
