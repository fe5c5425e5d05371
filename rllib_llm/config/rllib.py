"""RLlib's own settings that act here. Its others are refused where they differ from its default."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.env_runner import EnvRunner

from rllib_llm.shared.setting import Section, Setting

# YAML names -> the attributes in which RLlib keeps them.
RENAMED = {
    "callbacks": "callbacks_class",
    "custom_eval_function": "custom_evaluation_function",
    "framework": "framework_str",
    "input": "input_",
    "lambda": "lambda_",
    "learner_class": "_learner_class",
    "model_config": "_model_config",
    "rl_module_spec": "_rl_module_spec",
    "train_batch_size_per_learner": "_train_batch_size_per_learner",
}
# Names of Ray 2.40 and before, and what replaced them.
RETIRED = {
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_sgd_iter": "num_epochs",
    "sgd_minibatch_size": "minibatch_size",
    "evaluation_num_workers": "evaluation_num_env_runners",
    "num_envs_per_worker": "num_envs_per_env_runner",
    "num_learner_workers": "num_learners",
}
# Properties without a setter: here the attribute behind them is set.
READ_ONLY = ("learner_class", "model_config")


# How the lines below write a type.
_TYPES: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({
    "": {"type": Any},
    "env?": {"type": str | Callable | None, "remedy": "Write 'rllib_llm/RLHF-v0', or your class"},
    "learner?": {"type": type[Learner] | None},
    "sampler?": {"type": type[EnvRunner] | None},
    "callbacks?": {
        "type": type[RLlibCallback] | list | tuple | None,
        "remedy": "Write a class derived from RLlibCallback",
    },
    "count": {"type": int, "least": 0},
    "count?": {"type": int | None, "least": 0},
    "size": {"type": int, "least": 1},
    "size?": {"type": int | None, "least": 1},
    "amount": {"type": float, "least": 0},
    "amount?": {"type": float | None, "least": 0},
    "cpus": {"type": float | Literal["auto"], "least": 0},
    "bool": {"type": bool},
    "dict": {"type": dict},
    "dict?": {"type": dict | None},
    "model?": {"type": dict | DefaultModelConfig | None},
    "overlay?": {"type": dict | AlgorithmConfig | None, "remedy": "Write {explore: true}"},
    "text": {"type": str},
    "text?": {"type": str | None},
    "functions?": {
        "type": Callable | list | tuple | None, "remedy": "Write 'my_module.my_function'"
    },
    "seed?": {"type": int | None, "least": 0, "most": 2**32 - 1},  # numpy's
})  # fmt: skip


def _rows(rows: str) -> tuple[Setting, ...]:
    """One row for each line "name (type): meaning" of `rows`. They are checked here because RLlib
    checks few of them."""
    parts = (line.strip().partition(": ") for line in rows.strip().splitlines())
    return tuple(
        Setting(
            name=name,
            default=None,
            meaning=meaning,
            attribute=RENAMED.get(name, ""),
            **_TYPES[kind.strip("()")],
        )
        for head, _, meaning in parts
        for name, _, kind in [head.partition(" ")]
    )


COMMON = (
    Section("learners", "The processes that learn.", _rows("""
        num_learners (count): how many processes learn; 0: the driver's own does
        num_cpus_per_learner (cpus): the CPUs of each learner
        num_gpus_per_learner (amount): the GPUs of each learner, or a fraction of one
        custom_resources_per_learner (dict?): further resources of each learner
    """)),
    Section("training", "RLlib's own.", _rows("""
        learner_class (learner?): the Learner, instead of the algorithm's own
        learner_config_dict (dict?): settings for a Learner of your own
    """)),
    Section("framework", "torch and its compiler.", (
        Setting(name="framework", type=str, default="torch", meaning='"torch"', choices=("torch",),
                attribute="framework_str", reason="language models are computed by PyTorch here",
                remedy="Leave it out"),
        *_rows("""
        torch_compile_learner (bool): whether the learner's layers are compiled
        torch_compile_learner_dynamo_backend (text?): the compiler behind it
        torch_compile_learner_dynamo_mode (text?): the compiler's mode
    """),
    )),
    Section("evaluation", "Results on held-out rows.", _rows("""
        evaluation_interval (count?): the iterations between evaluations; None: never
        evaluation_duration (size): the held-out rows that an evaluation judges
        evaluation_config (overlay?): settings that evaluation has otherwise than training
        evaluation_error_after_n_consecutive_skips (size?): the skipped evaluations that end the run
    """)),
    Section("callbacks", "Functions of your own that are called.", _rows("""
        callbacks (callbacks?): a class, or several, of callbacks
        callbacks_on_algorithm_init (functions?): called when the algorithm was made
        callbacks_on_checkpoint_loaded (functions?): called when a checkpoint was loaded
        callbacks_on_evaluate_start (functions?): called before an evaluation
        callbacks_on_evaluate_end (functions?): called after an evaluation
        callbacks_on_train_result (functions?): called with every result
    """)),
    Section("resources", "What the driver's process reserves.", _rows("""
        num_cpus_for_main_process (amount): the CPUs, and threads, of the driver's process
        custom_resources_for_main_process (dict?): further resources of the driver's process
        placement_strategy (text): how a trial's processes are spread over nodes
    """)),
    Section("reporting", "How long an iteration is.", _rows("""
        min_time_s_per_iteration (amount?): the seconds that an iteration lasts at least
        min_train_timesteps_per_iteration (count?): the rows that an iteration trains on at least
        min_sample_timesteps_per_iteration (count?): the rows that an iteration samples at least
    """)),
    Section("debugging", "Seed and logs.", _rows("""
        seed (seed?): the seed of sampling, of the order of data and of dropout
        log_level (text): the level of RLlib's logger
        log_sys_usage (bool): whether CPU and memory are reported
    """)),
    Section("rl_module", "The network.", _rows("""
        rl_module_spec: the RLModule, instead of the algorithm's own
        model_config (model?): settings for an RLModule of your own
    """)),
)  # fmt: skip

ONLINE = (
    Section("environment", "Where prompts and rewards come from.", _rows("""
        env (env?): the environment's name, dotted path or class
        env_config (dict): the environment's settings
    """)),
    Section("env_runners", "The processes that sample.", _rows("""
        num_env_runners (count): how many processes sample; 0: the driver's own does
        num_cpus_per_env_runner (amount): the CPUs of each sampler
        num_gpus_per_env_runner (amount): the GPUs of each sampler, or a fraction of one
        custom_resources_per_env_runner (dict?): further resources of each sampler
        env_runner_cls (sampler?): the EnvRunner, a subclass of RLHFEnvRunner
        create_local_env_runner (bool): whether the driver's process samples beside remote ones
        explore (bool): whether an evaluation samples or takes likeliest tokens; training samples
    """)),
    Section("evaluation", "Results on held-out prompts.", _rows("""
        evaluation_num_env_runners (count): the processes that sample for evaluation
        custom_evaluation_function (functions?): what evaluates, instead of our own
    """)),
    Section("callbacks", "Functions of your own that are called.", _rows("""
        callbacks_on_env_runners_recreated (functions?): called when samplers were started again
        callbacks_on_environment_created (functions?): called when a sampler has its environment
        callbacks_on_sample_end (functions?): called when a sampler has answered
    """)),
    Section("fault_tolerance", "What happens to samplers that die.", _rows("""
        restart_failed_env_runners (bool): whether samplers that died are started again
        ignore_env_runner_failures (bool): whether the run goes on without them
        max_num_env_runner_restarts (count): how often they are started again
        delay_between_env_runner_restarts_s (amount): the seconds before a failed sampler may start
        num_consecutive_env_runner_failures_tolerance (count): the failures in a row that are borne
    """)),
)  # fmt: skip

_NO_EPISODES = "An episode is a whole completion: on_sample_end is given every batch of them"
_NO_CONNECTORS = "Batches are padded tensors from the sampler to the loss; leave it out"
# RLlib's names that act on nothing here, and others' -> what does instead, a sentence.
INSTEAD = {
    **dict.fromkeys(("on_episode_created", "on_episode_start", "on_episode_step",
                     "on_episode_end"), _NO_EPISODES),
    **dict.fromkeys(("learner_connector", "env_to_module_connector", "module_to_env_connector"),
                    _NO_CONNECTORS),
    "train_batch_size": "It is called 'train_batch_size_per_learner' here",
    "num_envs_per_env_runner": "'sampling_batch_size' is how many completions a sampler decodes at "
    "once",
    "rollout_fragment_length": "'train_batch_size_per_learner' is how many completions an "
    "iteration has",
    "shuffle_batch_per_epoch": "Mini-batches are drawn in a new order in every epoch; leave it out",
    "evaluation_parallel_to_training": "Evaluation takes its turn with training: set "
    "'evaluation_interval'",
    **dict.fromkeys(("evaluation_sample_timeout_s", "sample_timeout_s",
                     "env_runner_health_probe_timeout_s"),
                    "'sampler_timeout_s' is how long a sampler may take"),
    "env_runner_restore_timeout_s": "Nobody waits for a restarted sampler: a request brings the "
    "weights with it; leave it out",
    "algorithm_config_overrides_per_module": "One policy is trained, with the settings of the "
    "algorithm; leave it out",
    "policies": "One policy is trained; leave it out",
    "batch_mode": "An episode is a whole completion; leave it out",
    "num_gpus": "'num_gpus_per_learner' and 'num_gpus_per_env_runner' say who has GPUs",
    "model": "The network is a language model: set language_model(model=...), in YAML "
    "`model: folder`",
    "optimizer": "'lr', 'adam_betas', 'adam_epsilon' and 'weight_decay' are the optimiser's",
    "clip_rewards": "'score_clip' holds scores to a range",
    "exploration_config": "'temperature', 'top_p' and 'top_k' say how completions are sampled",
    "observation_filter": "Prompts are token ids, with nothing to filter; leave it out",
    "max_tokens": "'max_new_tokens' is the length of a completion; that of a whole conversation is "
    "written `conversation: {max_tokens: ...}`",
    # What others set in their config, and what it is part of here.
    "warmup_ratio": "'lr_num_warmup_updates' counts optimiser steps: write that share of all "
    "that the run takes",
    "num_train_epochs": "A run ends by its results: stop={'epoch': 3}",
    "total_episodes": "A run ends by its results: stop={'episode': 10000}",
    "max_steps": "A run ends by its results: stop={'training_iteration': 100}",
    "output_dir": "Results go to storage_path, or --storage-path",
    "save_steps": "Checkpoints are Tune's: checkpoint_config={'checkpoint_frequency': 10}",
    "save_total_limit": "Checkpoints are Tune's: checkpoint_config={'num_to_keep': 2}",
    "eval_steps": "Set evaluation_interval, in iterations",
    "eval_strategy": "Set evaluation_interval, in iterations",
    "per_device_eval_batch_size": "Set evaluation_duration, in rows",
    "per_device_train_batch_size": "It is called 'micro_batch_size' here; the rows of an optimiser "
    "step, that times gradient_accumulation_steps, are 'minibatch_size'",
    "gradient_accumulation_steps": "Set 'minibatch_size', the rows of an optimiser step: "
    "per_device_train_batch_size times gradient_accumulation_steps",
    "report_to": "Trackers stand beside the config: `trackers: [wandb]`",
    "logging_steps": "Every iteration is logged; leave it out",
    "torch_compile_worker": "Decoding has a loop of its own; leave it out",
    "torch_compile_learner_what_to_compile": "The trunk's layers are compiled; leave it out",
    **dict.fromkeys(("extra_python_environs_for_driver", "extra_python_environs_for_worker"),
                    "Set environment variables before Ray starts, or in its runtime_env"),
    "autocast_dtype": "It is mixed_precision='bf16' now",
    "bf16": "It is mixed_precision='bf16' here",
    "fp16": "Losses are not scaled for float16: use mixed_precision='bf16'",
    "tokenizer": "It comes with the model; another is set in env_config: {tokenizer: ...}",
    "use_vllm": "It is engine='vllm' here",
    "fit": "A run is ray.tune.Tuner(NAME, param_space=config).fit()",
    "train": "Make the algorithm first: config.build_algo().train()",
    "importance_sampling_level": "The ratio of the loss is chosen by policy_loss ('gspo' has the "
    "completion's); of the weights that correct older data it is called 'off_policy_level' here",
}
