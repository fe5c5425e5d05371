"""Settings of sampling (RL and `rllib generate`) and of stored rollouts."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting
from rllib_llm.config.tables.model import StartingPoint

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


class Drawn(Settings):
    """How a text is drawn."""

    temperature: float = setting(
        1.0,
        "what logits are divided by, in the sampler and in the loss",
        above=0,
        also=("temp",),
        reason="logits are divided by it",
        remedy="To sample greedily, set top_k: 1 and leave temperature at 1",
    )
    top_p: float = setting(
        1.0,
        "the probability mass of the likeliest tokens that stay",
        note="1.0: off, which keeps sampling on-policy.",
        above=0,
        most=1,
        reason="it is a probability mass",
        remedy="Use 1.0 to switch it off",
    )
    top_k: int = setting(
        0,
        "how many of the likeliest tokens stay",
        note="0: off, which keeps sampling on-policy; 1: greedy.",
        unit="tokens",
        least=0,
        remedy="Use 0 to switch it off",
    )
    min_new_tokens: int = setting(
        0,
        "the shortest completion, EOS included",
        unit="tokens",
        least=0,
        also=("min_tokens", "min_length"),
    )
    max_new_tokens: int = setting(
        64,
        "the longest completion, EOS included",
        unit="tokens",
        least=1,
        trl=("max_completion_length",),
        also=(
            "max_tokens",
            "response_length",
            "max_response_length",
            "generate_max_len",
            "max_output_length",
            "max_completion_len",
        ),
    )
    stop_token_ids: list[int] | None = setting(
        None,
        "what ends a completion",
        note="None: all EOS ids of the model.",
        unit="token ids",
        also=("eos_token_id", "stop_token_id", "stop_tokens"),
        reason="any of them ends a completion",
        remedy="Write [2] for a single one",
    )


class Sampling(Drawn):
    """How completions are sampled."""

    num_completions: int = setting(
        1,
        "how many completions each prompt gets",
        note="Group algorithms need at least 2.",
        least=1,
        trl=("num_generations",),
        also=(
            "rloo_k",
            "group_size",
            "n_samples_per_prompt",
            "rollout_n",
            "num_samples",
            "n",
            "num_return_sequences",
        ),
        remedy="Use 1 for a single one",
    )
    sampling_batch_size: int | None = setting(
        None,
        "how many completions a sampler decodes at once",
        note="The next prompts take the places of those that have ended; None: all that fit.",
        least=1,
        rllib=("num_envs_per_env_runner",),
        also=("max_num_seqs", "micro_rollout_batch_size", "local_rollout_forward_batch_size"),
        reason=COUNTS,
        remedy="Raise it",
    )
    sampling_parts: int | None = setting(
        None,
        "how many parts the prompts of an iteration are cut into, each for one sampler",
        note="It bounds how many samplers a run can be scaled to while it goes on (`rllib "
        "scale`): the parts stay as they are, and with them what is learnt, bit for bit. None: "
        "one for each of num_env_runners.",
        least=1,
        reason=COUNTS,
        remedy="Use the most samplers that the run may grow to",
    )
    cuda_graphs: bool = setting(
        True,
        "whether the decode steps of Llama-shaped models are recorded on a CUDA device "
        "and replayed",
        note="False launches each operation by itself. No effect on a CPU.",
        acts=(TORCH_SAMPLES,),
        also=("enforce_eager",),
    )
    engine: Literal["torch", "vllm", "openai"] = setting(
        "torch",
        "what generates in remote samplers",
        note='"torch" is our decode loop; "openai", a server with that interface, is for '
        "evaluation, in `evaluation_config`, and with `endpoint: tokens` among its "
        "engine_settings for training: such a server gives token ids, log-probs and versions "
        "of the weights that it follows. A sampler in the driver's process shares "
        'the learner\'s module and generates with "torch" instead of "vllm".',
        acts=(OWN_MODULE,),
        trl=("use_vllm",),
        also=("backend", "rollout_engine"),
        remedy="Use 'torch'",
    )
    engine_settings: dict[str, Any] | None = setting(
        None,
        "further arguments of `VLLMEngine`, `OpenAICompletions` or, with `endpoint: "
        "tokens`, `TokenCompletions`",
        acts=(ENGINE_OF_ITS_OWN,),
        also=("vllm_kwargs", "engine_kwargs"),
        remedy="Write it as {name: value}",
    )
    generate_function: str | None = setting(
        None,
        "the dotted path of a function that makes the completions of a prompt, in the "
        "place of plain sampling",
        note="It may be async; see `rllib_llm.rollouts.foreign_policies`. It can ask the policy, "
        "and what it returns is checked.",
        acts=(TORCH_GENERATES,),
        also=("rollout_function", "rollout_func", "custom_generate_function_path"),
        remedy="Write 'my_module.my_function'",
    )
    pass_at: list[int] | None = setting(
        None,
        "the k of pass@k, pass^k and maj@k among the held-out results",
        note="Of what `pass_on` says, with intervals; wants an evaluation_config with explore: "
        "true and at least k for num_completions. None: none.",
        unit="completions",
        reason="each is a number of completions of a prompt",
        remedy="Write [1, 4]",
    )
    pass_on: str | None = setting(
        None,
        "the component of the reward, 0 or 1, that says what has passed",
        note="None: the score itself.",
    )
    answer_pattern: str | None = setting(
        None,
        "the regular expression of what a completion votes for in maj@k",
        note="The first group of its last match, or all of the match; a completion without one "
        "votes for nothing that is right. None: all that the completion says.",
        remedy="Write '<answer>(.*?)</answer>'",
    )
    eval_envs: dict[str, dict[str, Any]] | None = setting(
        None,
        "further environments with held-out results, by name: eval/<name>/<metric>",
        note="Each of {env, env_config, evaluation_duration, pass_at, ...}, laid over "
        "`evaluation_config`. None: training's environment alone.",
        remedy="Write {hard: {env_config: {digits: 4}}}",
    )
    log_samples_every: int = setting(
        10,
        "how far training samples in samples.jsonl are apart",
        note="Before the first ten, say, those of iterations 1, 2, 3, 5 and 9 too. 0: none.",
        unit="iterations",
        least=0,
        trl=("log_completions",),
        reason="it counts",
        remedy="Use 0 for none",
    )
    num_logged_samples: int = setting(
        8,
        "how much is written to samples.jsonl each time",
        unit="rows",
        least=0,
        trl=("num_completions_to_print",),
        reason="it counts",
        remedy="Use 0 for none",
    )


SAMPLING = Section.of("sampling", Sampling, positional="num_completions")


class Generate(Drawn):
    """How texts are sampled."""

    opening_tokens: int | None = setting(
        None,
        "what of a text makes its `prompt`, less a word that is cut",
        note="None: no prompts.",
        unit="tokens",
        least=1,
    )
    eval_fraction: float = setting(
        0.0,
        "the share of the texts that go to eval.jsonl",
        note="Texts of the same opening stay together.",
    )
    batch_size: int = setting(
        64, "how many texts one iteration samples at once", least=1, remedy="Use 64"
    )
    num_gpus: float = setting(
        0, "how many GPUs the process that samples has", note="0: it samples on the CPU.", least=0
    )


GENERATE = Section.of("sampling", Generate)


class GenerateModel(StartingPoint):
    """The model that samples the texts."""

    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "what the weights are kept in"
    )


GENERATE_MODEL = Section.of("language_model", GenerateModel)


class GenerateSeed(Settings):
    """Seed."""

    seed: int = setting(0, "the seed of the texts")


GENERATE_SEED = Section.of("debugging", GenerateSeed)


STORED = Condition("store_rollouts is on", lambda c: c.store_rollouts, "with store_rollouts=False")


class Rollouts(Settings):
    """Storage of rollouts."""

    store_rollouts: bool = setting(
        True,
        "whether every completion is kept as a row of Parquet in the trial's folder",
        note="Trained, rejected, failed and held-out ones, with tokens, log-probs, rewards and "
        "advantages, written in the background: `rllib rollouts RUN` shows them.",
        short="store",
    )
    store_on_error: Literal["go_on", "stop"] = setting(
        "go_on",
        "what a run does when rollouts cannot be written, the disk being full, say",
        note='"go_on": it says so once and keeps no more; "stop": it ends with the error.',
        acts=(STORED,),
        short="on_error",
    )
    store_keep_iterations: int | None = setting(
        None,
        "rollouts of so many iterations are kept, the newest; older files are removed",
        note="None: of all iterations.",
        least=1,
        acts=(STORED,),
        short="keep_iterations",
    )


ROLLOUTS = Section.of("rollouts", Rollouts)
