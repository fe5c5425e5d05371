"""Shards of one learner alone; what two make together is in `test_two_learners.py`."""

from __future__ import annotations

import multiprocessing
import warnings

import pytest
import torch

from rllib_llm.learners.sharding import shard_module
from tests.learners import tiny_learners as tiny
from tests.learners import two_learners as two


def view_warnings(critic: str, store: str) -> list[str]:
    """Warnings of views in a forward and backward pass of shards; run in a process of its own,
    since a process group lasts as long as its process."""
    learner = tiny.build(two.alone(two.ppo_ptx(critic=critic, ptx_coeff=0.0)))
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    module = learner.module["default_policy"].unwrapped()
    batch = tiny.judged(learner)
    root = shard_module(module, torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = root(batch)
        sum(column.sum() for column in outputs.values() if column.requires_grad).backward()
    torch.distributed.destroy_process_group()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.slow  # processes of their own
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_outputs_of_shards_are_no_views(critic, tmp_path):
    """FSDP2 warns of a view: an operation in place would lose the hook that gathers for the
    backward pass."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(view_warnings, (critic, f"file://{tmp_path}/store")) == []
