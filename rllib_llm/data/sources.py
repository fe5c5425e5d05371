"""Rows of any data set: a file, a folder, a hub id, a function or a list, all read the same way.

Prompts, SFT texts, preference pairs and pretraining text all come through `load_rows`.
"""

from __future__ import annotations

import functools
import glob
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from rllib_llm.data.files import SUFFIXES, missing_file, read_file, rows_of
from rllib_llm.data.rollout_store import is_rollout_folder
from rllib_llm.data.rows import Rows, concatenated
from rllib_llm.shared.dotted import import_dotted, looks_dotted, named_entries
from rllib_llm.shared.errors import Problem, Problems, report, require, unknown_key
from rllib_llm.shared.messages import blamed_on
from rllib_llm.shared.storage import local_copy

Source = str | Path | Mapping[str, Any] | Iterable[Any] | Callable[..., Any]

_OF_ROLLOUTS, _OF_FUNCTIONS = ("where", "best_of_group"), ("kwargs",)
_OF_DATA_SETS = ("name", "split", "revision")
_SOURCE_KEYS = ("path", "columns", "limit", *_OF_DATA_SETS, *_OF_FUNCTIONS, *_OF_ROLLOUTS)
# What a source lacks that these keys choose from.
_LACKING = {
    _OF_ROLLOUTS: "holds no rollouts of a run",
    _OF_FUNCTIONS: "is no function with arguments",
    _OF_DATA_SETS: "has no configurations, splits or revisions",
}
_UNREAD_SUFFIXES = (".xlsx", ".xls", ".ods", ".feather", ".pkl", ".gz", ".zip")
SHAREGPT = "conversations"  # its name for messages
_NAMED = {"messages", "prompt", "text", "completion"}  # what is read where rows have it
_QUICK_BYTES = 64 * 1024**2
_ALLOWED = (
    f"a file ({', '.join(SUFFIXES)}; a pattern or a list of files), a data set folder, a Hugging "
    "Face hub id, the rollouts of a run, a dotted path to a function returning rows, or the rows "
    "themselves"
)


def load_rows(source: Source | None, *, name: str = "data") -> Rows:
    """Returns the rows of `source`, at least one; `name` is the setting to blame in messages.
    Chats in a column `conversations` (ShareGPT's) are found under `messages`.

    Args:
        source: one of
            a file, pattern (`data/*.jsonl`) or list of files: JSON Lines (or one JSON array),
            Parquet, plain text (one row {"text": line} for each line that is not blank);
            a folder written by `datasets.save_to_disk`, or one `datasets.load_dataset` can read;
            the `rollouts` folder of a run, without its failed and evaluated rows;
            the URL of a file or folder (s3://...), which is copied here first;
            a hub id such as "stanfordnlp/imdb" (its "train" split);
            a dotted path to a function returning dicts or strings, or such a function or
            iterable itself (a string becomes {"text": string});
            a dict {"path": any of these, "name": configuration of the hub data set, "split",
            "revision", "columns": {new name: old name}, "limit": first rows only, "kwargs":
            arguments of the function; of rollouts also "where": an SQL condition, and
            "best_of_group": how many completions of each prompt, those of the highest score}.

    Raises:
        Problems: nothing there, unknown format, a broken line (numbered), or no rows.
    """
    require(not is_mixture(source), name, source, "be one data set",
            "data, eval_data, ptx_data and ptx_eval_data alone mix several", "")  # fmt: skip
    source, options = _with_options(source, name)
    with blamed_on(name, source, "give rows", remedy="Correct the data, or its function"):
        rows = _read(source, options, name)
    if options.get("columns"):
        rows = rows.renamed(options["columns"])
    if "limit" in options:
        rows = rows.first(options["limit"])
    require(len(rows), name, ..., "hold at least one row", f"{rows.description} is empty", "")
    if SHAREGPT in rows.columns and not _NAMED & {*rows.columns}:
        chat = rows[0][SHAREGPT]
        if isinstance(chat, list) and chat and isinstance(chat[0], dict) and "role" in chat[0]:
            return rows.renamed({"messages": SHAREGPT})
    return rows


def is_mixture(data: Any) -> TypeGuard[Sequence[Any]]:
    """Whether data is a list of {"path": ..., "weight": ...}, of which some may lack the weight."""
    entries = data if isinstance(data, list | tuple) else ()
    known = {*_SOURCE_KEYS, "weight"}
    with_path = [{*entry} for entry in entries if isinstance(entry, Mapping) and "path" in entry]
    return any("weight" in keys for keys in with_path) or (
        0 < len(with_path) == len(entries) and all(keys <= known for keys in with_path)
    )


def entries_of(data: Sequence[Any], name: str) -> list[tuple[dict[str, Any], float]]:
    """The sources of a mixture and their weights.

    Raises:
        Problems: a weight that is not above 0.
    """
    entries = []
    for number, entry in enumerate(data):
        own = dict(entry)
        weight = own.pop("weight", 1)
        require(type(weight) in (int, float) and 0 < weight < math.inf,
                f"{name}[{number}].weight", weight, "be a number above 0",
                "it is the entry's share beside the others'", "Write weight: 1")  # fmt: skip
        entries.append((own, weight))
    return entries


# The settings that name data, of a config and of an environment.
OF_CONFIG = ("data", "eval_data", "normalization_data", "ptx_data", "ptx_eval_data")
OF_ENV = ("prompts", "eval_prompts")


def check_source(source: Source | None, *, name: str = "data") -> str:
    """Raises what `load_rows` would where that is known without reading: a key that is not known, a
    file that is not there, a dotted path to nothing. Returns the hub id that the rows come from, ""
    without one: the hub is not asked. Of a mixture each part is looked at."""
    if is_mixture(source):
        parts = enumerate(entries_of(source, name))
        ids = [check_source(part, name=f"{name}[{number}]") for number, (part, _) in parts]
        return next(filter(None, ids), "")
    source, options = _with_options(source, name)
    hub_id = ""
    for place, item in named_entries(source, name):
        is_name = isinstance(item, (str, Path)) and (item is source or _is_file(item))
        if is_name:
            found = _locate(str(item), options, place)
            _refuse_choices(options, repr(str(item)), name, _keys_of(found))
            hub_id = found if isinstance(found, str) and not Path(found).is_dir() else hub_id
    return hub_id


def is_quick_to_read(source: Source | None) -> bool:
    """True for data that is fast to read: functions' results, lists, and files of at most 64 MiB;
    false for hub data sets and data set folders."""
    options: dict[str, Any] = {}
    if is_mixture(source):
        return all(is_quick_to_read(part) for part, _ in entries_of(source, "data"))
    if isinstance(source, Mapping):
        options, source = dict(source), source.get("path")
    if isinstance(source, str | Path):
        found = _locate(str(source), options, "data")
        if isinstance(found, str):
            return False
        files = found if isinstance(found, list) else []
    else:
        items = source if isinstance(source, list | tuple) else []
        files = [Path(item).expanduser() for item in items if _is_file(item)]
    return sum(file.stat().st_size for file in files) <= _QUICK_BYTES


def _with_options(source: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The source to be read, and the further keys of a mapping that says so."""
    if not isinstance(source, Mapping):
        return source, {}
    options = {key: value for key, value in source.items() if key != "path" and value is not None}
    found = [unknown_key(name, key, _SOURCE_KEYS) for key in source if key not in _SOURCE_KEYS]
    if "path" not in source:
        found.append(Problem(name, "have a 'path'", "", f"Set it to {_ALLOWED}", dict(source)))
    for key in ("limit", "best_of_group"):
        number = options.get(key, 1)
        if type(number) is not int or number < 1:
            found.append(Problem(f"{name}.{key}", "be an integer of at least 1", value=number))
    columns, where = options.get("columns", {}), options.get("where", "")
    if not isinstance(columns, Mapping):
        found.append(Problem(f"{name}.columns", "be {new name: old name}", value=columns))
    if not isinstance(where, str):
        rule = "be an SQL condition such as 'score > 0'"
        found.append(Problem(f"{name}.where", rule, value=where))
    report(found)
    return source["path"], options


def _read(source: Any, options: dict[str, Any], name: str) -> Rows:
    if isinstance(source, (str, Path)):
        text = str(source)
        found = _locate(text, options, name)
        own = _keys_of(found)
        _refuse_choices(options, repr(text), name, own)
        if isinstance(found, list):
            return _read_files(found, text, name)
        if not isinstance(found, str):
            return rows_of(found(), text, name)
        if own == _OF_ROLLOUTS:
            from rllib_llm.data.rollouts import load_rollouts  # few runs learn from another's

            return load_rollouts(found, options.get("where"), options.get("best_of_group"), name)
        return _read_hugging_face(found, options, name)
    what = f"a {type(source).__name__}"
    _refuse_choices(options, what, name, _OF_FUNCTIONS if callable(source) else ())
    if isinstance(source, Rows):
        return source
    if callable(source):
        described = getattr(source, "__qualname__", repr(source))
        return rows_of(_bound(source, options, described, name)(), f"{described}()", name)
    if isinstance(source, (list, tuple)) and source and all(_is_file(item) for item in source):
        return _read_files([Path(item).expanduser() for item in source], source, name)
    if isinstance(source, Iterable) or hasattr(source, "column_names"):
        return rows_of(source, f"{what} of rows", name)
    raise Problems(name, f"be {_ALLOWED}", f"{type(source).__name__} is none of these", "", source)


def _refuse_choices(
    options: Mapping[str, Any], what: str, name: str, own: tuple[str, ...] = ()
) -> None:
    """Raises Problems for a key that chooses from another kind of source than `what`, whose keys
    are `own`."""
    for key, value in options.items():
        lacking = next((why for keys, why in _LACKING.items() if key in keys and keys != own), "")
        require(not lacking, f"{name}.{key}", value, "be left out", f"{what} {lacking}", "")


def _read_files(paths: Sequence[Path], source: Any, name: str) -> Rows:
    is_list = isinstance(source, (list, tuple))  # else a pattern, which names many
    places = named_entries(paths, name) if is_list else [(name, path) for path in paths]
    parts = [read_file(path, place) for place, path in places]
    return parts[0] if len(parts) == 1 else concatenated(parts, f"{len(parts)} files ({source})")


def _is_file(item: Any) -> bool:
    return isinstance(item, (str, Path)) and Path(item).expanduser().suffix in SUFFIXES


def _keys_of(found: list[Path] | str | Callable[[], Any]) -> tuple[str, ...]:
    """The keys that choose from what `_locate` has found."""
    if isinstance(found, str):
        return _OF_ROLLOUTS if is_rollout_folder(found) else _OF_DATA_SETS
    return () if isinstance(found, list) else _OF_FUNCTIONS


def _locate(text: str, options: dict[str, Any], name: str) -> list[Path] | str | Callable[[], Any]:
    """The source that `text` names: files, a data set folder or hub id, or a function that returns
    the rows."""
    path = local_copy(text)
    if path.is_file():
        return [path]
    if path.is_dir():
        holds_model = any(path.glob("*.safetensors")) or (path / "tokenizer.json").is_file()
        require(not holds_model, name, text, "be a folder of data", "it holds a model or a "
                "tokenizer", "Name the folder or file of the rows")  # fmt: skip
        return str(path)
    if any(character in text for character in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))
        if matches:
            return [Path(match) for match in matches]
    if path.suffix in SUFFIXES or text.startswith((".", "/", "~")):
        raise missing_file(path, text, name)
    require(path.suffix.lower() not in _UNREAD_SUFFIXES, name, text, f"end in one of "
            f"{list(SUFFIXES)}", "", "Save it as CSV or Parquet")  # fmt: skip
    if looks_dotted(text):
        found = import_dotted(text, name=name)
        return _bound(found if callable(found) else lambda: found, options, text, name)
    return text


def _bound(
    function: Callable[..., Any], options: Mapping[str, Any], text: str, name: str
) -> Callable[[], Any]:
    """`function` with the `kwargs` of `options`, which are checked against its parameters."""
    kwargs = options.get("kwargs") or {}
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        allowed = list(inspect.signature(function).parameters)
        rule = f"be arguments of {text!r}, which has {allowed or 'none'}"
        raise Problems(f"{name}.kwargs", rule, error, value=kwargs) from error
    return functools.partial(function, **kwargs)


def _read_hugging_face(text: str, options: dict[str, Any], name: str) -> Rows:
    """A folder or hub id, through the `datasets` library (imported only here)."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    split = options.get("split")
    try:
        if (Path(text) / "state.json").exists() or (Path(text) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(text)
        else:
            revision = options.get("revision")
            loaded = datasets.load_dataset(text, options.get("name"), revision=revision)
    except (
        OSError, ValueError, IndexError, HfHubHTTPError, HFValidationError,
        datasets.exceptions.DatasetGenerationError,
    ) as error:  # fmt: skip
        looked = f"there is no such file or folder (looked in {str(Path.cwd())!r})"
        found = "the folder is there" if Path(text).is_dir() else looked
        raise Problems(
            name, f"be {_ALLOWED}", f"{found}, and reading it as a data set failed "
            f"({type(error).__name__}: {str(error)[:300]})", "Check the spelling, or for a hub id "
            "the connection", text,
        ) from error  # fmt: skip
    if isinstance(loaded, Mapping):
        wanted = split or ("train" if "train" in loaded or len(loaded) > 1 else next(iter(loaded)))
        require(wanted in loaded, f"{name}.split", wanted, f"be a split of {text!r}",
                f"it has {list(loaded)}", "")  # fmt: skip
        loaded = loaded[wanted]
    return Rows(loaded, text)
