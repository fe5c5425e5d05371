"""The columns of the rollout store: one row for each completion.

Where it lies says the iteration: `iteration=12/part-00000034.parquet`. Readers of Parquet
make a column of it. Lists of a row are as long as its completion, from its first token on.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1
VERSION_KEY = b"rllib_llm_rollouts"  # in each file's metadata, with the version
STATUSES = ("trained", "rejected", "failed", "evaluated")

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_BY_NAME = pa.map_(pa.string(), pa.float32())

SCHEMA = pa.schema(
    [
        ("run", pa.string()),  # the trial's folder name
        ("status", pa.string()),  # one of STATUSES
        ("reason", pa.string()),  # why it was rejected or failed
        ("position", pa.int64()),  # of the prompt, in the order in which prompts are sampled
        ("group", pa.int64()),  # rows alike in it are completions of one prompt
        ("sample", pa.int32()),  # place in the group
        ("prompt_index", pa.int64()),  # the prompt's row in its data set
        ("env", pa.string()),
        ("replica", pa.int32()),  # of the environment, where it is known
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("messages", pa.string()),  # of a conversation, as JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # sampled by the policy
        ("logprobs", pa.list_(pa.float32())),  # the sampler's own, nats
        ("ref_logprobs", pa.list_(pa.float32())),  # the reference's
        ("advantages", pa.list_(pa.float32())),  # what the learner made of it, once trained
        ("version_spans", pa.list_(_SPAN)),  # weights that sampled tokens start .. end - 1
        ("score", pa.float32()),  # what the judge says, before any KL share
        ("reward", pa.float32()),  # the environment's, its KL share taken off
        ("valid", pa.bool_()),  # False where the judge failed
        ("rewards", _BY_NAME),  # what the score is made of
        ("metrics", _BY_NAME),  # what the environment reports beside it
        ("tokens", pa.int32()),  # sampled ones
        ("finish_reason", pa.string()),  # stop, length, aborted or error
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("tokenizer", pa.string()),  # a hash of the vocabulary the ids belong to
        ("started", pa.timestamp("us", "UTC")),  # its batch
        ("ended", pa.timestamp("us", "UTC")),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


class RolloutSchemaError(ValueError):
    """Files that another version of this package wrote, or nobody's."""


def check_version(schema: pa.Schema, where: str) -> None:
    """Raises RolloutSchemaError unless files of `schema` can be read here."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if found != str(SCHEMA_VERSION):
        raise RolloutSchemaError(
            f"{where} has rollout schema version {found}, which must be {SCHEMA_VERSION}: its "
            "columns mean something else. Read it with the version of rllib_llm that wrote it."
        )


def conform(table: pa.Table) -> pa.Table:
    """`table` with exactly the columns of `SCHEMA`: those it lacks are null."""
    given = dict(zip(table.column_names, table.columns, strict=True))
    columns = []
    for field in SCHEMA:
        column = given.get(field.name)
        if column is None:
            column = pa.nulls(table.num_rows, field.type)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=SCHEMA)
