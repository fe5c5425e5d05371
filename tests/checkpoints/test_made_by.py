"""A checkpoint names the class that made it, and earlier ones that describe theirs are read."""

from __future__ import annotations

import pickle

import pytest
from ray import cloudpickle

from rllib_llm.algorithms.grpo import GRPO
from rllib_llm.algorithms.rloo import RLOO
from rllib_llm.checkpoints.algorithm import CLASS_FILE, class_and_arguments, importable, name_class
from rllib_llm.checkpoints.folder import CheckpointError
from tests.algorithms import tiny_runs as tiny


def derived(cls: type) -> type:
    """As Ray derives an actor's class: the same name, with methods in a dictionary of its own."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "train": cls.train})


def test_a_class_that_ray_derived_is_written_by_its_name(tmp_path):
    made = {"class": derived(GRPO), "ctor_args_and_kwargs": (({"lr": 1.0},), {})}
    (tmp_path / CLASS_FILE).write_bytes(cloudpickle.dumps(made))
    name_class(tmp_path)
    written = (tmp_path / CLASS_FILE).read_bytes()
    assert pickle.loads(written)["class"] is GRPO
    assert b"train" not in written
    cls, arguments = class_and_arguments(tmp_path)
    assert cls is GRPO and arguments.arguments["config"] == {"lr": 1.0}


def test_a_class_without_a_place_stays_as_it_is():
    class Local(GRPO):
        pass

    assert importable(Local) is Local
    assert importable(derived(RLOO)) is RLOO


def test_what_is_gone_from_this_package_is_passed_over(tmp_path):
    # Protocol 0: a dictionary with the class, a method that there was, and the arguments.
    text = b"(dS'class'\ncrllib_llm.algorithms.grpo\nGRPO\nsS'method'\ncrllib_llm.algorithms.rlhf"
    (tmp_path / CLASS_FILE).write_bytes(text + b"\n_collect\nsS'ctor_args_and_kwargs'\n(((dt(dts.")
    assert class_and_arguments(tmp_path)[0] is GRPO
    (tmp_path / CLASS_FILE).write_bytes(b"cjson\n_no_such_name\n.")
    with pytest.raises(AttributeError):
        class_and_arguments(tmp_path)


def test_a_checkpoint_is_of_its_algorithm(tmp_path, ray_session):
    with tiny.built(tiny.grpo()) as algorithm:
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match="must be one of RLOO: .* Use GRPO.from_checkpoint"):
        RLOO.from_checkpoint(path)
    again = GRPO.from_checkpoint(path, config=tiny.grpo(lr=5e-4))
    try:
        assert (type(again), again.config.lr) == (GRPO, 5e-4)
    finally:
        again.stop()
