"""The columns of the rollout store: one row for each completion; a conversation that forked has a
row for each of its paths.

Lists of a row are as long as its completion, from its first token on. All columns are plain values,
lists and structs of fixed fields, so that pandas, DuckDB, pyarrow and `datasets` read the files as
they are.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 2
VERSION_KEY = b"rllib_llm_rollouts"  # in each file's metadata, with the version
STATUSES = ("trained", "rejected", "failed", "evaluated")

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),  # in which it was sampled, from 1; 0: before training
        ("run", pa.string()),  # the trial's folder name
        ("status", pa.string()),  # one of STATUSES
        ("reason", pa.string()),  # why it was rejected or failed
        ("position", pa.int64()),  # of the prompt, in the order in which prompts are sampled
        ("group", pa.int64()),  # rows alike in it are completions of one prompt
        ("sample", pa.int32()),  # the rollout's place in its group
        ("row", pa.int32()),  # the row's place in its rollout
        ("prompt_index", pa.int64()),  # the prompt's row in its data set
        ("env", pa.string()),
        ("replica", pa.int32()),  # of the environment, where it is known
        ("prompt", pa.string()),  # of a conversation what was said before the row's completion
        ("completion", pa.string()),
        ("messages", pa.string()),  # of a conversation all that was said on the row's path, JSON
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
        ("rewards", pa.string()),  # what the score is made of, by name, JSON
        ("metrics", pa.string()),  # what the environment reports beside it, by name, JSON
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
    """Files of another schema version."""


def check_version(schema: pa.Schema, where: str) -> None:
    """Raises RolloutSchemaError unless files of `schema` can be read here."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if found != str(SCHEMA_VERSION):
        raise other_version(found, where)


def other_version(found: str, where: str) -> RolloutSchemaError:
    """What is said of files that were written with schema version `found`."""
    return RolloutSchemaError(
        f"{where} has rollout schema version {found}, which must be {SCHEMA_VERSION}: another "
        "version of rllib_llm wrote it, and its columns differ. Sample the rollouts again, or read "
        "them with that version."
    )


def conform(table: pa.Table, iteration: int) -> pa.Table:
    """`table` with exactly the columns of `SCHEMA`, those it lacks null, as rows of `iteration`."""
    given = dict(zip(table.column_names, table.columns, strict=True))
    given["iteration"] = pa.repeat(pa.scalar(iteration, pa.int32()), table.num_rows)
    columns = []
    for field in SCHEMA:
        column = given.get(field.name)
        if column is None:
            column = pa.nulls(table.num_rows, field.type)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=SCHEMA)
