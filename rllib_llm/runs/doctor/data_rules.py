"""Rules about data sets: lengths, empty rows, repeats, and what training shares with evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rllib_llm.data.rows import Rows
from rllib_llm.modules.model_limits import num_positions
from rllib_llm.runs.check_data import _is_here
from rllib_llm.runs.doctor.stage import Finding, Stage, first_rows

MAX_REPEATED = 0.05  # share of rows that equal an earlier one
MAX_CUT = 0.05  # share of texts that lose tokens
MAX_EMPTY = 0.0
NUM_ENCODED = 256  # rows whose length is measured


def data_rules(stage: Stage) -> Iterator[Finding]:
    """Findings about the rows that a stage learns from and is judged on."""
    names = ("prompts", "eval_prompts") if stage.is_rlhf else ("data", "eval_data")
    given = [stage.env.get(n) if stage.is_rlhf else getattr(stage.config, n) for n in names]
    rows, held_out = (first_rows(data, n) for data, n in zip(given, names, strict=True))
    if rows is None:
        return
    keys = [_key(row) for row in rows]
    yield from _repeats(names[0], keys)
    if held_out is not None:
        yield from _leak(names, keys, [_key(row) for row in held_out])
    if stage.is_rlhf:
        yield from _prompts(stage, rows)
    else:
        yield from _texts(stage, rows)


def _key(row: Any) -> str:
    """The key by which equal rows are found."""
    return json.dumps(row, sort_keys=True, default=str)


def _repeats(name: str, keys: Sequence[str]) -> Iterator[Finding]:
    repeated = 1 - len(set(keys)) / len(keys)
    if repeated > MAX_REPEATED:
        yield Finding(
            "data.duplicates", "warning", f"{repeated:.0%} of the rows of {name} repeat another",
            "they count several times as much, and hide in averages",
            "Remove them, unless you weigh rows by repeating them.",
        )  # fmt: skip


def _leak(names: Sequence[str], keys: Sequence[str], held_out: Sequence[str]) -> Iterator[Finding]:
    shared = sum(key in set(keys) for key in held_out)
    if shared:
        yield Finding(
            "data.leak", "warning",
            f"{shared} of the {len(held_out)} rows of {names[1]} are in {names[0]} as well",
            "their results say what was learnt by heart",
            f"Take them out of {names[0]}.",
        )  # fmt: skip


def _prompts(stage: Stage, rows: Rows) -> Iterator[Finding]:
    config, env = stage.config, stage.env
    num = len(rows)
    if num < config.num_prompts_per_iteration:
        yield Finding(
            "data.few_prompts",
            "warning",
            f"prompts has {num} rows, and an iteration samples {config.num_prompts_per_iteration}",
            "some stand in one batch several times",
            "Add prompts, or raise num_completions.",
        )
    column = env.get("prompt_column") or next(
        (name for name in ("prompt", "messages") if name in rows.columns), rows.columns[0]
    )
    prompts = [row[column] for row in rows]
    yield from _blank("prompts", [text for text in prompts if isinstance(text, str)])
    if env.get("prompt_overflow") == "error" or not _is_here(env.get("model")):
        return
    if stage.is_conversation:
        return
    from rllib_llm.envs.prompts import PromptEncoder, PromptSource
    from rllib_llm.envs.rlhf import policy_tokenizer

    encoder = PromptEncoder(policy_tokenizer(env), env["max_prompt_len"])
    source = PromptSource(
        rows, prompt_column=env.get("prompt_column"), split_seed=env.get("split_seed", 0)
    )
    looked_at = min(NUM_ENCODED, len(source))
    encoder.encode([source.row(index) for index in range(looked_at)])
    if encoder.num_truncated > MAX_CUT * looked_at:
        yield Finding(
            "data.cut", "warning",
            f"{encoder.num_truncated} of the first {looked_at} prompts have more than "
            f"max_prompt_len={env['max_prompt_len']} tokens",
            "they lose their beginning",
            _longer(encoder.longest(source), config),
        )  # fmt: skip


def _longer(longest: int, config: Any) -> str:
    """The remedy for truncated prompts of up to `longest` tokens."""
    positions = num_positions(config.pretrained_model)
    if positions is None or longest + config.max_new_tokens <= positions:
        return f"Raise max_prompt_len to {longest}, or shorten them."
    room = max(0, positions - config.max_new_tokens)
    return (
        f"Shorten them: the model reads {positions} tokens, and beside max_new_tokens="
        f"{config.max_new_tokens} a prompt has {room} of them."
    )


def _texts(stage: Stage, rows: Rows) -> Iterator[Finding]:
    config = stage.config
    if len(rows) < config.total_train_batch_size:
        yield Finding(
            "data.few_rows",
            "warning",
            f"data has {len(rows)} rows, and a batch {config.total_train_batch_size}",
            "some stand in one batch several times",
            f"Lower train_batch_size_per_learner to {len(rows)}, or add rows.",
        )
    if {"chosen", "rejected"} <= set(rows.columns):
        same = sum(row["chosen"] == row["rejected"] for row in rows)
        if same:
            yield Finding(
                "data.same_pair", "warning", f"{same} of {len(rows)} pairs have equal answers",
                "nothing can be preferred", "Remove them.",
            )  # fmt: skip
    for column in ("text", "completion", "chosen"):
        if column in rows.columns:
            texts = [row[column] for row in rows if isinstance(row[column], str)]
            yield from _blank(f"data.{column}", texts)
    yield from _cut_texts(stage, rows)


def _cut_texts(stage: Stage, rows: Rows) -> Iterator[Finding]:
    config = stage.config
    if not _is_here(config.pretrained_model):
        return
    tokenizer, limit = config.load_tokenizer(), config.longest_text()
    texts = [text for row in rows[:NUM_ENCODED] if (text := _whole_text(row))]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    num_cut = sum(length > limit for length in lengths)
    if num_cut > MAX_CUT * max(1, len(lengths)):
        yield Finding(
            "data.cut", "warning",
            f"{num_cut} of the first {len(lengths)} rows have more than {limit} tokens",
            "what is beyond is not learnt from",
            f"Raise max_length to {max(lengths)} where the model reads so much, or cut them well.",
        )  # fmt: skip


def _whole_text(row: Any) -> str:
    """A row's text, roughly: columns that are text, one answer of a pair."""
    parts = [row.get("prompt"), row.get("text") or row.get("completion") or row.get("chosen")]
    return " ".join(part for part in parts if isinstance(part, str))


def _blank(name: str, texts: Sequence[str]) -> Iterator[Finding]:
    num = sum(not text.strip() for text in texts)
    if num > MAX_EMPTY * len(texts):
        yield Finding(
            "data.empty", "warning", f"{num} of {len(texts)} rows of {name} are empty",
            "there is nothing to learn from them", "Remove them.",
        )  # fmt: skip
