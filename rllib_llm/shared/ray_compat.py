"""The private parts of Ray that this package uses, in one place.

What is reached into goes through a function here. What our classes inherit from Ray's, use or
override, is listed in `tests/shared/private_names.py`, and so is what the functions need. A test
compares all of them with the installed Ray by name and parameters, and finds uses that are not
listed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray


def local_learner(learner_group: Any) -> Any:
    """The learner of a group that has it in this process."""
    return learner_group._learner


def sampler_manager(env_runner_group: Any) -> Any:
    """The manager of a group's remote samplers, a `FaultTolerantActorManager`."""
    return env_runner_group._worker_manager


def new_sampler(env_runner_group: Any, number: int, *, is_reserved: bool) -> Any:
    """The handle of one more remote sampler of a group, with the worker index `number`.

    is_reserved: the trial's placement group has its place; else any node with room is taken.
    """
    group = env_runner_group
    arguments = {"config": group._remote_config_obj_ref, "worker_index": number,
                 "num_workers": number}  # fmt: skip
    maker = ray.remote(**group._remote_args)(group.env_runner_cls)
    if is_reserved and ray.util.get_current_placement_group() is not None:
        index = group._pg_offset + number
        return maker.options(placement_group_bundle_index=index).remote(**arguments)
    return maker.options(scheduling_strategy="DEFAULT").remote(**arguments)


def room_for_samplers(env_runner_group: Any) -> int:
    """How many more remote samplers of a group the nodes have CPUs and GPUs for."""
    arguments = env_runner_group._remote_args
    needed = {"CPU": arguments.get("num_cpus") or 0, "GPU": arguments.get("num_gpus") or 0}
    wanted = {name: amount for name, amount in needed.items() if amount}
    if not wanted:
        return sys.maxsize
    return sum(
        min(int(node.get(name, 0.0) / amount) for name, amount in wanted.items())
        for node in free_by_node()
    )


def put_direct(value: Any, transport: str) -> ray.ObjectRef:
    """`ray.put` that leaves tensors where they are, for readers to fetch by `transport`."""
    return ray.put(value, _tensor_transport=transport)


def stop_listening() -> None:
    """Ends what prints errors of the cluster in this process, a moment before `ray.shutdown()`
    does: what is cut off by the end of others is printed as errors, too."""
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()


def own_ray_has_ended() -> bool:
    """Whether the cluster that this process has started is gone, as after a signal to the whole
    group of processes."""
    from ray._private.worker import _global_node

    return _global_node is not None and bool(_global_node.dead_processes())


def resources_by_node() -> list[dict[str, float]]:
    """All resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def free_by_node() -> list[dict[str, float]]:
    """The free resources of each live node."""
    from ray._private.state import available_resources_per_node

    return list(available_resources_per_node().values())


def processes_of(actor: Any, anywhere: bool = False) -> list[int]:
    """Ids of the processes of an actor, and of the actors that it has made, on this node; or, if
    `anywhere`, on all."""
    from ray._private.state import actors

    table = actors()
    known = table.get(actor._actor_id.hex())
    if known is None:
        return []
    here = ray.get_runtime_context().get_node_id()
    return [
        info["Pid"]
        for info in table.values()
        if info["State"] == "ALIVE"
        and (anywhere or info["Address"]["NodeID"] == here)
        and (info["ActorID"] == known["ActorID"] or info["OwnerAddress"] == known["Address"])
    ]


def rllib_algorithm_class(name: str) -> type:
    """The class of one of RLlib's own algorithms."""
    from ray.rllib.algorithms.registry import _get_algorithm_class

    return _get_algorithm_class(name)


def registered_env(name: str) -> Callable[..., Any] | None:
    """The creator registered with `tune.register_env`, if there is one."""
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if not _global_registry.contains(ENV_CREATOR, name):
        return None
    return _global_registry.get(ENV_CREATOR, name)


def register_trainable(name: str, value: Any) -> None:
    """Registers what unpickles to a Trainable's class, unless the name is taken.
    `tune.register_trainable` would want the class itself, and with it RLlib and torch."""
    from ray.tune.registry import TRAINABLE_CLASS, _global_registry

    if not _global_registry.contains(TRAINABLE_CLASS, name):
        _global_registry.register(TRAINABLE_CLASS, name, value)


def tuner_from_checkpoint(trainable: Any, checkpoint: str | None, **arguments: Any) -> Any:
    """A Tuner whose trials start from `checkpoint`, if given. `tune.run`, which it calls, supports
    this, but without a public parameter."""
    from ray import tune

    extra = None if checkpoint is None else {"restore": checkpoint}
    return tune.Tuner(trainable, _tuner_kwargs=extra, **arguments)


def replace_callbacks(tuner: Any, callbacks: list[Any]) -> None:
    """Gives a restored Tuner these callbacks in the place of those that were pickled with it."""
    tuner._local_tuner._run_config.callbacks = callbacks


def resume_finished(tuner: Any) -> None:
    """Makes a restored Tuner continue finished trials, too."""
    from ray import tune

    tuner._local_tuner._resume_config.finished = tune.ResumeConfig.ResumeType.RESUME


def training_result(checkpoint: Any, metrics: dict[str, Any]) -> Any:
    """The record that Tune keeps of a saved checkpoint, with its results."""
    from ray.train._internal.session import _TrainingResult

    return _TrainingResult(checkpoint, metrics)


def trial_of_record(states: Sequence[str]) -> Any:
    """The `Trial` of an entry in Tune's record of a run."""
    from ray.tune.experiment import Trial

    trial = Trial.from_json_state(states[0], stub=True)
    trial.restore_run_metadata(states[1])
    return trial


def set_checkpoints(trial: Any, results: Iterable[Any], number: int) -> None:
    """Replaces the checkpoints that Tune knows of a trial.

    Args:
        results: of `training_result`, the oldest first.
        number: in the name of the last.
    """
    from ray.train._internal.checkpoint_manager import _CheckpointManager

    config = trial.run_metadata.checkpoint_manager.checkpoint_config
    # It would delete those that are too many, and the run may be to keep more than before.
    manager = _CheckpointManager(dataclasses.replace(config, num_to_keep=None))
    for result in results:
        manager.register_checkpoint(result)
    manager._checkpoint_config = config
    trial.run_metadata.checkpoint_manager = manager
    trial.storage.current_checkpoint_index = number
    trial.run_metadata.invalidate_cache()
    trial.invalidate_json_state()


_DECISIONS = ("_cached_trial_decisions", "_queued_trial_decisions")


def drop_decisions(record: dict[str, Any]) -> bool:
    """Whether Tune's record of a run held decisions on its trials, which are gone from it now.

    Of a trial that failed while it was saving Tune notes that it is to stop after that; restored,
    the trial would stop after its next checkpoint, as one that has reached its end.
    """
    state = record.get("runner_data", {})
    dropped = [state.pop(name) for name in _DECISIONS if name in state]
    return any(dropped)


def wandb_logging_actor() -> Any:
    """The class of the process that logs a trial to W&B."""
    from ray.air.integrations.wandb import _WandbLoggingActor

    return _WandbLoggingActor


def set_wandb_key(key: str | None) -> None:
    """Tells W&B its key, or makes sure that it has one.

    Raises:
        ValueError: there is none.
    """
    from ray.air.integrations.wandb import _set_api_key

    _set_api_key(None, key)


def most_replicas() -> int:
    """The number of replicas that Ray Serve may start of the deployment whose replica this is."""
    from ray.serve import get_replica_context

    config = get_replica_context()._deployment_config
    scaling = config.autoscaling_config
    return config.num_replicas if scaling is None else scaling.max_replicas
