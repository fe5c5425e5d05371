"""Rollouts of a run, read: found, chosen by a condition, paired, as rows to learn from."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from rllib_llm.data.rollout_store import (
    ROLLOUTS,
    SCHEMA,
    STORE_FILE,
    check_version,
    is_rollout_folder,
    not_contained,
    rollouts_in,
)
from rllib_llm.data.rows import Rows
from rllib_llm.shared.errors import Problems, did_you_mean, require
from rllib_llm.shared.run_layout import SETTINGS_FILE, RunFolder, name_one
from rllib_llm.shared.storage import Place, UrlPath, place, read_json

_OTHERWISE = "Check the path, and that store_rollouts is on; SFT, RewardModel and DPO sample none"
IN_ORDER = ("iteration", "position", "sample", "row")
# What a later stage learns from, unless its condition speaks of these itself.
LEARNABLE_SQL = "status IN ('trained', 'rejected') AND valid"
LEARNABLE = (pc.field("status").isin(["trained", "rejected"])) & pc.field("valid")
_GROUP_COLUMNS = ("run", "iteration", "group")
_LEARNT_COLUMNS = (
    "iteration", "run", "position", "group", "sample", "status", "score", "reward", "prompt",
    "completion", "messages", "prompt_ids", "completion_ids", "loss_mask", "tokenizer",
    "images",
)  # fmt: skip


class NoRolloutsError(Problems):
    """A folder without rollouts."""


def rollouts_of(trial: Place) -> Place:
    """`rollouts_in` with the setting of a trial, which its files have."""
    return rollouts_in(trial, read_json(trial / SETTINGS_FILE).get("rollouts_path"))


def rollout_folders(run: str | Path | UrlPath) -> list[Place]:
    """Those of `rollouts_by_trial`."""
    return [*rollouts_by_trial(run).values()]


def rollouts_by_trial(run: str | Path | UrlPath) -> dict[Place, Place]:
    """By trial the rollouts of a run, stage or trial, of a checkpoint's trial, or of the folder
    that `run` is, or that are below it, as `rollouts_path` has them.

    Raises:
        NoRolloutsError: there is none.
    """
    root = place(run)
    if root.name.startswith(("checkpoint_", "best_checkpoint")):
        root = root.parent
    if isinstance(root, Path) and not root.exists():
        beside = [path.name for path in root.parent.glob("*") if path.is_dir()]
        hint = did_you_mean(root.name, beside, otherwise="Check the path.")
        raise NoRolloutsError("run", "be a folder", "there is none", hint, str(run))
    if is_rollout_folder(root):
        return {root.parent: root}
    inside = RunFolder(root)
    stores = [file.parent for file in inside.in_trials(f"{ROLLOUTS}/{STORE_FILE}")]
    found = {store.parent: store for store in sorted(stores, key=str)}
    found |= {trial: store for file in (() if found else inside.in_trials(SETTINGS_FILE))
              if is_rollout_folder(store := rollouts_of(trial := file.parent))}  # fmt: skip
    found = found or {file.parent: file.parent for file in root.glob(f"*/{STORE_FILE}")}
    if not found:
        near = name_one(inside.holding(f"{ROLLOUTS}/{STORE_FILE}"))
        rule = "be the folder of a run, stage or trial that kept its rollouts"
        raise NoRolloutsError("run", rule, "", near or _OTHERWISE, str(run))
    return found


def open_rollouts(folders: Sequence[Place]) -> ds.Dataset:
    """All rows of the folders, unread; RolloutSchemaError: they are of another version."""
    parts = []
    for folder in folders:
        paths = {
            file.name: file.path if isinstance(file, UrlPath) else str(file)
            for file in folder.glob("part-*.parquet")
        }
        files = [paths[name] for name in not_contained(paths)]
        if not files:
            continue
        filesystem = folder.filesystem if isinstance(folder, UrlPath) else LocalFileSystem()
        fragments = ds.dataset(files[:1], filesystem=filesystem, format="parquet")
        check_version(fragments.schema, str(folder))
        parts.append(ds.dataset(files, schema=SCHEMA, filesystem=filesystem, format="parquet"))
    if not parts:
        name = f"the folder {', '.join(map(str, folders))}"
        raise NoRolloutsError(name, "hold rollouts", "nothing was written yet", "Wait for one "
                              "iteration to end")  # fmt: skip
    return parts[0] if len(parts) == 1 else ds.dataset(parts)


def query(
    rollouts: ds.Dataset, *, where: str | None = None, sort: str | None = None,
    limit: int | None = None, columns: Sequence[str] | None = None, learnable: bool = False,
) -> pa.Table:  # fmt: skip
    """The rows that meet the SQL condition `where`, which DuckDB reads.

    Args:
        learnable: only trained and rejected rows with a score, see `LEARNABLE`.
        sort: a column, numbers from the highest on, or "column asc"; None: as they were sampled.
        limit: the first rows only.

    Raises:
        Problems: `where` or `sort` cannot be read, or DuckDB is not installed.
        FileNotFoundError: a run in progress has merged files meanwhile.
    """
    keys = [(name, "ascending") for name in IN_ORDER]
    if sort is not None:
        column, *order = sort.split()[:2] or [""]
        is_order = " ".join(order).lower() in ("", "asc", "desc") and len(sort.split()) < 3
        require(
            column in rollouts.schema.names and is_order, "sort", sort,
            "be a column, or one followed by asc or desc",
            f"there are {', '.join(rollouts.schema.names)}", "",
        )  # fmt: skip
        keys.insert(0, (column, "ascending" if "asc" in map(str.lower, order) else "descending"))
    if where is not None or (limit is not None and importlib.util.find_spec("duckdb")):
        found = _in_duckdb(rollouts, where, keys, limit, learnable)
    else:
        chosen = rollouts.filter(LEARNABLE) if learnable else rollouts
        if limit is None:
            found = chosen.to_table().sort_by(keys)
        else:  # of other rows no more than the keys is held in memory
            order = pc.sort_indices(chosen.to_table(columns=[*dict(keys)]), sort_keys=keys)
            found = chosen.take(order.slice(0, limit))
    return found if columns is None else found.select(list(columns))


def _in_duckdb(
    rollouts: ds.Dataset, where: str | None, keys: list[tuple[str, str]], limit: int | None,
    learnable: bool,
) -> pa.Table:  # fmt: skip
    try:
        import duckdb
    except ImportError as error:
        rule, remedy = "be read by DuckDB", "pip install 'rllib-llm[rollouts]'"
        raise Problems("where", rule, "it is not installed", remedy, where) from error
    files = [*rollouts.get_fragments()]
    words = {"ascending": "ASC", "descending": "DESC"}
    order = ", ".join(
        # NaN is the largest number to DuckDB, and none to pyarrow.
        (f'isnan("{name}"), ' if pa.types.is_floating(SCHEMA.field(name).type) else "")
        + f'"{name}" {words[how]} NULLS LAST'
        for name, how in keys
    )  # fmt: skip
    further = f" AND {LEARNABLE_SQL}" if learnable else ""
    most = "" if limit is None else f" LIMIT {limit}"
    text = f"SELECT * FROM rollouts WHERE ({where or 'TRUE'}){further} ORDER BY {order}{most}"
    with duckdb.connect() as connection:
        try:
            if all(isinstance(file.filesystem, LocalFileSystem) for file in files):
                # Of local files DuckDB reads what it needs, of others all columns.
                connection.read_parquet([file.path for file in files]).create_view("rollouts")
            else:
                connection.register("rollouts", rollouts)
            return connection.sql(text).to_arrow_table().cast(SCHEMA)
        except duckdb.IOException as error:
            raise FileNotFoundError(str(error)) from error
        except duckdb.Error as error:
            first = " ".join(str(error).partition("\n\n")[0].split())  # then it draws a caret
            rule = f"be an SQL condition on the columns {', '.join(rollouts.schema.names)}"
            raise Problems("where", rule, first, value=where) from error


def load_rollouts(
    folder: str, where: str | None = None, best_of_group: int | None = None, name: str = "data"
) -> Rows:
    """Rows {"prompt", "completion", ...} of a rollouts folder for a later stage to learn from.

    Held-out rows and those without a score are left out, unless `where` speaks of `status` or
    `valid` itself.

    Args:
        where: an SQL condition on the columns.
        best_of_group: how many completions of each group, those of the highest score, 1 or more.

    Raises:
        Problems: a condition that cannot be read, or no rows.
    """
    try:
        rollouts = open_rollouts([Path(folder)])
        names = re.sub(r"'[^']*'", "", where or "")  # in a text they are words
        learnable = not re.search(r"\b(status|valid)\b", names)
        table = query(rollouts, where=where, columns=_LEARNT_COLUMNS, learnable=learnable)
    except Problems as error:
        raise error.within(name) from error.__cause__
    shown = table.column("images")
    require(not any(shown.to_pylist()), name, folder, "hold rollouts of text",
            "what their prompts show would not be learnt from")  # fmt: skip
    table = table.drop_columns("images")
    if best_of_group is not None:
        rows, kept = Rows(table, folder), []
        samples = rows.column("sample")
        for group in _ranked_groups(rows):  # all rows of each group's best rollouts
            best = list(dict.fromkeys(samples[index] for index in group))[:best_of_group]
            kept += [index for index in group if samples[index] in best]
        table = table.take(pa.array(kept, pa.int64()))
    description = f"{folder}{f' where {where}' if where else ''}"
    if table.column("messages").null_count == table.num_rows:
        return Rows(table.drop_columns("messages"), description)
    learnt = table.to_pylist()
    for row in learnt:
        row["messages"] = row["messages"] and json.loads(row["messages"])
    return Rows(learnt, description)


def _ranked_groups(rows: Rows) -> list[list[int]]:
    """Indices of the rows of each group that have a score, those of the highest first: of the same
    prompt, sampled in the same iteration of the same run."""
    groups: dict[Any, list[int]] = {}
    scores, samples = rows.column("score"), rows.column("sample")
    keys = zip(*(rows.column(name) for name in _GROUP_COLUMNS), strict=True)
    for index, key in enumerate(keys):
        if scores[index] is not None and not math.isnan(scores[index]):
            groups.setdefault(key, []).append(index)
    return [
        sorted(group, key=lambda index: (-scores[index], samples[index]))
        for group in groups.values()
    ]


def pairs_of_rollouts(rows: Rows) -> Rows:
    """Rows {"prompt", "chosen", "rejected"} from rollouts: the best and the worst completion of
    each group whose scores differ. Other rows are returned unchanged.

    Raises:
        Problems: no group has two scores.
    """
    needed = {*_GROUP_COLUMNS, "score", "sample", "prompt", "completion"}
    if "chosen" in rows.columns or not needed <= set(rows.columns):
        return rows
    scores, samples, prompts = (rows.column(name) for name in ("score", "sample", "prompt"))
    pairs = []
    for group in _ranked_groups(rows):
        counts = Counter(samples[index] for index in group)
        # A rollout of several rows answers several prompts: no other can be compared with it.
        whole = [index for index in group if counts[samples[index]] == 1]
        # An environment may begin the conversations of one task in several ways.
        alike = [index for index in whole if prompts[index] == prompts[whole[0]]]
        if len(alike) > 1 and scores[alike[0]] > scores[alike[-1]]:
            pairs.append(_pair(rows[alike[0]], rows[alike[-1]]))
    require(pairs, rows.description, ..., "hold a group with two scores, of rollouts of one row "
            "each", "", "Sample more completions of each prompt")  # fmt: skip
    return Rows(pairs, f"pairs of {rows.description}")


_STORED = ("completion_ids", "loss_mask", "messages")


def _pair(best: dict[str, Any], worst: dict[str, Any]) -> dict[str, Any]:
    """Texts of a pair, and the very tokens that were sampled, where they are kept."""
    pair = {"prompt": best["prompt"], "chosen": best["completion"], "rejected": worst["completion"]}
    if best.get("completion_ids") is None:
        return pair
    pair |= {name: best[name] for name in ("prompt_ids", "tokenizer")}
    for name, row in (("chosen", best), ("rejected", worst)):
        pair |= {f"{name}_{stored}": row.get(stored) for stored in _STORED}
    return pair


def summary(rollouts: ds.Dataset, by: str = "status") -> dict[str, dict[str, float]]:
    """Completions, tokens and mean score by status, or by another column. All rows of a rollout
    count as one completion, with the sum of their tokens."""
    table = rollouts.to_table(columns=[by, "tokens", "score", "row"])
    first = pc.fill_null(pc.equal(table.column("row"), 0), True)
    scores = pc.if_else(first, table.column("score"), pa.scalar(None, pa.float32()))
    table = table.set_column(2, "score", scores).set_column(3, "row", first.cast(pa.int64()))
    counted = table.group_by(by).aggregate(
        [("tokens", "sum"), ("score", "mean"), ("row", "sum")]
    )
    return {
        row[by]: {"completions": row["row_sum"], "tokens": row["tokens_sum"] or 0,
                        "score": row["score_mean"]}
        for row in sorted(counted.to_pylist(), key=lambda row: row[by] or "")
    }  # fmt: skip


def reasons(rollouts: ds.Dataset) -> dict[str, int]:
    """How many completions were rejected or failed for which reason."""
    is_first = pc.field("row").is_null() | (pc.field("row") == 0)
    table = rollouts.to_table(columns=["reason"], filter=(pc.field("reason") != "") & is_first)
    counted = pc.value_counts(table.column("reason")).to_pylist()
    return {entry["values"]: entry["counts"] for entry in counted}
