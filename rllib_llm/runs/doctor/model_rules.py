"""Rules about model folders, read without their weights, and settings that act against others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.modules.model_source import TruncatedWeightsError, num_elements, num_positions
from rllib_llm.runs.doctor.data_rules import NUM_ROWS, is_here, source_of
from rllib_llm.runs.doctor.stage import Stage, first_rows, of_each_env
from rllib_llm.runs.experiments import algorithm_class
from rllib_llm.runs.metrics import is_counter
from rllib_llm.shared.errors import Problem, problems_of, refusals, warning
from rllib_llm.shared.storage import read_json

if TYPE_CHECKING:
    from rllib_llm.conversations.chat_format import ChatFormat

SAMPLE = "The sum of 12 and 30 is 42.\nIsn't it? (Yes, it is!)"


def model_rules(stage: Stage) -> Iterator[Problem]:
    """Problems of every local folder that the stage reads a model from."""
    yield from _folders(stage)
    if stage.is_rlhf and stage.config.envs:
        yield from of_each_env(_folders, stage)
    model, lora = stage.config.pretrained_model, stage.config.lora
    if not is_here(model) or not (stage.is_rlhf or model is not None):
        return
    yield from _tokenizer(stage)
    if lora is not None:
        from rllib_llm.modules.lora import add_adapters  # takes seconds, and few need it
        from rllib_llm.modules.pretrained import without_weights

        # The policy has the layers that it names.
        yield from refusals(lambda: add_adapters(without_weights(model), lora))


def _folders(stage: Stage) -> Iterator[Problem]:
    for setting, folder in stage.models().items():
        yield from _weights(setting, Path(folder))
    of_run = () if stage.entry else ("model",)
    for setting in (*of_run, "reference", "reward_model") if stage.is_rlhf else ():
        yield from _kind(setting, stage)


def _weights(setting: str, folder: Path) -> Iterator[Problem]:
    files = sorted(folder.glob("*.safetensors"))
    index = read_json(folder / "model.safetensors.index.json")
    missing = sorted(set(index.get("weight_map", {}).values()) - {file.name for file in files})
    if missing:
        yield Problem(setting, "hold every file of its index", f"{', '.join(missing[:3])} is not "
                      "there", "Download or copy the folder again", str(folder))  # fmt: skip
    adapters = (folder / "adapter_config.json").is_file()
    if not files and not any(folder.glob("*.bin")) and not adapters:
        yield Problem(setting, "hold weights", "there is no *.safetensors file",
                      "Name the folder that save_pretrained() wrote", str(folder))  # fmt: skip
    for file in files:
        try:
            num_elements(file)
        except TruncatedWeightsError as error:
            yield error.problem


def _kind(setting: str, stage: Stage) -> Iterator[Problem]:
    """A policy writes text; a judge gives one number."""
    from rllib_llm.algorithms.reward_model import RewardModel

    maker, folder = stage.maker(setting), stage.models().get(setting)
    if maker is not None:  # the folder is that of what it starts from
        is_judge = issubclass(algorithm_class(maker.run, maker.name), RewardModel)
        given, kind, writes = f"${{{maker.name}.model}}", f"what {maker.run} makes", not is_judge
    elif folder is not None:
        config = read_json(Path(folder) / "config.json")
        names = config.get("architectures") or [""]
        is_judge = any("SequenceClassification" in name for name in names)
        given, kind, writes = folder, f"a {names[0]}", is_causal(config) and not is_judge
    else:
        return
    if setting != "reward_model" and is_judge:
        yield Problem(setting, "be a causal language model", f"it is {kind}, and a policy writes "
                      "completions", "Name the model that was fine-tuned on texts",
                      given)  # fmt: skip
    if setting == "reward_model" and writes:
        yield Problem(setting, "be a reward model", f"it is {kind}, and its score would come from "
                      "a head that is drawn at random", "Name what a RewardModel stage made "
                      "(${name.model})", given)  # fmt: skip


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a causal language model, which writes text."""
    return any("CausalLM" in name or "LMHead" in name for name in config.get("architectures") or [])


def _tokenizer(stage: Stage) -> Iterator[Problem]:
    from rllib_llm.modules.tokenizer import eos_token_ids, load_generation_config

    model, tokenizer = stage.config.pretrained_model, stage.config.load_tokenizer()
    generation = load_generation_config(model)
    ends = eos_token_ids(tokenizer, generation)
    stops = getattr(stage.config, "stop_token_ids", None)
    if beyond := [token for token in stops or () if token >= len(tokenizer)]:
        yield Problem("stop_token_ids", f"be among the {len(tokenizer)} tokens of the vocabulary",
                      f"it has no {beyond[0]}", "See tokenizer.convert_tokens_to_ids(text)",
                      stops)  # fmt: skip
    if stage.is_rlhf and not ends and not stops:
        yield warning("model", "have an EOS token", "completions end at max_new_tokens alone",
                      "Set eos_token in the tokenizer's folder, or stop_token_ids",
                      str(model))  # fmt: skip
    own = eos_token_ids(generation) if generation is not None else ()
    if own and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in own:
        yield warning("model", f"have one EOS: the tokenizer has {tokenizer.eos_token_id}, "
                      f"generation_config.json {list(own)}",
                      "texts are taught one end, and sampling stops at both",
                      "Make them equal in the model's folder, or set stop_token_ids",
                      str(model))  # fmt: skip
    # Text that the tokenizer changes though its vocabulary has all the characters; a toy's has not.
    ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=False)
    has_all = tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids
    if has_all and back.strip() != SAMPLE:
        yield warning("model", f"have a tokenizer that keeps {SAMPLE!r}",
                      f"it comes back as {back!r}, and rewards read decoded completions",
                      "Set clean_up_tokenization_spaces=False in the tokenizer",
                      str(model))  # fmt: skip


def turn_rules(stage: Stage, *, makes_tools: bool = True) -> Iterator[Problem]:
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
    try:
        tools = [
            import_dotted(tool, name="tools") if isinstance(tool, str) else tool
            for tool in as_list(stage.env["tools"])
        ]
        if makes_tools or all(map(inspect.isfunction, tools)):
            toolbox = Toolbox(tools)
            chat_format, _ = proven_format(stage.env, policy_tokenizer(stage.env), toolbox)
            yield from _first_prompts(stage, chat_format)
    except ValueError as error:
        yield from problems_of(error)


def _first_prompts(stage: Stage, chat_format: ChatFormat) -> Iterator[Problem]:
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
            yield error.problem
        elif error := no_room(max(lengths), **limits):
            num = sum(no_room(length, **limits) is not None for length in lengths)
            place = f"{num} of the first {num_rows} {kind}prompts are too long"
            yield replace(error.problem.within(place), severity="warning")


NEARLY_GREEDY = 0.2  # a temperature at which the completions of a prompt hardly differ
MUCH_PUNISHED = 0.9  # of a completion's length


def plan_rules(stage: Stage) -> Iterator[Problem]:
    """Problems of a stage's settings, with those of its experiment."""
    config, experiment, iterations = stage.config, stage.experiment, stage.num_planned_iterations
    stop = experiment.stop
    if not stop and experiment.time_budget_s is None:
        yield warning("stop", "be set", "the trial goes on until somebody stops it",
                      "Write stop: {training_iteration: 100}")  # fmt: skip
    elif stop and not any(is_counter(k) and not (k == "epoch" and stage.is_rlhf) for k in stop):
        yield warning("stop", "have a counter", "the trial never ends where no result reaches its "
                      "limit", "Add training_iteration, episode or time_total_s",
                      dict(stop))  # fmt: skip
    rows, size, updates = config.train_batch_size_per_learner, config.minibatch_size, None
    if iterations is not None:
        updates = iterations * config.num_epochs * -(-rows // (size or rows))
    if updates is not None and config.lr_num_warmup_updates >= updates:
        yield warning("lr_num_warmup_updates",
                      f"be below the {updates} optimiser steps of this run",
                      "lr never reaches its value", f"Use about {max(1, updates // 20)}",
                      config.lr_num_warmup_updates)  # fmt: skip
    decays = config.lr_schedule != "constant" and config.lr_num_updates
    if updates is not None and decays and config.lr_num_updates < updates:
        yield warning("lr_num_updates", f"be about the {updates} optimiser steps of this run",
                      "afterwards lr is 0", f"Use {updates}, or end the run earlier",
                      config.lr_num_updates)  # fmt: skip
    if size and rows % size:
        divisor = next(value for value in range(size, 0, -1) if rows % value == 0)
        yield warning(
            "minibatch_size", f"divide train_batch_size_per_learner={rows}",
            f"the last step of each pass has a mini-batch of {rows % size} only, and it moves the "
            "weights as far as the others", f"Use {divisor}", size,
        )
    if stage.is_rlhf:
        yield from of_each_env(_sampling, stage)


def _sampling(stage: Stage) -> Iterator[Problem]:
    config, env = stage.config, stage.env
    longest, interval = config.max_new_tokens, config.evaluation_interval
    held_out = config.env_config.get("eval_fraction")
    rules = (  # whether it applies, name, rule, reason, remedy, value
        (config.num_completions > 1 and config.temperature < NEARLY_GREEDY, "temperature",
         f"let the {config.num_completions} completions of a prompt differ",
         "equal ones teach nothing", "Use 0.7 to 1", config.temperature),
        (config.top_k == 1, "top_k", "not be 1", "completions are greedy, and nothing is explored",
         "Use 0 to switch it off", 1),
        (env.get("kl_coeff") and config.ref_kl_coeff, "env_config.kl_coeff",
         f"be left out beside ref_kl_coeff={config.ref_kl_coeff}", "the KL would be paid twice",
         "Leave it out", env.get("kl_coeff")),
        (config.overlong_buffer > MUCH_PUNISHED * longest, "overlong_buffer",
         f"be a small part of max_new_tokens={longest}", "nearly all are punished",
         f"Use {max(1, longest // 5)}", config.overlong_buffer),
        (held_out and not interval, "eval_fraction", "come with an evaluation_interval",
         "these prompts are not used", "Set evaluation_interval: 10, or leave it out", held_out),
    )  # fmt: skip
    yield from (warning(*row) for applies, *row in rules if applies)
    sources = [env.get(name) for name in ("eval_prompts", "eval_fraction")]
    if interval and "eval_prompts" in env and not any(sources) and not stage.entry:
        yield Problem("evaluation_interval", "have held-out prompts", "neither eval_prompts nor "
                      "eval_fraction is set", "Write prompts: {eval_fraction: 0.1}",
                      interval)  # fmt: skip
