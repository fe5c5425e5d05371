"""The report of a run: its curves as one picture, and one HTML file that asks nobody for anything:
curves, settings, environment, before and after, and a table of completions. Of two runs: side by
side.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.data.encoding import TokenTexts
from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.runs.metrics import first_and_last, reward_parts, summary_metrics
from rllib_llm.runs.results import (
    RESULTS,
    before_and_after,
    flatten,
    fresh_series,
    number,
    read_json_lines,
    read_results,
    series,
)
from rllib_llm.runs.run_folder import read_environment
from rllib_llm.runs.signs import signs
from rllib_llm.shared.errors import UserError
from rllib_llm.shared.storage import Place


@dataclass(frozen=True)
class Panel:
    """One small plot: a result over the episodes, with the held-out result."""

    title: str
    unit: str
    key: str
    eval_key: str = ""
    is_share: bool = False


PANELS = (
    Panel("Reward", "judge's score", "objective/scores", "eval/scores"),
    Panel("Gold score", "exact score", "env/gold_score", "eval/gold_score"),
    Panel("KL to the reference", "nats per completion", "objective/kl"),
    Panel("Pretraining loss", "nats per token", "loss/ptx_avg", "eval/ptx_loss"),
    Panel("Entropy of the policy", "nats per token", "policy/entropy_avg"),
    Panel("Grammatical", "share", "env/grammatical", "eval/grammatical", is_share=True),
    Panel("Turns", "per conversation", "env/num_turns", "eval/num_turns"),
    Panel("Tool calls", "per conversation", "env/num_tool_calls", "eval/num_tool_calls"),
    Panel("Loss", "nats per token", "loss/sft", "eval/loss"),
    Panel("Loss", "nats per pair", "loss/reward_model", "eval/loss"),
    Panel("Pairs ordered rightly", "share", "train/accuracy", "eval/accuracy", is_share=True),
)
STOCK_PANELS = (Panel("Return", "mean over episodes", "env_runners/episode_return_mean"),)
X_AXIS = ("episode", "episodes")
STOCK_X_AXIS = ("num_env_steps_sampled_lifetime", "environment steps")
COLORS = ("#0b6e99", "#c4540a", "#3f7d20", "#8a3ffc", "#a2191f", "#6f6f6f")
MAX_COLUMNS = 3
SMOOTH_FROM = 20  # points
MARKED_UP_TO = 6
LEGEND_CHARS = 52  # that fit under a column of plots
LEGEND_LINE_CHARS = 8  # the space of a line in its colour


def plot_stage(
    title: str, trial_folders: list[Place], labels: list[str], file: Path
) -> Path | None:
    """Draw the trials' results into the PNG `file`; None where there is nothing to draw."""
    trials = [read_results(folder) for folder in trial_folders]
    is_ours = any("episode" in result for results in trials for result in results)
    x_key, x_title = X_AXIS if is_ours else STOCK_X_AXIS
    known = [*(PANELS if is_ours else STOCK_PANELS)]
    known += part_panels([result for results in trials for result in results])
    panels = [p for p in known if any(len(series(t, x_key, p.key)[1]) > 1 for t in trials)]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(MAX_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.6 * columns, 2.5 * rows + 0.5),
        squeeze=False,
        dpi=150,
        layout="constrained",
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        for index, results in enumerate(trials):
            color = COLORS[index % len(COLORS)]
            _draw(axis, results, panel, x_key, color, labels[index] if len(trials) > 1 else "")
        _dress(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(x_title, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if len(trials) > 1:
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower left", fontsize=8, frameon=False,
            ncols=max(1, LEGEND_CHARS * columns // (max(map(len, names)) + LEGEND_LINE_CHARS)),
        )  # fmt: skip
    figure.savefig(file)
    plt.close(figure)
    return file


def part_panels(results: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """One panel for each part of a reward, where there are several."""
    return tuple(
        Panel(f"Reward: {name}", "before its weight", key, key.replace("train/", "eval/"))
        for key, name in reward_parts(results).items()
    )


def _draw(
    axis: Any, results: list[dict[str, Any]], panel: Panel, x_key: str, color: str, label: str
) -> None:
    xs, ys = series(results, x_key, panel.key)
    if not ys:
        return
    if len(ys) >= SMOOTH_FROM:
        axis.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(xs, _running_mean(ys, len(ys) // 10), color=color, linewidth=1.8, label=label)
    else:  # a line through two points does not say where they are
        axis.plot(
            xs, ys, color=color, linewidth=1.8, label=label,
            marker="o" if len(ys) <= MARKED_UP_TO else None, markersize=4,
        )  # fmt: skip
    if not panel.eval_key:
        return
    xs, ys = fresh_series(results, x_key, panel.eval_key)
    if ys:
        axis.plot(
            xs, ys, "o", color=color, markersize=4, markerfacecolor="white", clip_on=False, zorder=3
        )
        axis.set_title("○ held out", loc="right", fontsize=7, color="#555555")


def _dress(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=7, length=2)
    axis.grid(color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.margins(x=0.02)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(left=0)
    if panel.is_share:
        axis.set_ylim(-0.02, 1.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#999999")


def _running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and as many before as after it, `window` in all where there are
    so many: the first and the last value are themselves."""
    half = max(1, window // 2)
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        means.append(sum(near) / len(near))
    return means


PAGE_FILE = "report.html"
TEMPLATE = Path(__file__).parent / "page"
MAX_PAIRS = 50
MAX_POINTS = 1000  # of a curve
EXTRA_PANELS = (
    Panel("Completion length", "tokens", "train/output_length", "eval/output_length"),
    Panel("Staleness", "updates", "train/staleness"),
    Panel("Completions without a score", "rows", "train/num_invalid"),
    Panel("Clipped ratios", "share of tokens", "policy/clipfrac_avg", is_share=True),
    Panel("Gradient norm", "before clipping", "grad_norm"),
    Panel("Learning rate", "last optimiser step", "lr"),
    Panel("Sampled tokens", "per second", "throughput/tokens_per_s"),
)
# Left out where nothing else happened: a synchronous run has no staleness.
NOT_WHERE_ZERO = ("train/staleness", "train/num_invalid")


@dataclass(frozen=True)
class PageTrial:
    """One trial on the page: its name and its folder."""

    label: str
    folder: Path

    @property
    def stage_folder(self) -> Path:
        """Folder of the Tune run it belongs to."""
        return self.folder.parent


def find_trials(folder: str | Path) -> list[PageTrial]:
    """The trials of a run, of a stage or of a trial's folder, those that have reported, in the
    order in which they began.

    Raises:
        UserError: there are none.
    """
    root = Path(folder).expanduser().resolve()
    files = [root / RESULTS, *root.glob(f"*/{RESULTS}"), *root.glob(f"*/*/{RESULTS}")]
    files = [file for file in files if file.is_file() and file.stat().st_size]
    if not files:
        raise UserError(
            f"run={str(root)!r} must be the folder of a run with results: there is none of "
            f"{RESULTS} in it. Name the folder that `rllib train` shows, after an iteration."
        )
    files.sort(key=_begun)
    stages = [file.parent.parent for file in files]
    trials = []
    for file, stage in zip(files, stages, strict=True):
        several = stages.count(stage) > 1
        label = f"{stage.name} · {file.parent.name}" if several else stage.name
        trials.append(PageTrial(label, file.parent))
    return trials


def _begun(result_file: Path) -> float:
    first = result_file.open(encoding="utf-8").readline()
    try:
        return float(json.loads(first).get("timestamp", 0)) or result_file.stat().st_mtime
    except ValueError:
        return result_file.stat().st_mtime


def write_page(groups: Mapping[str, Sequence[PageTrial]], file: Path) -> Path:
    """Writes the page of the runs in `groups`, keyed by name; stages of one run in sequence,
    several runs side by side."""
    data = {
        "title": " and ".join(groups),
        "several": len(groups) > 1,
        "trials": [
            {"run": name, **_trial(trial)} for name, trials in groups.items() for trial in trials
        ],
    }
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"))
    page = _read("page.html")
    page = page.replace("/*STYLE*/", _read("page.css")).replace("/*SCRIPT*/", _read("page.js"))
    # A text may hold "</script>" or a comment's beginning: neither ends the data so.
    page = page.replace("/*DATA*/", text.replace("<", "\\u003c"))
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(page, encoding="utf-8")
    os.replace(new, file)
    return file


def _read(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8")


def _trial(trial: PageTrial) -> dict[str, Any]:
    results = read_results(trial.folder)
    last = results[-1] if results else {}
    environment = read_environment(trial.stage_folder)
    return {
        "label": trial.label,
        "iterations": last.get("training_iteration"),
        "seconds": number(last.get("time_total_s")),
        "settings": _settings(trial.folder),
        "environment": environment,
        "summary": [
            [metric.title, *first_and_last(results, metric)] for metric in summary_metrics(results)
        ],
        "signs": [f"iteration {sign.iteration}: {sign.text}" for sign in signs(results)],
        "panels": panels(results),
        "pairs": _pairs(trial.folder),
        "rows": page_rows(trial.folder),
    }


def _settings(folder: Path) -> dict[str, str]:
    try:
        given = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: _short(value) for name, value in sorted(flatten(given).items())}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:299]}…"


def panels(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The curves of a trial: [{title, unit, x_title, share, curves: [{name, x, y}]}]."""
    is_ours = any("episode" in result for result in results)
    (x_key, x_title), known = (X_AXIS, PANELS) if is_ours else (STOCK_X_AXIS, STOCK_PANELS)
    found = []
    for panel in (*known, *part_panels(results), *EXTRA_PANELS):
        xs, ys = series(results, x_key, panel.key)
        if panel.key in NOT_WHERE_ZERO and not any(ys):
            continue
        curves = [{"name": "training", "x": _thin(xs), "y": _thin(ys)}] if ys else []
        if panel.eval_key:
            xs, ys = fresh_series(results, x_key, panel.eval_key)
            if ys:
                curves.append({"name": "held out", "x": _thin(xs), "y": _thin(ys)})
        if curves:
            found.append({
                "title": panel.title, "unit": panel.unit, "x_title": x_title, "curves": curves,
            })  # fmt: skip
    return found


def _thin(values: list[float]) -> list[float]:
    step = -(-len(values) // MAX_POINTS)
    return values[::step] if step > 1 else values


def _pairs(folder: Path) -> list[dict[str, Any]]:
    pairs = before_and_after(read_json_lines(folder / SAMPLES_FILE))
    step = max(1, len(pairs) // MAX_PAIRS)
    return [
        {"prompt": before["prompt"], "before": before["completion"], "after": after["completion"],
         "score_before": before.get("score"), "score_after": after.get("score")}
        for before, after in pairs[::step][:MAX_PAIRS]
    ]  # fmt: skip


def _finite(value: Any) -> Any:
    """`value` as JSON can have it: NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


SETTINGS_FILE = "params.json"  # Tune's
ROLLOUTS = "rollouts"  # the store's folder in a trial's
MAX_ROWS = 2000  # on one page; spread over the run
DIGITS = 4
TOKEN_COLUMNS = ("completion_ids", "logprobs", "ref_logprobs", "advantages")
COLUMNS = ("iteration", "status", "prompt", "completion", "score", "rewards", "valid",
           "finish_reason", *TOKEN_COLUMNS)  # fmt: skip
NO_PART = ("iteration", "split", "prompt_index", "prompt", "completion", "score")


def page_rows(trial_folder: Path, limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Rows {iteration, split, prompt, completion, score, parts, tokens} of a trial, `limit` at
    most, spread evenly. tokens: [[text, log-prob, advantage, KL], ...], None where not known; of
    samples without tokens [].
    """
    rows = _stored(trial_folder, limit)
    if rows:
        return rows
    samples = _spread(read_json_lines(trial_folder / SAMPLES_FILE), limit)
    return [_of_sample(row) for row in samples]


def _of_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        name: value
        for name, value in row.items()
        if name not in NO_PART and isinstance(value, int | float)
    }
    return {
        "iteration": row.get("iteration"),
        "split": row.get("split", "train"),
        "prompt": row.get("prompt", ""),
        "completion": row.get("completion", ""),
        "score": row.get("score"),
        "parts": parts,
        "tokens": [],
    }


def _stored(trial_folder: Path, limit: int) -> list[dict[str, Any]]:
    folder = trial_folder / ROLLOUTS
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        return []
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    per_file = max(1, limit // len(files))
    words = _words(trial_folder)
    for file in _spread(files, limit):
        table = pq.read_table(file, columns=list(COLUMNS))
        rows += [_of_rollout(row, words) for row in _spread(table.to_pylist(), per_file)]
    return rows[:limit]


def _of_rollout(row: Mapping[str, Any], words: Callable[[int], str]) -> dict[str, Any]:
    status = str(row.get("status"))
    return {
        "iteration": row["iteration"],
        "split": {"trained": "train", "evaluated": "eval"}.get(status, status),
        "prompt": row.get("prompt") or "",
        "completion": row.get("completion") or "",
        "score": row.get("score") if row.get("valid", True) else None,
        "parts": json.loads(row.get("rewards") or "{}"),
        "tokens": _tokens(row, words),
    }


def _tokens(row: Mapping[str, Any], words: Callable[[int], str]) -> list[list[Any]]:
    ids = row.get("completion_ids") or []
    logprobs, ref, advantages = (row.get(name) or [] for name in TOKEN_COLUMNS[1:])
    tokens = []
    for index, token in enumerate(ids):
        logprob, reference = _at(logprobs, index), _at(ref, index)
        kl = None if logprob is None or reference is None else logprob - reference
        tokens.append([words(token), *map(_rounded, (logprob, _at(advantages, index), kl))])
    return tokens


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _spread(rows: Sequence[Any], limit: int) -> list[Any]:
    """`limit` of the rows, from first to last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _words(trial_folder: Path) -> Callable[[int], str]:
    """Gives the text of a token id by the trial's tokenizer; "#17" without one."""
    tokenizer = _tokenizer(trial_folder)
    if tokenizer is None:
        return lambda token: f"#{token}"
    texts = TokenTexts(tokenizer)
    return lambda token: texts.of(token)[0]


def _tokenizer(trial_folder: Path) -> Any:
    """That of the exported model, else of the newest checkpoint, else of the folder that the run
    began with; None where there is none yet."""
    files = [trial_folder / "model" / "tokenizer_config.json"]
    files += sorted(trial_folder.glob("checkpoint_*/**/tokenizer_config.json"), reverse=True)
    files += [folder / "tokenizer_config.json" for folder in _began_with(trial_folder)]
    for file in files:
        if file.is_file():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(file.parent)
    return None


def _began_with(trial_folder: Path) -> list[Path]:
    """The folder of the model that the trial's settings name, where that is one."""
    try:
        model = json.loads((trial_folder / SETTINGS_FILE).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError):
        return []
    return [Path(model).expanduser()] if isinstance(model, str) else []
