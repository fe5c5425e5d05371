"""RLlib's own settings that act here. Its others are refused where they differ from its default."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from rllib_llm.config.schema import RENAMED
from rllib_llm.config.setting import Condition, Section, Setting

NOT_HERE = Condition("never", lambda c: False, "here: decoding has a loop of its own", never=True)
LAYERS = Condition(
    "never", lambda c: False, "here: it is the trunk's layers that are compiled", never=True
)


# How the lines below write a type.
_TYPES: Mapping[str, Any] = types.MappingProxyType({
    "": Any,
    " (int)": int,
    " (int?)": int | None,
    " (float)": float,
    " (float?)": float | None,
    " (bool)": bool,
})  # fmt: skip


def _rows(rows: str) -> tuple[Setting, ...]:
    """One row for each line "name (type): meaning" of `rows`. Types are checked here because RLlib
    checks few of them; ranges are left to RLlib."""
    parts = (line.strip().partition(": ") for line in rows.strip().splitlines())
    return tuple(
        Setting(
            name=name,
            type=_TYPES[kind],
            default=None,
            meaning=meaning,
            attribute=RENAMED.get(name, ""),
            remedy="Leave it out for RLlib's default",
        )
        for head, _, meaning in parts
        for name, space, of_type in [head.partition(" ")]
        for kind in [space + of_type]
    )


COMMON = (
    Section("learners", "The processes that learn.", _rows("""
        num_learners (int): how many processes learn; 0: the driver's own does
        num_cpus_per_learner: the CPUs of each learner
        num_gpus_per_learner (float): the GPUs of each learner, or a fraction of one
        custom_resources_per_learner: further resources of each learner
    """)),
    Section("training", "RLlib's own.", _rows("""
        learner_class: the Learner, instead of the algorithm's own
        learner_config_dict: settings for a Learner of your own
    """)),
    Section("framework", "torch and its compiler.", (*_rows("""
        framework: "torch"
        torch_compile_learner (bool): whether the learner's layers are compiled
        torch_compile_learner_dynamo_backend: the compiler behind it
        torch_compile_learner_dynamo_mode: the compiler's mode
    """),
        Setting(name="torch_compile_worker", type=Any, default=None,
                meaning="whether decoding is compiled", acts=(NOT_HERE,)),
        Setting(name="torch_compile_learner_what_to_compile", type=Any, default=None,
                meaning="what is compiled", acts=(LAYERS,)),
    )),
    Section("evaluation", "Results on held-out rows.", _rows("""
        evaluation_interval (int?): the iterations between evaluations; None: never
        evaluation_duration (int): the held-out rows that an evaluation judges
        evaluation_config: settings that evaluation has otherwise than training
        evaluation_error_after_n_consecutive_skips (int?): the skipped evaluations that end the run
    """)),
    Section("callbacks", "Functions of your own that are called.", _rows("""
        callbacks: a class, or several, of callbacks
        callbacks_on_algorithm_init: called when the algorithm was made
        callbacks_on_checkpoint_loaded: called when a checkpoint was loaded
        callbacks_on_evaluate_start: called before an evaluation
        callbacks_on_evaluate_end: called after an evaluation
        callbacks_on_train_result: called with every result
    """)),
    Section("resources", "What the driver's process reserves.", _rows("""
        num_cpus_for_main_process (float): the CPUs, and threads, of the driver's process
        custom_resources_for_main_process: further resources of the driver's process
        placement_strategy: how a trial's processes are spread over nodes
    """)),
    Section("reporting", "How long an iteration is.", _rows("""
        min_time_s_per_iteration (float?): the seconds that an iteration lasts at least
        min_train_timesteps_per_iteration (int?): the rows that an iteration trains on at least
        min_sample_timesteps_per_iteration (int?): the rows that an iteration samples at least
    """)),
    Section("debugging", "Seed and logs.", _rows("""
        seed (int?): the seed of sampling, of the order of data and of dropout
        log_level: the level of RLlib's logger
        log_sys_usage (bool): whether CPU and memory are reported
    """)),
    Section("python_environment", "Environment variables.", _rows("""
        extra_python_environs_for_driver: environment variables of the driver's process
        extra_python_environs_for_worker: environment variables of other processes
    """)),
    Section("rl_module", "The network.", _rows("""
        rl_module_spec: the RLModule, instead of the algorithm's own
        model_config: settings for an RLModule of your own
    """)),
)  # fmt: skip

ONLINE = (
    Section("environment", "Where prompts and rewards come from.", _rows("""
        env: the environment's name, dotted path or class
        env_config: the environment's settings
    """)),
    Section("env_runners", "The processes that sample.", _rows("""
        num_env_runners (int): how many processes sample; 0: the driver's own does
        num_cpus_per_env_runner (float): the CPUs of each sampler
        num_gpus_per_env_runner (float): the GPUs of each sampler, or a fraction of one
        custom_resources_per_env_runner: further resources of each sampler
        env_runner_cls: the EnvRunner, a subclass of RLHFEnvRunner
        create_local_env_runner (bool): whether the driver's process samples beside remote ones
        validate_env_runners_after_construction (bool): whether samplers are asked when made
        max_requests_in_flight_per_env_runner (int): the requests that wait at a sampler at most
        explore (bool): whether completions are sampled; False: the likeliest token each time
    """)),
    Section("evaluation", "Results on held-out prompts.", _rows("""
        evaluation_duration_unit: "episodes"
        evaluation_num_env_runners (int): the processes that sample for evaluation
        custom_evaluation_function: what evaluates, instead of our own
    """)),
    Section("callbacks", "Functions of your own that are called.", _rows("""
        callbacks_on_env_runners_recreated: called when samplers were started again
        callbacks_on_environment_created: called when a sampler has made its environment
        callbacks_on_sample_end: called when a sampler has answered
    """)),
    Section("fault_tolerance", "What happens to samplers that die.", _rows("""
        restart_failed_env_runners (bool): whether samplers that died are started again
        ignore_env_runner_failures (bool): whether the run goes on without them
        max_num_env_runner_restarts (int): how often they are started again
        delay_between_env_runner_restarts_s (float): the seconds before a failed sampler may start
        num_consecutive_env_runner_failures_tolerance (int): the failures in a row that are borne
    """)),
)  # fmt: skip

# RLlib's names that act on nothing here -> what does instead, a sentence.
INSTEAD = {
    "train_batch_size": "It is called 'train_batch_size_per_learner' here",
    "num_envs_per_env_runner": "'sampling_batch_size' is how many completions a sampler decodes at "
    "once",
    "rollout_fragment_length": "'train_batch_size_per_learner' is how many completions an "
    "iteration has",
    "shuffle_batch_per_epoch": "Mini-batches are drawn in a new order in every epoch; leave it out",
    "evaluation_parallel_to_training": "Evaluation takes its turn with training: set "
    "'evaluation_interval'",
    "evaluation_sample_timeout_s": "'sampler_timeout_s' is how long a sampler may take",
    "sample_timeout_s": "'sampler_timeout_s' is how long a sampler may take",
    "env_runner_health_probe_timeout_s": "'sampler_timeout_s' is how long a sampler may take",
    "env_runner_restore_timeout_s": "Nobody waits for a restarted sampler: a request brings the "
    "weights with it; leave it out",
    "algorithm_config_overrides_per_module": "One policy is trained, with the settings of the "
    "algorithm; leave it out",
    "batch_mode": "An episode is a whole completion; leave it out",
    "num_gpus": "'num_gpus_per_learner' and 'num_gpus_per_env_runner' say who has GPUs",
    "model": "The network is a language model: set language_model(model=...), in YAML "
    "`model: folder`",
    "optimizer": "'lr', 'adam_betas', 'adam_epsilon' and 'weight_decay' are the optimiser's",
    "clip_rewards": "'score_clip' holds scores to a range",
    "exploration_config": "'temperature', 'top_p' and 'top_k' say how completions are sampled",
    "observation_filter": "Prompts are token ids, with nothing to filter; leave it out",
}
