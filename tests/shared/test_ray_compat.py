"""What the package touches of Ray's internals is as it was tried, and all of it is known."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import tune

from rllib_llm.shared import ray_compat
from rllib_llm.shared.ray_compat import processes_of, room_for_samplers
from tests.shared.private_names import PRIVATE_NAMES, SERVE_NAMES, WANDB_NAMES, PrivateName
from tests.test_house import trees

PACKAGE = Path(ray_compat.__file__).parents[1]
NAMES = PRIVATE_NAMES + WANDB_NAMES + SERVE_NAMES


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.owner}.{name.name}")
def test_the_installed_ray_has_it_with_these_parameters(name):
    if name in WANDB_NAMES:
        pytest.importorskip("wandb")
    if name in SERVE_NAMES:
        pytest.importorskip("ray.serve")
    assert name.problem() is None


def test_a_name_that_is_gone_or_takes_other_arguments_is_described():
    learner = "ray.rllib.core.learner.learner:Learner"
    assert PrivateName("ray.no_such_module", "x").problem() == "ray.no_such_module is gone"
    assert PrivateName(f"{learner}y", "x").problem() == f"{learner}y is gone"
    assert PrivateName(learner, "_parameters").problem() == f"{learner} has no _parameters"
    assert PrivateName(learner, "_check_is_built", "self").problem() == (
        f"{learner}._check_is_built takes (self error), not (self)"
    )


def test_a_class_that_became_an_actor_takes_what_it_took():
    class Counter:
        def _add(self, number):
            return number

    ray.remote(Counter)
    module = SimpleNamespace(Counter=Counter)
    sys.modules["an_actors_module"] = module
    try:
        assert PrivateName("an_actors_module:Counter", "_add", "self number").problem() is None
    finally:
        del sys.modules["an_actors_module"]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of all files but `ray_compat.py`, by module name."""
    return {
        ".".join(("rllib_llm", *path.relative_to(PACKAGE).with_suffix("").parts)): tree
        for path, tree in trees().items()
        if path.name not in ("ray_compat.py", "__init__.py")
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_nobody_else_imports_or_reaches_into_what_is_private():
    known = {name.name for name in NAMES if is_private(name.name)}
    offences = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private = [part for part in parts if is_private(part)]
            elif isinstance(node, ast.Attribute) and node.attr in known:
                own = ("self", "cls", "super()")
                private = [] if ast.unparse(node.value) in own else [node.attr]
            else:
                continue
            offences += [f"{module}:{node.lineno} {name}" for name in private]
    assert not offences


def test_what_classes_use_of_their_ray_bases_is_known():
    known = {name.name for name in NAMES}
    offences, found = [], set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            try:
                cls = getattr(importlib.import_module(module), node.name, None)
            except ModuleNotFoundError as error:
                assert error.name == "verifiers", "all else is installed for the tests"
                continue
            bases = [base for base in getattr(cls, "__mro__", ()) if is_rays(base)]
            used = private_names_used(node)
            names = {name for name in used for base in bases if belongs_to(name, base)}
            found |= names
            offences += [f"{module}.{node.name} {name}" for name in sorted(names - known)]
    assert not offences
    assert {"_weights_seq_no", "_call_actors", "_synch"} <= found  # it does find some


def is_rays(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "ray"


def private_names_used(node: ast.ClassDef) -> set[str]:
    """Methods that a class defines, its attributes, and what its methods take from `self`."""
    used = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and is_private(part.attr):
            used |= {part.attr} if ast.unparse(part.value) in ("self", "super()") else set()
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            used.add(part.id)
    return {name for name in used if is_private(name)}


source_of = functools.cache(inspect.getsource)


def belongs_to(name: str, base: type) -> bool:
    source = source_of(base)
    return name in vars(base) or f"self.{name} =" in source or f"self.{name}:" in source


def test_callbacks_of_a_tuner_are_replaced():
    tuner = SimpleNamespace(_local_tuner=SimpleNamespace(_run_config=tune.RunConfig()))
    callbacks = [tune.Callback()]
    ray_compat.replace_callbacks(tuner, callbacks)
    assert tuner._local_tuner._run_config.callbacks is callbacks


def test_a_restored_tuner_goes_on_with_trials_that_had_ended():
    from ray.tune.tuner import Tuner

    resume = tune.ResumeConfig()
    tuner = SimpleNamespace(_local_tuner=SimpleNamespace(_resume_config=resume))
    ray_compat.resume_finished(tuner)
    assert resume.finished == tune.ResumeConfig.ResumeType.RESUME
    assert "_local_tuner" in inspect.getsource(Tuner)


def test_a_registered_environment_is_found_and_a_trainable_keeps_its_name():
    tune.register_env("ray_compat_env", lambda config: config["side"] ** 2)
    assert ray_compat.registered_env("ray_compat_env")({"side": 3}) == 9
    assert ray_compat.registered_env("no_such_env") is None
    first, second = (type(name, (tune.Trainable,), {}) for name in ("First", "Second"))
    for trainable in (first, second):
        ray_compat.register_trainable("ray_compat_trainable", trainable)
    from ray.tune.registry import get_trainable_cls

    assert get_trainable_cls("ray_compat_trainable").__name__ == "First"


class Child:
    def pid(self):
        return os.getpid()


class Parent(Child):
    def make(self):
        self.child = ray.remote(Child).options(num_cpus=0).remote()
        return ray.get(self.child.pid.remote())


@pytest.mark.slow  # processes of their own
def test_the_processes_of_an_actor_are_its_own_and_those_of_actors_that_it_made(ray_session):
    parent, other = (ray.remote(Parent).options(num_cpus=0).remote() for _ in range(2))
    own, child = ray.get([parent.pid.remote(), parent.make.remote()])
    assert sorted(processes_of(parent)) == sorted([own, child])
    assert processes_of(other) == [ray.get(other.pid.remote())]
    for actor in (parent, other):
        ray.kill(actor)


@pytest.mark.parametrize(
    ("arguments", "room"),
    [
        ({"num_cpus": 1}, 2 + 1),
        ({"num_cpus": 1, "num_gpus": 0.5}, 1),  # the second node's CPU; the first has no GPU
        ({"num_cpus": 0.5, "num_gpus": 0}, 5 + 2),
        ({}, sys.maxsize),  # it takes nothing
    ],
)
def test_there_is_room_for_samplers_where_a_node_has_all_they_need(monkeypatch, arguments, room):
    monkeypatch.setattr(
        ray_compat, "free_by_node", lambda: [{"CPU": 2.5}, {"CPU": 1.0, "GPU": 1.0}]
    )
    group = SimpleNamespace(_remote_args=arguments)
    assert room_for_samplers(group) == room
