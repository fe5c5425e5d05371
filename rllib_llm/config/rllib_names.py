"""RLlib's own names of settings: those that YAML writes otherwise, and those that are retired."""

from __future__ import annotations

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
