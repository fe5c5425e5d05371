"""Every name of Ray that is not public and that this package touches, in one place.

What is reached into goes through a function here. What our classes inherit from Ray's, use or
override, stands in `PRIVATE_NAMES`, and so does what the functions need. A test compares all of
them with the installed Ray by name and parameters, and finds uses that are not named here.

This package was tried with Ray 2.60. With another version, importing it looks every name up, and
raises an error with those that are gone or take other arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

TRIED = "2.60"
REQUIREMENT = "ray[rllib]>=2.60,<2.61"

# --- what is reached into ----------------------------------------------------------------------


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


def current_cluster() -> str | None:
    """The address of the cluster to which `ray.init()` without one connects; None: it starts one.
    The cluster may have been killed."""
    from ray._private.utils import read_ray_address

    return read_ray_address() or None


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


# --- names, and whether they are there -----------------------------------------------------------


@dataclass(frozen=True)
class PrivateName:
    """A name of Ray: its owner as `module` or `module:class`, and, of a function, its parameters.
    None: an attribute of the owner, or one that its methods assign."""

    owner: str
    name: str
    parameters: str | None = None

    def problem(self) -> str | None:
        """The difference between the installed Ray and the tested one in this name, or None."""
        module, _, cls = self.owner.partition(":")
        try:
            owner = importlib.import_module(module)
            owner = getattr(owner, cls) if cls else owner
        except (ImportError, AttributeError):
            return f"{self.owner} is gone"
        found = getattr(owner, self.name, None)
        if found is None and not self._is_assigned(owner):
            return f"{self.owner} has no {self.name}"
        if self.parameters is None:
            return None
        names = list(inspect.signature(found).parameters)  # type: ignore[arg-type]
        # Ray adds one to the methods of a class that becomes an actor.
        parameters = " ".join(name for name in names if name != "_ray_trace_ctx")
        if parameters != self.parameters:
            return f"{self.owner}.{self.name} takes ({parameters}), not ({self.parameters})"
        return None

    def _is_assigned(self, owner: Any) -> bool:
        """Whether the owner has it, or this class gives it to its instances."""
        if hasattr(owner, self.name) or self.name in getattr(owner, "__annotations__", ()):
            return True
        assigned = rf"self\.{self.name}\b\s*(:[^=\n]*)?=[^=]"
        return inspect.isclass(owner) and bool(re.search(assigned, inspect.getsource(owner)))


def _names(owner: str, *attributes: str, **functions: str) -> tuple[PrivateName, ...]:
    return (
        *(PrivateName(owner, name) for name in attributes),
        *(PrivateName(owner, name, parameters) for name, parameters in functions.items()),
    )


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_names("ray", put="value _owner _tensor_transport"),
    *_names("ray.actor:ActorHandle", "_actor_id"),
    *_names("ray._private.utils", read_ray_address="temp_dir"),
    *_names("ray._private.worker", "_global_node", "global_worker"),
    *_names("ray._private.worker:Worker", "threads_stopped"),
    *_names("ray._private.node:Node", dead_processes="self"),
    *_names(
        "ray._private.state",
        available_resources_per_node="",
        actors="actor_id job_id actor_state_name",
    ),
    *_names(
        "ray.rllib.algorithms.algorithm:Algorithm",
        "_progress_metrics",
        _set_up_metrics="self",
        _should_create_evaluation_env_runners="eval_config",
    ),
    *_names(
        "ray.rllib.algorithms.algorithm_config:AlgorithmConfig",
        "_is_online", "_model_config_auto_includes", "_learner_class", "_model_config",
        "_rl_module_spec", "_train_batch_size_per_learner",
        _serialize_dict="config",
        _translate_special_keys="key warn_deprecated",
    ),
    *_names("ray.rllib.algorithms.registry", _get_algorithm_class="alg"),
    *_names(
        "ray.rllib.core.learner.learner:Learner",
        "_named_optimizers", "_optimizer_name_to_module", "_optimizer_parameters", "_params",
        "_weights_seq_no",
        _check_is_built="self error",
    ),
    *_names(
        "ray.rllib.core.learner.learner_group:LearnerGroup",
        "_learner", "_worker_manager", "_workers",
        _get_results="self results",
    ),
    *_names(
        "ray.rllib.core.learner.torch.torch_learner:TorchLearner",
        "_device", "_module", "_torch_compile_cfg",
        _get_optimizer_state="self",
        _log_trainable_parameters="self",
        _make_modules_ddp_if_necessary="self",
        _map_module_to_device="self module",
        _set_optimizer_lr="optimizer lr",
        _set_optimizer_state="self state",
    ),
    *_names("ray.rllib.core.rl_module.rl_module:RLModule", _forward_train="self batch kwargs"),
    *_names(
        "ray.rllib.core.rl_module.torch.torch_rl_module:TorchRLModule",
        _forward_exploration="self batch kwargs",
        _forward_inference="self batch kwargs",
    ),
    *_names(
        "ray.rllib.env.env_runner_group:EnvRunnerGroup",
        "_pg_offset", "_remote_args", "_remote_config_obj_ref", "_worker_manager",
    ),
    *_names(
        "ray.rllib.utils.actor_manager:FaultTolerantActorManager",
        _call_actors="self func kwargs remote_actor_ids",
    ),
    *_names(
        "ray.rllib.utils.checkpoints:Checkpointable",
        _check_component="self name components not_components",
        _get_subcomponents="self name components",
    ),
    *_names(
        "ray.train._internal.checkpoint_manager:_CheckpointManager",
        "_checkpoint_config",
        register_checkpoint="self checkpoint_result",
    ),
    *_names("ray.train._internal.session", _TrainingResult="checkpoint metrics"),
    *_names("ray.tune.execution.tune_controller:TuneController", *_DECISIONS),
    *_names("ray.tune.registry", "ENV_CREATOR", "TRAINABLE_CLASS", "_global_registry"),
    *_names(
        "ray.tune.registry:_Registry",
        contains="self category key",
        get="self category key",
        register="self category key value",
    ),
    *_names(
        "ray.tune.schedulers.pbt:PopulationBasedTraining",
        "_hyperparam_mutations", "_next_perturbation_sync", "_perturbation_interval", "_synch",
        "_time_attr", "_trial_state",
        _get_new_config="self trial trial_to_clone",
    ),
    *_names(
        "ray.tune.trainable.trainable:Trainable",
        "_iteration", "_iterations_since_restore", "_storage", "_time_total",
    ),
    *_names("ray.tune.tuner:Tuner", "_local_tuner"),
    *_names("ray.tune.impl.tuner_internal:TunerInternal", "_resume_config", "_run_config"),
)  # fmt: skip

# Looked up only where W&B is used: importing Ray's integration imports W&B.
WANDB_NAMES: tuple[PrivateName, ...] = (
    *_names("ray.air.integrations.wandb", _set_api_key="api_key_file api_key"),
    *_names(
        "ray.air.integrations.wandb:WandbLoggerCallback",
        "_logger_actor_cls",
        _start_logging_actor="self trial exclude_results wandb_init_kwargs",
    ),
    *_names(
        "ray.air.integrations.wandb:_WandbLoggingActor", "_wandb", _handle_result="self result"
    ),
)


# Looked up only where Ray Serve, an extra of Ray's, is used.
SERVE_NAMES: tuple[PrivateName, ...] = (
    *_names("ray.serve.context:ReplicaContext", "_deployment_config"),
)


def check_ray(version: str = ray.__version__, names: Iterable[PrivateName] = PRIVATE_NAMES) -> None:
    """Warns of a version of Ray that was not tried, where all names are as they were.

    Raises:
        ImportError: they are not.
    """
    if version.startswith(f"{TRIED}."):
        return
    if problems := [problem for name in names if (problem := name.problem())]:
        raise ImportError(f"ray={version!r} must be {TRIED}, which this package was tried with: "
                          f"{'; '.join(problems)}. Install {REQUIREMENT!r}.")  # fmt: skip
    text = f"ray={version!r} was not tried with this package, {TRIED} was. Install {REQUIREMENT!r}."
    warnings.warn(text, stacklevel=3)
