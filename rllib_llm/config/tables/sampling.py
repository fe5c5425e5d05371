"""How completions are sampled, by RL and by `rllib generate`'s algorithm."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.setting import Condition, Section, Setting

ENGINE_OF_ITS_OWN = Condition(
    "engine is 'vllm' or 'openai'",
    lambda c: c.engine != "torch",
    "with engine='torch'",
    "Choose 'vllm', or remove it",
)
TORCH_SAMPLES = Condition(
    "engine is 'torch'",
    lambda c: c.engine == "torch" or not (c.in_evaluation or c.num_env_runners),
    "with engine={config.engine!r}",
)
OWN_MODULE = Condition(
    "num_env_runners is 1 or more, or engine is 'torch'",
    lambda c: c.engine != "vllm" or bool(c.in_evaluation or c.num_env_runners),
    "with num_env_runners=0: sampler and learner share one module",
    "Use 1 or more",
)
TORCH_GENERATES = Condition(
    "engine is 'torch'",
    lambda c: c.engine == "torch",
    "with engine={config.engine!r}",
    "Use engine='torch'",
)
COUNTS = "it counts completions"

TEMPERATURE = Setting(
    name="temperature",
    type=float,
    default=1.0,
    above=0,
    meaning="what logits are divided by, in the sampler and in the loss",
    reason="logits are divided by it",
    remedy="To sample greedily, set top_k: 1 and leave temperature at 1",
    also=("temp",),
)
TOP_P = Setting(
    name="top_p",
    type=float,
    default=1.0,
    above=0,
    most=1,
    meaning="the probability mass of the likeliest tokens that stay",
    note="1.0: off, which keeps sampling on-policy.",
    reason="it is a probability mass",
    remedy="Use 1.0 to switch it off",
)
TOP_K = Setting(
    name="top_k",
    type=int,
    default=0,
    least=0,
    unit="tokens",
    meaning="how many of the likeliest tokens stay",
    note="0: off, which keeps sampling on-policy; 1: greedy.",
    remedy="Use 0 to switch it off",
)
MIN_NEW_TOKENS = Setting(
    name="min_new_tokens",
    type=int,
    default=0,
    least=0,
    unit="tokens",
    meaning="the shortest completion, EOS included",
    also=("min_tokens", "min_length"),
)
MAX_NEW_TOKENS = Setting(
    name="max_new_tokens",
    type=int,
    default=64,
    least=1,
    unit="tokens",
    meaning="the longest completion, EOS included",
    trl=("max_completion_length",),
    also=("max_tokens", "response_length", "max_response_length", "generate_max_len",
          "max_output_length", "max_completion_len"),
)  # fmt: skip
STOP_TOKEN_IDS = Setting(
    name="stop_token_ids",
    type=list[int] | None,
    default=None,
    unit="token ids",
    meaning="what ends a completion",
    note="None: all EOS ids of the model.",
    reason="any of them ends a completion",
    remedy="Write [2] for a single one",
    also=("eos_token_id", "stop_token_id", "stop_tokens"),
)

SAMPLING = Section(
    "sampling",
    "How completions are sampled.",
    (
        Setting(
            name="num_completions",
            type=int,
            default=1,
            least=1,
            meaning="how many completions each prompt gets",
            note="Group algorithms need at least 2.",
            remedy="Use 1 for a single one",
            trl=("num_generations",),
            also=("rloo_k", "group_size", "n_samples_per_prompt", "rollout_n", "num_samples", "n",
                  "num_return_sequences"),
        ),
        TEMPERATURE,
        TOP_P,
        TOP_K,
        MIN_NEW_TOKENS,
        MAX_NEW_TOKENS,
        STOP_TOKEN_IDS,
        Setting(
            name="sampling_batch_size",
            type=int | None,
            default=None,
            least=1,
            meaning="how many completions a sampler decodes at once",
            note="The next prompts take the places of those that have ended; None: all that fit.",
            reason=COUNTS,
            remedy="Raise it",
            rllib=("num_envs_per_env_runner",),
            also=("max_num_seqs", "micro_rollout_batch_size", "local_rollout_forward_batch_size"),
        ),
        Setting(
            name="sampling_parts",
            type=int | None,
            default=None,
            least=1,
            meaning="how many parts the prompts of an iteration are cut into, each for one sampler",
            note="It bounds how many samplers a run can be scaled to while it goes on (`rllib "
            "scale`): the parts stay as they are, and with them what is learnt, bit for bit. None: "
            "one for each of num_env_runners.",
            reason=COUNTS,
            remedy="Use the most samplers that the run may grow to",
        ),
        Setting(
            name="cuda_graphs",
            type=bool,
            default=True,
            meaning="whether the decode steps of Llama-shaped models are recorded on a CUDA device "
            "and replayed",
            note="False launches each operation by itself. No effect on a CPU.",
            acts=(TORCH_SAMPLES,),
            also=("enforce_eager",),
        ),
        Setting(
            name="engine",
            type=str,
            default="torch",
            choices=("torch", "vllm", "openai"),
            meaning="what generates in remote samplers",
            note='"torch" is our decode loop; "openai", a server with that interface, is for '
            "evaluation, in `evaluation_config`, and with `endpoint: tokens` among its "
            "engine_settings for training: such a server gives token ids, log-probs and versions "
            "of the weights that it follows. A sampler in the driver's process shares "
            'the learner\'s module and generates with "torch" instead of "vllm".',
            remedy="Use 'torch'",
            acts=(OWN_MODULE,),
            trl=("use_vllm",),
            also=("backend", "rollout_engine"),
        ),
        Setting(
            name="engine_settings",
            type=dict[str, Any] | None,
            default=None,
            meaning="further arguments of `VLLMEngine`, `OpenAICompletions` or, with `endpoint: "
            "tokens`, `TokenCompletions`",
            remedy="Write it as {name: value}",
            acts=(ENGINE_OF_ITS_OWN,),
            also=("vllm_kwargs", "engine_kwargs"),
        ),
        Setting(
            name="generate_function",
            type=str | None,
            default=None,
            meaning="the dotted path of a function that makes the completions of a prompt, in the "
            "place of plain sampling",
            note="It may be async; see `rllib_llm.rollouts.own_generation`. It can ask the policy, "
            "and what it returns is checked.",
            remedy="Write 'my_module.my_function'",
            acts=(TORCH_GENERATES,),
            also=("rollout_function", "rollout_func", "custom_generate_function_path"),
        ),
        Setting(
            name="pass_at",
            type=list[int] | None,
            default=None,
            unit="completions",
            meaning="the k of pass@k, pass^k and maj@k among the held-out results",
            note="Of what `pass_on` says, with intervals; wants an evaluation_config with explore: "
            "true and at least k for num_completions. None: none.",
            reason="each is a number of completions of a prompt",
            remedy="Write [1, 4]",
        ),
        Setting(
            name="pass_on",
            type=str | None,
            default=None,
            meaning="the component of the reward, 0 or 1, that says what has passed",
            note="None: the score itself.",
        ),
        Setting(
            name="answer_pattern",
            type=str | None,
            default=None,
            meaning="the regular expression of what a completion votes for in maj@k",
            note="The first group of its last match, or all of the match; a completion without one "
            "votes for nothing that is right. None: all that the completion says.",
            remedy="Write '<answer>(.*?)</answer>'",
        ),
        Setting(
            name="eval_envs",
            type=dict[str, dict[str, Any]] | None,
            default=None,
            meaning="further environments with held-out results, by name: eval/<name>/<metric>",
            note="Each of {env, env_config, evaluation_duration, pass_at, ...}, laid over "
            "`evaluation_config`. None: training's environment alone.",
            remedy="Write {hard: {env_config: {digits: 4}}}",
        ),
        Setting(
            name="log_samples_every",
            type=int,
            default=10,
            least=0,
            unit="iterations",
            meaning="how far training samples in samples.jsonl are apart",
            note="Before the first ten, say, those of iterations 1, 2, 3, 5 and 9 too. 0: none.",
            reason="it counts",
            remedy="Use 0 for none",
            trl=("log_completions",),
        ),
        Setting(
            name="num_logged_samples",
            type=int,
            default=8,
            least=0,
            unit="rows",
            meaning="how much is written to samples.jsonl each time",
            reason="it counts",
            remedy="Use 0 for none",
            trl=("num_completions_to_print",),
        ),
    ),
)  # fmt: skip

DTYPE = Setting(
    name="dtype",
    type=str,
    default="float32",
    choices=("float32", "bfloat16", "float16"),
    meaning="what the weights are kept in",
)
SEED = Setting(name="seed", type=int, default=0, meaning="the seed of the texts")
GENERATE = Section(
    "sampling",
    "How texts are sampled.",
    (
        TEMPERATURE,
        TOP_P,
        TOP_K,
        MIN_NEW_TOKENS,
        MAX_NEW_TOKENS,
        STOP_TOKEN_IDS,
        Setting(
            name="opening_tokens",
            type=int | None,
            default=None,
            least=1,
            unit="tokens",
            meaning="what of a text makes its `prompt`, less a word that is cut",
            note="None: no prompts.",
        ),
        Setting(
            name="eval_fraction",
            type=float,
            default=0.0,
            meaning="the share of the texts that go to eval.jsonl",
            note="Texts of the same opening stay together.",
        ),
        Setting(
            name="batch_size",
            type=int,
            default=64,
            least=1,
            meaning="how many texts one iteration samples at once",
            remedy="Use 64",
        ),
        Setting(
            name="num_gpus",
            type=float,
            default=0,
            least=0,
            meaning="how many GPUs the process that samples has",
            note="0: it samples on the CPU.",
        ),
    ),
)
