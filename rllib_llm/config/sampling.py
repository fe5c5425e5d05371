"""Settings of sampling (RL and `rllib generate`) and of stored rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rllib_llm.config.model import StartingPoint
from rllib_llm.config.sections import wrong
from rllib_llm.config.tabled_config import flattened
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import ENGINES, Engine, engine_class
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import Condition, Section, Settings, setting, when


def engine_of(config: Any) -> type[Engine] | None:
    """The class of the engine that a config has chosen, None for the module's own, which takes
    seconds to import."""
    return None if config.engine == "torch" else engine_class(config.engine)


def asks_a_server(config: Any) -> bool:
    """Whether an engine with weights of its own generates, in training or in evaluation."""
    held_out = dict(config.evaluation_config or {})
    chosen = {config.engine, held_out.get("engine", "torch")} - {"torch"}
    return any(not engine_class(name).takes_weights for name in chosen)


def takes_rows(config: Any) -> bool:
    """Whether rows may enter the engine at any step."""
    engine = engine_of(config)
    return engine is None or engine.takes_rows


ENGINE_OF_ITS_OWN = when(
    "engine", "is not 'torch'", lambda e: e != "torch", "Choose 'vllm', or remove it"
)
TORCH_SAMPLES = Condition(
    "engine is 'torch'",
    lambda c: c.engine == "torch" or not (c.in_evaluation or c.num_env_runners),
    "with engine={config.engine!r}",
)
OWN_MODULE = Condition(
    "num_env_runners is 1 or more, or engine is 'torch'",
    lambda c: (c.in_evaluation or c.num_env_runners or c.engine == "torch"
               or not engine_class(c.engine).takes_weights),
    "with num_env_runners=0: sampler and learner share one module", "Use 1 or more",
)  # fmt: skip
TORCH_GENERATES = when(
    "engine", "is 'torch'", lambda engine: engine == "torch", "Use engine='torch'"
)


PASS_AT = Condition(  # by the config, its evaluation_config or one of its eval_envs
    "pass_at is set",
    lambda c: bool(c.pass_at) or "pass_at" in repr((c.evaluation_config, c.eval_envs)),
    "without pass_at", "Set pass_at: [1], or remove it",
)  # fmt: skip


class Drawn(Settings):
    """How a text is drawn."""

    temperature: float = setting(
        1.0, "the divisor of logits, in the sampler and in the loss", above=0, also="temp",
        reason="logits are divided by it", remedy="To sample greedily, set top_k: 1 and leave "
        "temperature at 1",
    )  # fmt: skip
    top_p: float = setting(
        1.0, "the total probability of the likeliest tokens that are sampled from",
        note="1.0: off, which keeps sampling on-policy.", above=0, most=1,
        reason="it is a probability mass", remedy="Use 1.0 to switch it off",
    )  # fmt: skip
    top_k: int = setting(
        0, "the number of likeliest tokens that are sampled from",
        note="0: off, which keeps sampling on-policy; 1: greedy.", unit="tokens", least=0,
    )  # fmt: skip
    min_new_tokens: int = setting(
        0, "the minimum length of a completion, EOS included", unit="tokens", least=0,
        also="min_tokens min_length",
    )  # fmt: skip
    max_new_tokens: int = setting(
        64, "the maximum length of a completion, EOS included", unit="tokens", least=1,
        trl="max_completion_length", also="max_tokens response_length max_response_length "
        "generate_max_len max_output_length max_completion_len",
    )  # fmt: skip
    stop_token_ids: list[int] | None = setting(
        None, "the tokens that end a completion", note="None: all EOS ids of the model.",
        unit="token ids", also="eos_token_id stop_token_id stop_tokens",
        remedy="Write [2] for a single one",
    )  # fmt: skip


class Sampling(Drawn):
    """How completions are sampled."""

    num_completions: int = setting(
        1, "the number of completions per prompt", note="Group algorithms need at least 2.",
        least=1, trl="num_generations", also="rloo_k group_size n_samples_per_prompt rollout_n "
        "num_samples n num_return_sequences",
    )  # fmt: skip
    sampling_batch_size: int | None = setting(
        None, "the number of completions that a sampler decodes at once",
        note="None: as many as fit.", least=1, rllib="num_envs_per_env_runner",
        also="max_num_seqs micro_rollout_batch_size local_rollout_forward_batch_size",
    )  # fmt: skip
    sampling_parts: int | None = setting(
        None, "the number of parts into which an iteration's prompts are split, each for one "
        "sampler", note="What is learnt depends on it, and a run can be scaled up to so many "
        "samplers (`rllib scale`). None: num_env_runners.", least=1,
    )  # fmt: skip
    cuda_graphs: bool = setting(
        True, "whether decode steps of Llama-shaped models are recorded as CUDA graphs",
        acts=(TORCH_SAMPLES,), also="enforce_eager",
    )  # fmt: skip
    engine: str = setting(
        "torch", "the engine of remote samplers", choices=tuple(ENGINES), or_dotted=True,
        note='"openai": a server with that interface, for evaluation (in `evaluation_config`), or '
        "with `endpoint: tokens` in engine_settings for training, where it returns token ids, "
        "log-probs and the versions of the weights that it follows; a dotted path: a class of your "
        "own, derived from `rllib_llm.engines.protocol.Engine`. A sampler in the driver's process "
        'uses "torch".', acts=(OWN_MODULE,), trl="use_vllm", also="backend rollout_engine",
    )  # fmt: skip
    engine_settings: dict[str, Any] | None = setting(
        None, "arguments of `VLLMEngine`, `OpenAICompletions` or, with `endpoint: tokens`, "
        "`TokenCompletions`, or of your own class", acts=(ENGINE_OF_ITS_OWN,),
        also="vllm_kwargs engine_kwargs", remedy="Write it as {name: value}",
    )  # fmt: skip
    generate_function: str | None = setting(
        None, "the dotted path of a function that generates a prompt's completions, instead of "
        "plain sampling", note="It may be async and can query the policy; its results are checked. "
        "See `rllib_llm.rollouts.generate_function`.", acts=(TORCH_GENERATES,),
        also="rollout_function rollout_func custom_generate_function_path",
        remedy="Write 'my_module.my_function'",
    )  # fmt: skip
    pass_at: list[int] | None = setting(
        None, "the k of pass@k, pass^k and maj@k in evaluations",
        note="Computed from `pass_on`, with intervals; needs an evaluation_config with explore: "
        "true and num_completions of at least k. None: none.", unit="completions",
        remedy="Write [1, 4]",
    )  # fmt: skip
    pass_on: str | None = setting(
        None, "the reward component, 0 or 1, that decides what passes",
        note="None: the score itself.", acts=(PASS_AT,),
    )  # fmt: skip
    answer_pattern: str | None = setting(
        None, "the regular expression of the answer for which a completion votes in maj@k",
        note="The first group of its last match, or the whole match. None: the whole completion.",
        acts=(PASS_AT,), remedy="Write '<answer>(.*?)</answer>'",
    )  # fmt: skip
    eval_envs: dict[str, dict[str, Any]] | None = setting(
        None, "additional evaluation environments by name: eval/<name>/<metric>",
        note="Each is {env, env_config, pass_at, ...}, merged over `evaluation_config`.",
        remedy="Write {hard: {env_config: {digits: 4}}}",
    )  # fmt: skip
    log_samples_every: int = setting(
        10, "the interval between training samples in samples.jsonl",
        note="More of them early on. 0: none.", unit="iterations", least=0, trl="log_completions",
        remedy="Write 10, or 0 for none",
    )  # fmt: skip
    num_logged_samples: int = setting(
        8, "the number of rows written to samples.jsonl each time",
        unit="rows", least=0, trl="num_completions_to_print",
    )  # fmt: skip


SAMPLING = Section.of("sampling", Sampling, positional="num_completions")


class Generate(Drawn):
    """How texts are sampled."""

    opening_tokens: int | None = setting(
        None, "the number of a text's first tokens that become its `prompt`, without a cut word",
        note="None: no prompts.", unit="tokens", least=1,
    )  # fmt: skip
    eval_fraction: float = setting(
        0.0, "the share of the texts written to eval.jsonl",
        note="Texts with the same opening stay together.", least=0, most=1,
    )  # fmt: skip
    batch_size: int = setting(
        64, "the number of texts sampled at once in an iteration", least=1, remedy="Use 64"
    )
    num_gpus: float = setting(
        0, "the number of GPUs of the sampling process", note="0: it samples on the CPU.", least=0
    )


GENERATE = Section.of("sampling", Generate)


class GenerateModel(StartingPoint):
    """The model that samples the texts."""

    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "the dtype of the weights"
    )


GENERATE_MODEL = Section.of("language_model", GenerateModel)


class GenerateSeed(Settings):
    """Seed."""

    seed: int = setting(0, "the seed of the texts", least=0)


GENERATE_SEED = Section.of("debugging", GenerateSeed)


STORED = when("store_rollouts", "is on", bool)


class Rollouts(Settings):
    """Storage of rollouts."""

    store_rollouts: bool = setting(
        True, "whether every completion is stored as a row of Parquet in the trial's folder",
        note="Includes rejected, failed and held-out ones, with tokens, log-probs, rewards and "
        "advantages; written in the background. `rllib rollouts RUN` shows them.", short="store",
    )  # fmt: skip
    rollouts_path: str | None = setting(
        None, "the folder or URL below which a trial's rollouts are stored, in one of its name",
        note="None: `rollouts` in the trial's folder. Commands find them by the run as before.",
        acts=(STORED,), short="path",
    )  # fmt: skip
    store_on_error: Literal["go_on", "stop"] = setting(
        "go_on", "the reaction when rollouts cannot be written, for example on a full disk",
        note='"go_on": warn once and store no more; "stop": end with an error.', acts=(STORED,),
        short="on_error",
    )  # fmt: skip
    store_keep_iterations: int | None = setting(
        None, "how many iterations' rollouts are kept, the newest",
        note="None: all. Up to an eighth more are kept.", least=1,
        acts=(STORED,), short="keep_iterations",
    )  # fmt: skip


ROLLOUTS = Section.of("rollouts", Rollouts)


# --- what must hold between them --------------------------------------------------------------


def sampling_rules(config: Any) -> Iterator[Problem]:
    """Completions can be sampled, and shared out."""
    total, group = config.total_train_batch_size, config.num_completions
    rows, size = config.train_batch_size_per_learner, config.minibatch_size
    if total % group and not config.in_evaluation:
        yield wrong(config, "train_batch_size_per_learner",
                    f"such that all learners' rows ({total}) are a multiple of num_completions="
                    f"{group}", "the completions of a prompt stay together",
                    f"Use {max(1, total // group) * group}")  # fmt: skip
    if size is not None and 0 < rows < size:
        yield wrong(config, "minibatch_size", f"at most train_batch_size_per_learner={rows}",
                    "a mini-batch is a part of the batch",
                    "Lower it, or set None for the whole batch")  # fmt: skip
    if not config.explore and not config.in_evaluation:
        yield wrong(config, "explore", "True", "training samples in any case, and it acts in an "
                    "evaluation_config alone",
                    "Leave it out; top_k: 1 takes the likeliest token each time")  # fmt: skip
    SamplingParams.of(config)  # checks the rest


def evaluation_rules(config: Any) -> Iterator[Problem]:
    """An evaluation has as many completions of a prompt as its results are of."""
    held_out = _held_out(config)
    yield from _pass_at_rules(held_out, config.pass_at, "")
    for name, overlay in (config.eval_envs or {}).items():
        if isinstance(overlay, Mapping):
            place = f"eval_envs.{name}"
            settings = flattened(type(config), overlay, place)
            yield from _pass_at_rules({**held_out, **settings}, config.pass_at, place)


def _held_out(config: Any) -> dict[str, Any]:
    """The settings behind the number of an evaluation's completions, and its metrics."""
    overlay = config.evaluation_config if not config.in_evaluation else None
    settings = {
        "explore": config.explore if config.in_evaluation else False,
        "num_completions": config.num_completions,
        "answer_pattern": config.answer_pattern,
    }
    if not isinstance(overlay, Mapping):  # none, or a config that says it all
        return settings | ({} if overlay is None else {"explore": overlay.explore})
    return settings | flattened(type(config), overlay, "evaluation_config")


def _pass_at_rules(held_out: Mapping[str, Any], pass_at: Any, place: str) -> Iterator[Problem]:
    ks = held_out.get("pass_at", pass_at)
    count = held_out["num_completions"] if held_out["explore"] else 1
    if not all(1 <= k <= count for k in ks or ()):
        yield Problem("pass_at", f"be numbers from 1 to {count}" if count > 1 else "be 1 alone",
                      "so many completions of each prompt are evaluated, which are alike unless "
                      "they are sampled", "Set evaluation_config: {explore: true, "
                      "num_completions: N}", ks).within(place)  # fmt: skip
    pattern = held_out["answer_pattern"]
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        yield Problem("answer_pattern", "be a regular expression", str(error),
                      "Write '<answer>(.*?)</answer>', say", pattern).within(place)  # fmt: skip


def engine_rules(config: Any) -> Iterator[Problem]:
    """The engine can serve this config."""
    if config.generate_function is not None:
        found = import_dotted(config.generate_function, name="generate_function")
        if not callable(found):
            yield wrong(config, "generate_function", "a function",
                        f"it is {type(found).__name__}", "Name one of the module's")  # fmt: skip
    if (engine := engine_of(config)) is not None:
        yield from engine.rules(config)
