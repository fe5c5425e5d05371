"""Algorithms start a Ray of their own where none runs: here they all use the session's."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _ray(ray_session):
    yield
