"""The report of a run: one HTML file that asks nobody for anything: curves, settings, environment,
before and after, and a table of completions. Of two runs: side by side.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.data.decoding import TokenTexts
from rllib_llm.data.rollout_store import IMAGES, RolloutSchemaError
from rllib_llm.data.rollouts import NoRolloutsError, open_rollouts, rollouts_of
from rllib_llm.modules.images import thumbnail
from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.runs.metrics import Metric, curves, first_and_last, reward_parts, summary_metrics
from rllib_llm.runs.results import (
    as_shown,
    before_and_after,
    flatten,
    fresh_series,
    number,
    read_json_lines,
    read_results,
    series,
)
from rllib_llm.runs.run_folder import ENVIRONMENT_FILE
from rllib_llm.runs.signs import signs
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.run_layout import RESULTS, SETTINGS_FILE, RunFolder, name_one
from rllib_llm.shared.storage import Place, place, read_json, replace_text

STOCK_CURVES = (Metric("env_runners/episode_return_mean", "return", unit="mean over episodes"),)
X_AXIS = ("episode", "episodes")
STOCK_X_AXIS = ("num_env_steps_sampled_lifetime", "environment steps")


PAGE_FILE = "report.html"
TEMPLATE = Path(__file__).parent / "page"
MAX_PAIRS = 50
MAX_POINTS = 1000  # of a curve
# Left out where they would hold only zeros, as the staleness of a synchronous run.
EXTRA_CURVES = (
    Metric("train/staleness", "staleness", unit="updates"),
    Metric("train/num_invalid", "completions without a score", unit="rows"),
    Metric("policy/clipfrac_avg", "clipped ratios", unit="share of tokens"),
    Metric("grad_norm", "gradient norm", unit="before clipping"),
    Metric("lr", "learning rate", unit="last optimiser step"),
    Metric("throughput/tokens_per_s", "sampled tokens", unit="per second"),
)


def find_trials(folder: str | Place) -> list[tuple[str, Place]]:
    """Labels and folders of the trials of a run, of a stage or of a trial's folder, those that have
    reported, in the order in which they began.

    Raises:
        Problems: there are none.
    """
    root = place(folder)
    root = root.resolve() if isinstance(root, Path) else root
    found = RunFolder(root).in_trials(RESULTS)
    begun = {  # seconds; a file is empty where a kill cut its first row off
        file: float(rows[0].get("timestamp", 0))
        for file in found
        if (rows := read_json_lines(file))
    }
    files = sorted(begun, key=begun.__getitem__)
    if not files:
        inside = name_one(RunFolder(root).holding(RESULTS))
        remedy = inside or "Name the folder that `rllib train` shows, after an iteration"
        why = f"it holds no {RESULTS}"
        raise Problems("run", "be the folder of a run with results", why, remedy, str(root))
    trials = [file.parent for file in files]
    stages = [trial.parent for trial in trials]
    return [
        (f"{stage.name} · {trial.name}" if stages.count(stage) > 1 else stage.name, trial)
        for trial, stage in zip(trials, stages, strict=True)
    ]


def write_page(groups: Mapping[str, Sequence[tuple[str, Place]]], file: Place) -> Place:
    """Writes the page of the runs in `groups`, the trials of each (`find_trials`) by its name;
    stages of one run in sequence, several runs side by side."""
    found = [{"run": name, **_trial(*each)} for name, trials in groups.items() for each in trials]
    data = {"title": " and ".join(groups), "several": len(groups) > 1, "trials": found}
    page, style, script = (
        (TEMPLATE / f"page.{end}").read_text(encoding="utf-8") for end in ("html", "css", "js")
    )
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    # A text may hold "</script>" or a comment's beginning: neither ends the data so.
    text = to_json(data, inf_nan_mode="null").decode().replace("<", "\\u003c")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, page.replace("/*DATA*/", text))
    return file


def _trial(label: str, trial_folder: Place) -> dict[str, Any]:
    results = [*map(as_shown, read_results(trial_folder))]
    last = results[-1] if results else {}
    settings = flatten(read_json(trial_folder / SETTINGS_FILE))
    compared = before_and_after(read_json_lines(trial_folder / SAMPLES_FILE))
    pairs = [
        {"env": before.get("env", ""), "prompt": before.get("question") or before["prompt"],
         "before": before["completion"], "after": after["completion"],
         "score_before": before.get("score"), "score_after": after.get("score")}
        for before, after in spread(compared, MAX_PAIRS)
    ]  # fmt: skip
    summary = [[each.title, *first_and_last(results, each)] for each in summary_metrics(results)]
    rows = page_rows(trial_folder)
    names = dict.fromkeys(name for row in rows for name in row.get("images", ()))
    folder = rollouts_of(trial_folder) / IMAGES
    thumbnails = {
        name: thumbnail((folder / name).read_bytes(), THUMBNAIL_SIDE)
        for name in [*names][:MAX_THUMBNAILS] if (folder / name).is_file()
    }  # fmt: skip
    return {
        "label": label, "iterations": last.get("training_iteration"),
        "seconds": number(last.get("time_total_s")),
        "settings": {name: _short(value) for name, value in sorted(settings.items())},
        "environment": read_json(trial_folder.parent / ENVIRONMENT_FILE),  # of the stage
        "summary": summary, "panels": panels(results),
        "signs": [f"iteration {sign.iteration}: {sign.text}" for sign in signs(results)],
        "pairs": pairs, "rows": rows, "thumbnails": thumbnails,
    }  # fmt: skip


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:299]}…"


def panels(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The curves of a trial: [{title, unit, x_title, curves: [{name, x, y}]}]."""
    is_ours = any("episode" in result for result in results)
    x_key, x_title = X_AXIS if is_ours else STOCK_X_AXIS
    parts = (
        Metric(key, f"reward: {name}", unit="before its weight",
               held_out=key.replace("train/", "eval/"))
        for key, name in reward_parts(results).items()
    )
    found = []
    for one in (*(curves(results) if is_ours else STOCK_CURVES), *parts, *EXTRA_CURVES):
        points = {"training": series(results, x_key, one.key)}
        if one.held_out:
            points["held out"] = fresh_series(results, x_key, one.held_out)
        lines = []
        for name, (xs, ys) in points.items():
            step = max(1, -(-len(xs) // MAX_POINTS))
            lines += [{"name": name, "x": xs[::step], "y": ys[::step]}] if ys else []
        is_flat = one in EXTRA_CURVES and not any(any(line["y"]) for line in lines)
        if lines and not is_flat:
            title = one.title[:1].upper() + one.title[1:]
            found.append({"title": title, "unit": one.unit, "x_title": x_title, "curves": lines})
    return found


MAX_ROWS = 2000  # on one page; spread over the run
DIGITS = 4
TOKEN_COLUMNS = ("completion_ids", "logprobs", "ref_logprobs", "advantages")
COLUMNS = ("iteration", "status", "env", "prompt", "images", "completion", "score", "rewards",
           "valid", "finish_reason", *TOKEN_COLUMNS)  # fmt: skip
MAX_THUMBNAILS, THUMBNAIL_SIDE = 200, 64  # different images on one page; pixels
SPLITS = {"trained": "train", "evaluated": "eval"}
NO_PART = ("iteration", "split", "prompt_index", "prompt", "completion", "score")


def page_rows(trial_folder: Place, limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Rows {iteration, split, prompt, completion, score, parts, tokens} of a trial, `limit` at
    most, spread evenly. split: with the environment's name where there are several. tokens:
    [[text, log-prob, advantage, KL], ...], None where not known; of samples without tokens [].
    """
    try:
        rollouts = open_rollouts([rollouts_of(trial_folder)])
    except NoRolloutsError:
        pass
    except RolloutSchemaError as error:
        warnings.warn(str(error), stacklevel=2)
    else:
        tokenizer = _tokenizer(trial_folder)
        texts = None if tokenizer is None else TokenTexts(tokenizer)
        chosen = rollouts.take(spread(range(rollouts.count_rows()), limit), columns=[*COLUMNS])
        rows = chosen.to_pylist()
        several = len({row["env"] for row in rows}) > 1
        if rows:
            return [_of_rollout(row, texts, row["env"] if several else "") for row in rows]
    return [
        {
            "iteration": row.get("iteration"),
            "split": f"{row.get('split', 'train')} {row.get('env', '')}".strip(),
            "prompt": row.get("prompt", ""), "completion": row.get("completion", ""),
            "score": row.get("score"), "tokens": [],
            "parts": {name: value for name, value in row.items()
                      if name not in NO_PART and isinstance(value, int | float)},
        }
        for row in spread(read_json_lines(trial_folder / SAMPLES_FILE), limit)
    ]  # fmt: skip


def _of_rollout(row: Mapping[str, Any], texts: TokenTexts | None, env: str) -> dict[str, Any]:
    status = str(row.get("status"))
    ids, *numbers = (row.get(name) or [] for name in TOKEN_COLUMNS)
    tokens = []  # the text "#17" without a tokenizer
    for token, logprob, reference, advantage in zip_longest(ids, *(n[: len(ids)] for n in numbers)):
        kl = None if logprob is None or reference is None else logprob - reference
        known = (x if x is None else round(x, DIGITS) for x in (logprob, advantage, kl))
        tokens.append([texts.of(token)[0] if texts else f"#{token}", *known])
    return {
        "iteration": row["iteration"],
        "split": f"{SPLITS.get(status, status)} {env}".strip(),
        "prompt": row.get("prompt") or "", "completion": row.get("completion") or "",
        "score": row.get("score") if row.get("valid", True) else None,
        "images": row.get("images") or [],
        "parts": json.loads(row.get("rewards") or "{}"), "tokens": tokens,
    }  # fmt: skip


def spread(rows: Sequence[Any], limit: int) -> list[Any]:
    """`limit` of the rows, from first to last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _tokenizer(trial_folder: Place) -> Any:
    """That of the exported model, else of the newest checkpoint, else of the folder that the run
    began with; None where there is none yet. From a URL no model is fetched for it."""
    folders = []
    if isinstance(trial_folder, Path):
        saved = RunFolder(trial_folder).checkpoints()
        folders = [trial_folder / "model", *(each / MODEL_IN_CHECKPOINT for each in saved)]
    model = read_json(trial_folder / SETTINGS_FILE).get("model")
    folders += [Path(model).expanduser()] if isinstance(model, str) else []
    for folder in folders:
        if (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder)
    return None
