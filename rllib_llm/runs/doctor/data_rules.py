"""Rules about data: against the settings before every run, and of the doctor about lengths, empty
rows, repeats, and what training shares with evaluation.

Before a run only what is quick to read is read: functions, lists and files of moderate size. The
hub is asked whether it has a repository, no more. What an earlier experiment will make
(`${name.model}`) is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rllib_llm.data.encoding import encode_ended, encode_text
from rllib_llm.data.rollout_store import image_name
from rllib_llm.data.rows import Rows
from rllib_llm.data.sources import OF_CONFIG, OF_ENV, check_source
from rllib_llm.modules.model_source import num_positions
from rllib_llm.runs.doctor.stage import MAX_ROWS, Stage, can_be_read, env_settings, first_rows
from rllib_llm.runs.experiments import StandIn
from rllib_llm.shared.dotted import import_dotted, named_entries
from rllib_llm.shared.errors import (
    Problem,
    Problems,
    called,
    errors_of,
    problems_in,
    problems_of,
    refusals,
    warning,
)

if TYPE_CHECKING:
    from rllib_llm.envs.prompts import PromptSource

PROMPT_COLUMNS = {"prompt", "messages"}  # which become the prompt itself
NUM_ROWS = 32  # of which tokens are made, from the first on
# What `row_problems` depends on: points of a grid that differ in other settings are checked once.
SETTINGS = (
    "model", "chat_template", "template_settings", "data", "eval_data", "max_length", "loss_on",
    "env", "env_config", "max_new_tokens", "evaluation_interval", "evaluation_config", "eval_envs",
    "envs",
)  # fmt: skip


def row_problems(config: Any) -> Iterator[Problem]:
    """Problems of reading the rows that a validated `config` names, and of making tokens of them
    that the model takes."""
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig
    from rllib_llm.algorithms.rlhf_config import RLHFConfig
    from rllib_llm.algorithms.supervised import SupervisedConfig

    if not isinstance(config, LanguageModelConfig) or not is_here(config.given_model()):
        return
    # What is no error is told by the run itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(config, SupervisedConfig):
            settings = {"tokenizer": config.load_tokenizer(), "max_length": config.longest_text()}

            def read(data: Any) -> None:
                source = config.make_source(data, shuffle=False, **settings)
                source.batch(0, min(NUM_ROWS, len(source)))

            for name in ("data", "eval_data"):
                if can_be_read(data := getattr(config, name)):
                    for problem in problems_in(read, data):
                        yield problem.moved("data", name)
        elif isinstance(config, RLHFConfig):
            for name, entry in config.env_configs().items():
                if name:
                    given = {"env": entry.env, "env_config": entry.env_config}
                    problems = [*source_problems(given)]
                    problems += [] if errors_of(problems) else problems_in(_of_prompts, entry)
                    yield from (problem.within(f"envs.{name}") for problem in problems)
                else:
                    yield from _of_prompts(config)
            yield from _of_evaluations(config)


def _of_prompts(config: Any) -> Iterator[Problem]:
    from rllib_llm.data.sources import load_rows
    from rllib_llm.envs.judges.reward_functions import RewardTerm, check_names, named_function
    from rllib_llm.envs.prompts import PromptEncoder
    from rllib_llm.envs.rlhf import check_reference, check_settings, policy_tokenizer, prompt_source
    from rllib_llm.modules.model_source import check_lengths
    from rllib_llm.shared.setting import DEFAULT_ENV

    settings = env_settings(config)
    if "max_prompt_len" not in settings:  # a conversation's tasks are read by its environment
        return
    prompts = settings.get("prompts")
    if config.env == DEFAULT_ENV:
        yield from problems_in(check_settings, settings)
        try:
            if can_be_read(prompts):
                prompts = load_rows(prompts, name="prompts")
        except ValueError as error:
            yield from problems_of(error)
            return
        names: list[str] = []
        first = prompts[:NUM_ROWS] if isinstance(prompts, Rows) else []
        columns = {name for row in first for name in row} - PROMPT_COLUMNS

        def check(place: str, spec: Any) -> None:
            """The signature of a reward function, and whether its arguments are columns of the
            prompts. Classes are not instantiated: they may load a model."""
            with called(FUNCTIONS, place if place == FUNCTIONS else f"env_config.{place}"):
                if inspect.isclass(named_function(spec)):
                    return
                term = RewardTerm.from_spec(spec)
                names.append(term.name)
                if first:
                    term.check_columns(columns)

        for entry in named_entries(settings[FUNCTIONS], FUNCTIONS):
            yield from problems_in(check, *entry)
        if names:
            yield from problems_in(check_names, names, settings["reward_functions"])
    if not all(is_here(settings[key]) for key in ("model", "tokenizer", "reference")):
        return
    tokenizer = policy_tokenizer(settings)
    if settings["reference"] is not None:
        check_reference(settings, tokenizer)
    longest = None
    positions = num_positions(config.pretrained_model)
    max_prompt_len, max_new_tokens = settings["max_prompt_len"], config.max_new_tokens
    if isinstance(prompts, Rows) or can_be_read(prompts):
        encoder = PromptEncoder(
            tokenizer, max_prompt_len, settings["prompt_overflow"], settings["model"]
        )
        source = prompt_source(
            settings, prompts, settings["eval_prompts"], settings["prompt_column"]
        )
        encoder.encode(source.rows(0, min(NUM_ROWS, len(source))))
        if encoder.overflow == "error":
            encoder.check(source.all_rows())
        if positions and max_prompt_len + max_new_tokens > positions:
            longest = encoder.longest(source)
    chosen = "max_prompt_len" in config.env_config
    if chosen or longest is not None:
        check_lengths(
            positions, max_prompt_len=max_prompt_len, max_new_tokens=max_new_tokens,
            longest_prompt=None if chosen else longest,
        )  # fmt: skip


def _of_evaluations(config: Any) -> Iterator[Problem]:
    """Settings, sources and prompts of evaluations in other environments than training's, or with
    other settings of it."""
    from rllib_llm.algorithms.evaluation import eval_env_config

    if not config.evaluation_interval:
        return
    found = {"evaluation_config": config.get_evaluation_config_object()}
    found |= {f"eval_envs.{name}": eval_env_config(config, name) for name in config.eval_envs or ()}
    for place, held_out in found.items():
        before = config.env_config if held_out.env == config.env else {}
        own = {key: value for key, value in held_out.env_config.items()
               if key not in before or repr(value) != repr(before[key])}  # fmt: skip
        if not own:
            continue
        problems = [*source_problems({"env": held_out.env, "env_config": own})]
        if not errors_of(problems):
            problems += problems_in(_of_prompts, held_out)
        yield from (problem.within(place) for problem in problems)


def is_here(model: Any) -> bool:
    """True where tokenizer and config of `model` can be read now."""
    from rllib_llm.modules.model_source import HUB, source_kind

    if isinstance(model, Mapping):
        model = model.get("model")
    if model is None or not isinstance(model, str):
        return True
    return "${" not in model and source_kind(model)[0] != HUB


MODELS = ("model", "critic_model")
FUNCTIONS = "reward_functions"
ENV_MODELS = ("model", "tokenizer", "reward_model", "reference")


def source_problems(settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Folders and their tokenizers, files and dotted paths that are not there, without loading
    weights.

    What an earlier experiment will make (`${name.checkpoint}`) is left out. The hub is asked
    whether it has a repository that the local cache lacks.

    Args:
        settings: of one experiment, `env_config` among them.
    """
    from rllib_llm.envs.registry import ENVIRONMENTS

    env = settings.get("env_config") if str(settings.get("env")) in ENVIRONMENTS else None
    env = env if isinstance(env, Mapping) else {}
    for name, value in (*_chosen(settings, MODELS), *_chosen(env, ENV_MODELS, "env_config.")):
        # A reference reads ids alone.
        is_read = name != "env_config.reference"
        yield from problems_in(_of_model, value, name, has_tokenizer=is_read)
    for name, value in (*_chosen(settings, OF_CONFIG), *_chosen(env, OF_ENV, "env_config.")):
        yield from problems_in(_of_data, value, name)
    for place, function in named_entries(env.get(FUNCTIONS), f"env_config.{FUNCTIONS}"):
        path = function.get("function") if isinstance(function, Mapping) else function
        if isinstance(path, str) and "${" not in path:
            yield from refusals(import_dotted, path, name=place)


def _of_data(value: Any, name: str) -> Iterator[Problem]:
    if "${" not in str(value) and (hub_id := check_source(value, name=name)):
        yield from _of_hub(hub_id, "dataset", name)


def _chosen(
    settings: Mapping[str, Any], names: tuple[str, ...], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    return ((prefix + name, settings[name]) for name in names if settings.get(name) is not None)


def _of_model(given: Any, name: str, *, has_tokenizer: bool) -> Iterator[Problem]:
    from rllib_llm.modules.model_source import DOTTED, FOLDER, HUB, source_kind

    if isinstance(given, Mapping):
        given, name = given.get("model"), f"{name}.model"
    if not isinstance(given, str) or "${" in given or isinstance(given, StandIn):
        return  # a stand-in belongs to the experiment that makes what it stands for
    kind, value = source_kind(given, name=name)
    if kind == DOTTED:
        import_dotted(value, name=name)
    if kind == HUB:
        yield from _of_hub(value, "model", name)
    if kind == FOLDER and has_tokenizer:
        yield from _of_tokenizer(value, name)


def _of_hub(hub_id: str, kind: str, name: str) -> Iterator[Problem]:
    """Asks the hub for a repository ("model" or "dataset") that is not in the local cache; it may
    have none of that name, or not give it without a login."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    from rllib_llm.modules.model_source import did_you_mean_folder, is_cached

    if constants.HF_HUB_OFFLINE or is_cached(hub_id, kind):
        return
    answer = _hub_refuses(hub_id, kind)
    if answer is None:
        return
    folder = did_you_mean_folder(hub_id) if kind == "model" else ""
    if not isinstance(answer, RepositoryNotFoundError):
        yield warning(
            name, "be here or in the local cache",
            f"the hub, which will be asked again, does not answer ({type(answer).__name__})",
            f"{folder} Give a folder where there is no network".lstrip(), hub_id,
        )  # fmt: skip
        return
    if isinstance(answer, GatedRepoError):
        why, remedy = "access must be asked for", "Ask for it on its page, then run hf auth login"
    else:
        why, remedy = "not found", "Check the spelling; for a private one run hf auth login"
    yield Problem(
        name, f"be a folder, or a {kind} that the hub gives",
        f"no such folder is here, and the hub answers {answer.response.status_code} ({why})",
        f"{folder} {remedy}".lstrip(), hub_id,
    )  # fmt: skip


@functools.cache  # the points of a grid share their models
def _hub_refuses(hub_id: str, kind: str) -> Exception | None:
    """Why the hub does not give a repository: it has none, or does not answer; None if it does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json", repo_type=kind))
    except EntryNotFoundError:
        return None
    except (HTTPError, OSError) as error:
        return error
    return None


@functools.cache  # the points of a grid share their models
def _of_tokenizer(folder: str, name: str) -> tuple[Problem, ...]:
    from rllib_llm.modules.tokenizer import load_tokenizer

    try:
        load_tokenizer(folder)
    except Problems as error:
        return (dataclasses.replace(error.problem, name=name),)
    except ValueError as error:
        return tuple(problem.within(name) for problem in problems_of(error))
    return ()


MAX_REPEATED = 0.05  # share of rows that equal an earlier one
MAX_CUT = 0.05  # share of texts that lose tokens
TEXTS = ("prompt", "completion", "text", "messages", "tools", "chosen", "rejected")
IMAGES = ("image", "images")
NUM_ENCODED = 256  # rows whose length is measured


def data_rules(stage: Stage) -> Iterator[Problem]:
    """Problems of the rows that a stage learns from and is judged on."""
    if stage.is_rlhf:
        names, rows = ("prompts", "eval_prompts"), stage.prompts
        held_out = first_rows(stage.env.get("eval_prompts"), "eval_prompts")
    else:
        names = ("data", "eval_data")
        rows, held_out = (first_rows(getattr(stage.config, name), name) for name in names)
    if rows is None:
        return
    keys = _keys(stage, rows)
    repeated = 1 - len(set(keys)) / len(keys)
    if repeated > MAX_REPEATED:
        yield warning(names[0], "have distinct rows",
                      f"{repeated:.0%} of them repeat another, and each "
                      "counts as often as it stands there",
                      "Remove them, unless you weigh rows by repeating them")  # fmt: skip
    if held_out is not None:
        yield from _leak(
            names[1], _keys(stage, held_out), keys, f"are in {names[0]} as well",
            f"Take them out of {names[0]}",
        )  # fmt: skip
    elif stage.is_rlhf and stage.env.get("eval_fraction") and len(rows) < MAX_ROWS:
        source = source_of(stage, rows, split="eval", eval_fraction=stage.env["eval_fraction"])
        chosen = set(source.indices(0, len(source)).tolist())
        left, learnt = ([key for i, key in enumerate(keys) if (i in chosen) is out]
                        for out in (True, False))  # fmt: skip
        yield from _leak(
            "eval_fraction", left, learnt, "that it holds out are in prompts as well",
            "Remove repeated rows, or write prompts: {eval_data: ...}",
        )  # fmt: skip
    if stage.is_rlhf:
        yield from _prompts(stage, rows)
    else:
        yield from _texts(stage, rows)


def _keys(stage: Stage, rows: Rows) -> list[str]:
    """The keys by which equal rows are found: what the model reads of them, as far as known."""
    if stage.is_conversation:
        read = list(rows)
    elif stage.is_rlhf:
        found = source_of(stage, rows).all_rows()
        read = [(row.prompt, *map(row.columns.get, IMAGES)) for row in found]
    else:
        read = [{n: row[n] for n in (*TEXTS, *IMAGES) if n in row} or row for row in rows]

    def text(value: Any) -> str:  # of a value that is none of JSON; an image's is its pixels' hash
        return image_name(value.tobytes()) if hasattr(value, "tobytes") else str(value)

    return [json.dumps(each, sort_keys=True, default=text) for each in read]


def source_of(stage: Stage, rows: Rows, **split: Any) -> PromptSource:
    """Return rows as a stage's prompts, in their order."""
    from rllib_llm.envs.prompts import PromptSource

    column, seed = stage.env.get("prompt_column"), stage.env.get("split_seed", 0)
    return PromptSource(rows, shuffle=False, prompt_column=column, split_seed=seed, **split)


def _leak(
    name: str, held_out: Sequence[str], trained: Sequence[str], found: str, remedy: str
) -> Iterator[Problem]:
    known = set(trained)
    shared = sum(key in known for key in held_out)
    if shared:
        yield warning(name, "share no row with training",
                      f"{shared} of the {len(held_out)} {found}: their "
                      "results say what was learnt by heart", remedy)  # fmt: skip


def _prompts(stage: Stage, rows: Rows) -> Iterator[Problem]:
    config, env = stage.config, stage.env
    num = len(rows)
    if num < (least := math.floor(stage.num_prompts)):
        yield warning(
            "prompts", f"have at least the {least} rows of an iteration",
            f"of {num} rows some stand in one batch several times", "Add prompts",
        )
    column = env.get("prompt_column") or next(
        (name for name in ("prompt", "messages") if name in rows.columns), rows.columns[0]
    )
    prompts = [row[column] for row in rows]
    yield from _blank("prompts", [text for text in prompts if isinstance(text, str)])
    if env.get("prompt_overflow") == "error" or not is_here(env.get("model")):
        return
    if stage.is_conversation:
        return
    from rllib_llm.envs.prompts import PromptEncoder
    from rllib_llm.envs.rlhf import policy_tokenizer

    encoder = PromptEncoder(policy_tokenizer(env), env["max_prompt_len"], model=env["model"])
    source = source_of(stage, rows)
    looked_at = min(NUM_ENCODED, len(source))
    encoder.encode([source.row(index) for index in range(looked_at)])
    if (num_cut := len(encoder.truncated)) > MAX_CUT * looked_at:
        longest, positions = encoder.longest(source), num_positions(config.pretrained_model)
        remedy = f"Raise max_prompt_len to {longest}, or shorten them"
        if positions is not None and longest + config.max_new_tokens > positions:
            room = max(0, positions - config.max_new_tokens)
            remedy = f"Shorten them: the model reads {positions} tokens, and beside max_new_tokens="
            remedy += f"{config.max_new_tokens} a prompt has {room} of them"
        yield warning("max_prompt_len", "hold the prompts", f"{num_cut} of the first "
                      f"{looked_at} lose their beginning", remedy,
                      env["max_prompt_len"])  # fmt: skip


def _texts(stage: Stage, rows: Rows) -> Iterator[Problem]:
    config = stage.config
    if len(rows) < config.total_train_batch_size:
        yield warning("data", f"have at least the {config.total_train_batch_size} rows of a batch",
                      f"some of {len(rows)} are in a batch several times",
                      f"Lower it to {len(rows)}")  # fmt: skip
    if {"chosen", "rejected"} <= set(rows.columns):
        same = sum(row["chosen"] == row["rejected"] for row in rows)
        if same:
            yield warning("data", "have pairs of different answers",
                          f"{same} of {len(rows)} have equal ones and are left out",
                          "Remove or correct them")  # fmt: skip
    for column in ("text", "completion", "chosen"):
        if column in rows.columns:
            texts = [row[column] for row in rows if isinstance(row[column], str)]
            yield from _blank(f"data.{column}", texts)
    if not is_here(config.pretrained_model):
        return
    tokenizer, limit = config.load_tokenizer(), config.longest_text()
    # A row's text, roughly: columns that are text, one answer of a pair.
    read = [(row.get("prompt"), row.get("text") or row.get("completion") or row.get("chosen"))
            for row in rows[:NUM_ENCODED]]  # fmt: skip
    texts = [" ".join(part for part in parts if isinstance(part, str)) for parts in read]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts if text]
    num_cut = sum(length > limit for length in lengths)
    if num_cut > MAX_CUT * max(1, len(lengths)):
        yield warning(
            "max_length", "hold the rows", f"what is beyond {limit} tokens is not learnt from, in "
            f"{num_cut} of the first {len(lengths)}", f"Raise it to {max(lengths)}, or cut them",
        )  # fmt: skip
    for prompt, answer in read:
        if not (isinstance(prompt, str) and isinstance(answer, str) and prompt != prompt.rstrip()):
            continue
        alone = encode_text(tokenizer, prompt)
        if encode_ended(tokenizer, prompt, answer)[0][: len(alone)] != alone:
            yield warning(
                "data", "have prompts without white space at the end",
                f"that of {prompt[-20:]!r} becomes part of the answer's first token before "
                f"{answer[:20]!r}, and a prompt that is sampled from ends with a token there",
                "Begin the answers with it instead",
            )  # fmt: skip
            return


def _blank(name: str, texts: Sequence[str]) -> Iterator[Problem]:
    num = sum(not text.strip() for text in texts)
    if num:
        yield warning(name, "have no empty rows", f"{num} of {len(texts)} are", "Remove them")
