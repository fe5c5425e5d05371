"""Conversations as files: JSON Lines, Parquet, Hugging Face data sets; and those of others.

A trajectory is one flat record: what was said as chat messages, and of each node its token ids,
whether they were sampled, log-probs and weight versions. Reading it back gives the same training
rows, bit for bit. Records of others, which have messages alone, are read as texts to learn from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation, Node
from rllib_llm.data.sources import load_rows

_JSON = "json:"  # in front of a value that is JSON text in a table
_MESSAGE_KEYS = ("messages", "conversations", "conversation", "completion")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool",
          "function": "tool", "ipython": "tool"}  # fmt: skip


class TrajectoryError(ValueError):
    """A file or record that is no trajectory."""


def to_record(conversation: Conversation, **extra: Any) -> dict[str, Any]:
    """The conversation as one JSON record; `extra`, such as score and group, stands beside it."""
    lists = ("messages", "token_ids", "logprobs", "versions")
    nodes = [
        {**asdict(node), **{name: list(getattr(node, name)) for name in lists}}
        for node in conversation.nodes
    ]
    return {"messages": conversation.messages, "nodes": nodes, "task": conversation.task, **extra}


def from_record(record: Mapping[str, Any], chat_format: ChatFormat) -> Conversation:
    """The conversation of a record that `to_record` made.

    Raises:
        TrajectoryError: it has no nodes, or log-probs of another number than its tokens.
    """
    if not record.get("nodes"):
        raise TrajectoryError(
            f"record with {sorted(record)} must have 'nodes': without token ids it is no "
            "trajectory of ours. Learn from its messages instead (`messages_of`)."
        )
    conversation = Conversation(chat_format, task=record.get("task"))
    for held in record["nodes"]:
        if held["sampled"] and len(held["token_ids"]) != len(held["logprobs"]):
            raise TrajectoryError(
                f"logprobs of length {len(held['logprobs'])} must be as many as the "
                f"{len(held['token_ids'])} sampled tokens. The record was cut or changed: write it "
                "again."
            )
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in held.items()
        }
        conversation.restore(Node(**fields))
    return conversation


def save(records: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Writes records to a .jsonl or .parquet file, or to the folder of a Hugging Face data set.

    Tables want one type per column: in Parquet and data sets, all but plain values are JSON text.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(lines)
        return path
    import datasets
    import pyarrow.parquet

    rows = [{key: _packed(value) for key, value in record.items()} for record in records]
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(str(path))
    return path


def load(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file or folder that `save` wrote, or of another's JSON Lines or Parquet."""
    for row in load_rows(str(path)):
        yield {key: _unpacked(value) for key, value in row.items()}


def messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Chat messages of anyone's record: OpenAI's {"messages"}, ShareGPT's {"conversations": [{from,
    value}]}, verifiers' and TRL's {"prompt", "completion"} as lists.

    Raises:
        TrajectoryError: it has none of these.
    """
    prompt = record.get("prompt")
    found = next((record[key] for key in _MESSAGE_KEYS if isinstance(record.get(key), list)), None)
    if found is None:
        raise TrajectoryError(
            f"record with {sorted(record)} must have chat messages under one of {_MESSAGE_KEYS}: "
            "nothing else says who said what. Rename the column."
        )
    before = prompt if isinstance(prompt, list) and found is record.get("completion") else []
    return [_message(message) for message in (*before, *found)]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    role, content = message.pop("from", message.get("role")), message.pop("value", None)
    message["role"] = _ROLES.get(str(role), str(role))
    message["content"] = message.get("content", content) or ""
    return message


def _packed(value: Any) -> Any:
    is_plain = isinstance(value, (str, int, float, bool, type(None)))
    if is_plain and not str(value).startswith(_JSON):
        return value
    return _JSON + json.dumps(value, ensure_ascii=False)


def _unpacked(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_JSON):
        return json.loads(value.removeprefix(_JSON))
    return value
