"""Every name of Ray that is not public and that the package touches: what `ray_compat.py` reaches
into, and what the package's classes inherit from Ray's, use or override."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any


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
    *_names(
        "ray.tune.execution.tune_controller:TuneController",
        "_cached_trial_decisions", "_queued_trial_decisions",
    ),
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
