"""Whether all is shown that is hidden by default: `RLLIB_LLM_VERBOSE=1`, which `rllib -v` sets."""

from __future__ import annotations

import os

VERBOSE = "RLLIB_LLM_VERBOSE"


def is_verbose() -> bool:
    """Whether all that libraries say is to be shown."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")
