"""A pretend GPU for each test of this folder that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import pretend

# Before any test of this process: autograd counts the devices once, at the first backward pass.
if torch.version.cuda is None:
    pretend.register()


@pytest.fixture
def gpu() -> Iterator[pretend.Gpu]:
    """torch has one CUDA device while the test runs; see `pretend.py`."""
    with pretend.gpu() as made:
        yield made
