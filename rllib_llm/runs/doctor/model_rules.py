"""Rules about model folders, read without their weights, and settings that act against others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.modules.model_source import TruncatedWeightsError, num_elements, num_positions
from rllib_llm.runs.doctor.data_rules import NUM_ROWS, is_here, source_of
from rllib_llm.runs.doctor.stage import Finding, Stage, first_rows
from rllib_llm.runs.experiments import algorithm_class
from rllib_llm.runs.metrics import is_counter
from rllib_llm.shared.storage import read_json

if TYPE_CHECKING:
    from rllib_llm.conversations.chat_format import ChatFormat

SAMPLE = "The sum of 12 and 30 is 42.\nIsn't it? (Yes, it is!)"


def model_rules(stage: Stage) -> Iterator[Finding]:
    """Findings about every local folder that the stage reads a model from."""
    for setting, folder in stage.models().items():
        yield from _weights(setting, Path(folder))
    for setting in ("model", "reference", "reward_model") if stage.is_rlhf else ():
        yield from _kind(setting, stage)
    if stage.is_rlhf or stage.config.pretrained_model is not None:
        yield from _tokenizer(stage)
        yield from _adapters(stage)


def _weights(setting: str, folder: Path) -> Iterator[Finding]:
    files = sorted(folder.glob("*.safetensors"))
    index = read_json(folder / "model.safetensors.index.json")
    missing = sorted(set(index.get("weight_map", {}).values()) - {file.name for file in files})
    if missing:
        yield Finding(
            "model.shards", "error", f"{setting}={str(folder)!r}",
            f"{', '.join(missing[:3])} is not there",
            "Download or copy the folder again.", rule="hold every file of its index",
        )  # fmt: skip
    adapters = (folder / "adapter_config.json").is_file()
    if not files and not any(folder.glob("*.bin")) and not adapters:
        yield Finding(
            "model.weights", "error", f"{setting}={str(folder)!r}",
            "there is no *.safetensors file",
            "Name the folder that save_pretrained() wrote.", rule="hold weights",
        )  # fmt: skip
    for file in files:
        try:
            num_elements(file)
        except TruncatedWeightsError as error:
            yield Finding.from_error(error, "model").at("")


def _kind(setting: str, stage: Stage) -> Iterator[Finding]:
    """A policy writes text; a judge gives one number."""
    from rllib_llm.algorithms.reward_model import RewardModel

    maker, folder = stage.maker(setting), stage.models().get(setting)
    if maker is not None:  # the folder is that of what it starts from
        is_judge = issubclass(algorithm_class(maker.run, maker.name), RewardModel)
        writes = not is_judge
        found = f"{setting}=${{{maker.name}.model}} is what {maker.run} makes"
    elif folder is not None:
        config = read_json(Path(folder) / "config.json")
        names = config.get("architectures") or [""]
        is_judge = any("SequenceClassification" in name for name in names)
        writes = is_causal(config) and not is_judge
        found = f"{setting} is a {names[0]}"
    else:
        return
    if setting != "reward_model" and is_judge:
        yield Finding(
            "model.kind", "error", found,
            "a policy is a causal language model, which writes completions",
            "Name the model that was fine-tuned on texts, not the reward model.",
        )  # fmt: skip
    if setting == "reward_model" and writes:
        yield Finding(
            "model.kind", "error", found,
            "its score would come from a head that is drawn at random",
            "Name what a RewardModel stage made (${name.model}).",
        )  # fmt: skip


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a causal language model, which writes text."""
    return any("CausalLM" in name or "LMHead" in name for name in config.get("architectures") or [])


def _tokenizer(stage: Stage) -> Iterator[Finding]:
    from rllib_llm.modules.tokenizer import eos_token_ids, load_generation_config

    model = stage.config.pretrained_model
    if not is_here(model):
        return
    tokenizer = stage.config.load_tokenizer()
    generation = load_generation_config(model)
    ends = eos_token_ids(tokenizer, generation)
    stops = getattr(stage.config, "stop_token_ids", None)
    if beyond := [token for token in stops or () if token >= len(tokenizer)]:
        yield Finding(
            "model.stops", "error", f"stop_token_ids={stops}", f"it has no {beyond[0]}",
            "Name tokens of this tokenizer: tokenizer.convert_tokens_to_ids(text).",
            rule=f"be among the {len(tokenizer)} tokens of the vocabulary",
        )  # fmt: skip
    if stage.is_rlhf and not ends and not stops:
        yield Finding(
            "model.eos", "warning", f"model={str(model)!r} has no EOS token",
            "completions end at max_new_tokens alone",
            "Set eos_token in the tokenizer's folder, or stop_token_ids.",
        )  # fmt: skip
    own = eos_token_ids(generation) if generation is not None else ()
    if own and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in own:
        yield Finding(
            "model.eos_differs", "warning",
            f"EOS of the tokenizer={tokenizer.eos_token_id}, of generation_config.json={list(own)}",
            "texts are taught one end, and sampling stops at both",
            "Make them equal in the model's folder, or set stop_token_ids.",
        )  # fmt: skip
    yield from _round_trip(tokenizer, str(model))


def turn_rules(stage: Stage, *, makes_tools: bool = True) -> Iterator[Finding]:
    """Whether the chat template writes conversations and their tools. makes_tools: classes of tools
    are called for it; else their paths alone are looked at."""
    from rllib_llm.envs.conversation import proven_format
    from rllib_llm.envs.rlhf import policy_tokenizer
    from rllib_llm.envs.settings import CONVERSATION_ENV
    from rllib_llm.envs.tools import Toolbox
    from rllib_llm.shared.dotted import as_list, import_dotted

    if stage.config.env != CONVERSATION_ENV:
        return
    if not all(is_here(stage.env.get(name)) for name in ("model", "tokenizer")):
        return
    area = "tools"
    try:
        tools = [
            import_dotted(tool, name="tools") if isinstance(tool, str) else tool
            for tool in as_list(stage.env["tools"])
        ]
        if makes_tools or all(map(inspect.isfunction, tools)):
            toolbox, area = Toolbox(tools), "model"
            chat_format, _ = proven_format(stage.env, policy_tokenizer(stage.env), toolbox)
            yield from _first_prompts(stage, chat_format)
    except ValueError as error:
        yield from Finding.from_errors(error, area)


def _first_prompts(stage: Stage, chat_format: ChatFormat) -> Iterator[Finding]:
    """Conversations can begin: their first prompts leave room for an answer. Tools of MCP servers
    are not asked for, so prompts may be longer."""
    from rllib_llm.conversations.conversation import Conversation
    from rllib_llm.envs.conversation import first_messages, no_room

    held_out = first_rows(stage.env.get("eval_prompts"), "eval_prompts")
    limits = {
        "max_tokens": stage.env["max_tokens"],
        "positions": num_positions(stage.config.pretrained_model),
    }
    for kind, rows in (("", stage.prompts), ("held-out ", held_out)):
        if rows is None:
            continue
        source = source_of(stage, rows)
        num_rows = min(NUM_ROWS, len(source))
        lengths = []
        for row in source.rows(0, num_rows):
            conversation = Conversation(chat_format)
            conversation.append_messages(first_messages(row.prompt, stage.env["system"]))
            lengths.append(len(conversation.token_ids))
        if error := no_room(min(lengths), **limits):
            yield Finding.from_error(error, "model")
        elif error := no_room(max(lengths), **limits):
            num = sum(no_room(length, **limits) is not None for length in lengths)
            found = f"{num} of the first {num_rows} {kind}prompts are too long: {error.found}"
            yield replace(Finding.from_error(error, "model"), severity="warning", found=found)


def _adapters(stage: Stage) -> Iterator[Finding]:
    """The policy has the layers that `lora` names."""
    model, lora = stage.config.pretrained_model, stage.config.lora
    if lora is not None and is_here(model):
        from rllib_llm.modules.lora import add_adapters  # takes seconds, and few need it
        from rllib_llm.modules.pretrained import without_weights

        try:
            add_adapters(without_weights(model), lora)
        except ValueError as error:
            yield from Finding.from_errors(error, "settings")


def _round_trip(tokenizer: Any, model: str) -> Iterator[Finding]:
    """Text that the tokenizer changes although the vocabulary has all its characters."""
    ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return  # a vocabulary of few signs, as the toys have
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if back.strip() != SAMPLE:
        yield Finding(
            "model.round_trip", "warning",
            f"{SAMPLE!r} comes back from model={model!r} as {back!r}",
            "rewards read decoded completions",
            "Set clean_up_tokenization_spaces=False in the tokenizer, or look at its decoder.",
        )  # fmt: skip


NEARLY_GREEDY = 0.2  # a temperature at which the completions of a prompt hardly differ
MUCH_PUNISHED = 0.9  # of a completion's length


def plan_rules(stage: Stage) -> Iterator[Finding]:
    """Findings about a stage's settings, with those of its experiment."""
    yield from _end(stage)
    yield from _schedule(stage)
    yield from _cuts(stage)
    if stage.is_rlhf:
        yield from _sampling(stage)
        yield from _evaluation(stage)


def _end(stage: Stage) -> Iterator[Finding]:
    experiment = stage.experiment
    if not experiment.stop and experiment.time_budget_s is None:
        yield Finding(
            "experiment.no_end", "warning", "stop is empty",
            "the trial goes on until somebody stops it",
            "Write stop: {training_iteration: 100}.",
        )  # fmt: skip
    elif experiment.stop and not any(
        is_counter(key) and not (key == "epoch" and stage.is_rlhf) for key in experiment.stop
    ):
        yield Finding(
            "experiment.open_end", "warning", f"stop={dict(experiment.stop)!r}",
            "without a counter the trial never ends where no result reaches its limit",
            "Add training_iteration, episode or time_total_s.",
        )  # fmt: skip
    settings = experiment.checkpoint_config
    frequency = settings.get("checkpoint_frequency")
    if settings.get("checkpoint_at_end") is False and frequency == 0:
        yield Finding(
            "experiment.nothing_kept", "warning",
            "checkpoint_at_end=False and checkpoint_frequency=0",
            "what is learnt would be lost", "Drop one of them.",
        )  # fmt: skip


def _schedule(stage: Stage) -> Iterator[Finding]:
    config, iterations = stage.config, stage.num_planned_iterations
    if iterations is None or config.minibatch_size is None and not config.minibatch_tokens:
        per_iteration = config.num_epochs
    elif config.minibatch_tokens:
        return  # depends on lengths
    else:
        per_iteration = config.num_epochs * -(
            -config.train_batch_size_per_learner // config.minibatch_size
        )
    if iterations is None:
        return
    updates = iterations * per_iteration
    if config.lr_num_warmup_updates >= updates:
        yield Finding(
            "settings.lr_num_warmup_updates",
            "warning",
            f"lr_num_warmup_updates={config.lr_num_warmup_updates}",
            "lr never reaches its value",
            f"Use about {max(1, updates // 20)}.",
            rule=f"be below the {updates} optimiser steps of this run",
        )
    decays = config.lr_schedule != "constant" and config.lr_num_updates
    if decays and config.lr_num_updates < updates:
        yield Finding(
            "settings.lr_num_updates",
            "warning",
            f"lr_num_updates={config.lr_num_updates}",
            "afterwards lr is 0",
            f"Use {updates}, or end the run earlier.",
            rule=f"be about the {updates} optimiser steps of this run",
        )


def _cuts(stage: Stage) -> Iterator[Finding]:
    config = stage.config
    rows, size = config.train_batch_size_per_learner, config.minibatch_size
    if size and rows % size:
        yield Finding(
            "settings.minibatch_size",
            "warning",
            f"minibatch_size={size}",
            f"the last step of each pass has a mini-batch of {rows % size} only, and it moves "
            "the weights as far as the others",
            f"Use {_divisor(rows, size)}.",
            rule=f"divide train_batch_size_per_learner={rows}",
        )


def _divisor(rows: int, size: int) -> int:
    """The largest divisor of `rows` that is at most `size`."""
    return next(value for value in range(size, 0, -1) if rows % value == 0)


def _sampling(stage: Stage) -> Iterator[Finding]:
    config = stage.config
    if config.num_completions > 1 and config.temperature < NEARLY_GREEDY:
        yield Finding(
            "settings.temperature",
            "warning",
            f"temperature={config.temperature}",
            "they are compared with each other, and equal ones teach nothing",
            "Use 0.7 to 1.",
            rule=f"let the {config.num_completions} completions of a prompt differ",
        )
    if config.top_k == 1:
        yield Finding(
            "settings.top_k", "warning", "top_k=1",
            "completions are greedy, and nothing is explored",
            "Use 0 to switch it off.",
        )  # fmt: skip
    if config.min_new_tokens == config.max_new_tokens and config.max_new_tokens > 1:
        yield Finding(
            "settings.min_new_tokens", "warning", f"min_new_tokens={config.min_new_tokens}",
            "", "Lower it.", rule="be below max_new_tokens for completions to end by themselves",
        )  # fmt: skip
    if stage.env.get("kl_coeff") and config.ref_kl_coeff:
        yield Finding(
            "settings.kl_twice", "warning",
            f"env_config.kl_coeff={stage.env['kl_coeff']}, ref_kl_coeff={config.ref_kl_coeff}",
            "the KL would be paid twice",
            "Leave env_config.kl_coeff out.",
        )  # fmt: skip
    if config.overlong_buffer > MUCH_PUNISHED * config.max_new_tokens:
        yield Finding(
            "settings.overlong_buffer",
            "warning",
            f"overlong_buffer={config.overlong_buffer}",
            "nearly every completion is punished for its length",
            f"Use {max(1, config.max_new_tokens // 5)}.",
            rule=f"be a small part of max_new_tokens={config.max_new_tokens}",
        )


def _evaluation(stage: Stage) -> Iterator[Finding]:
    config, env = stage.config, stage.env
    held_out = config.env_config.get("eval_fraction")
    if held_out and not config.evaluation_interval:
        yield Finding(
            "settings.eval_fraction", "warning", f"eval_fraction={held_out}",
            "these prompts are neither trained on nor evaluated, since there is no "
            "evaluation_interval", "Set evaluation_interval: 10, or leave eval_fraction out.",
            rule="have an evaluation",
        )  # fmt: skip
    if not config.evaluation_interval or "eval_prompts" not in env:
        return
    if not env["eval_prompts"] and not env.get("eval_fraction"):
        yield Finding(
            "settings.evaluation_interval", "error",
            f"evaluation_interval={config.evaluation_interval}",
            "neither eval_prompts nor eval_fraction is set",
            "Write prompts: {eval_fraction: 0.1}, or evaluation_interval: null.",
            rule="have held-out prompts",
        )  # fmt: skip
