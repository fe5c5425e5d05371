"""What tests of contained processes need."""

from __future__ import annotations

import pytest

from rllib_llm.envs.sandbox_backends import bwrap_refused

needs_bwrap = pytest.mark.skipif(bool(bwrap_refused()), reason=bwrap_refused() or "it works")
