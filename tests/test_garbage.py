"""A process that has started is not searched for garbage again."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from rllib_llm.garbage import forget_startup

class Cycle:
    def __init__(self):
        self.me = self

garbage, kept = weakref.ref(Cycle()), Cycle()
before = weakref.ref(kept)
forget_startup()
del kept
after = weakref.ref(Cycle())
gc.collect()
print(garbage() is None, before() is None, after() is None)
"""


def test_only_what_is_made_later_is_looked_at_again():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "True"]
