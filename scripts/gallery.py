"""Writes docs/gallery.md and its pictures from the folders of runs of the examples.

    for each NAME: rllib train file tuned_examples/NAME.yaml --storage-path RUNS
    python scripts/gallery.py RUNS

A recipe is run with the sizes that `RECIPES` names.

An example has its last run's curve, time, mark and completions. One that has no run there keeps
what the page says of it. The other examples are named with the reason why they are not shown.
"""

from __future__ import annotations

import json
import math
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from rllib_llm.cli.examples import description, example_files
from rllib_llm.runs.results import flatten

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "gallery.md"
PICTURES = DOCS / "images" / "gallery"
NUM_PROMPTS = 5
LONGEST = 160  # characters of a completion that are shown
STARTED = "%Y-%m-%d_%H-%M-%S"
NOT_SHOWN = {
    "verifiers_grpo": "needs verifiers in an environment of its own",
    "shared_arithmetic": "the first stage of the arithmetic examples",
    "shared_reviews": "the first stages of the searches",
    "reviews_asha": "eight trials, more than ten minutes",
    "reviews_pbt": "four trials, about ten minutes",
}
# Stages that are drawn beside each other, each after as many completions; of the first is the mark.
COMPARED = {
    "distill_arithmetic": {
        "distill": "distillation", "imitated": "SFT on the teacher's samples, at its end",
        "grpo": "GRPO",
    }
}  # fmt: skip
# Of a recipe: what its page draws, and the models and sizes with which it ran here.
RECIPES: dict[str, tuple[tuple[str, ...], str]] = {
    "gsm8k_grpo": (("eval/pass@1", "eval/pass@1_low", "eval/pass@1_high", "train/correct_rewards"),
        "SmolLM2-135M-Instruct: SFT on 4 batches of 32 solutions, then 4 iterations of 32 answers "
        "of up to 96 tokens; 64 held-out answers."),
    "sentiment_ppo_ptx": (("eval/scores", "objective/kl", "eval/ptx_loss"),
        "stories15M: 12 iterations of SFT, 15 of the judge, and 20 of 64 completions of 16 tokens; "
        "`ppo.lr=1e-3`."),
    "chat_dpo": (("eval/accuracy", "eval/rewards/margins"),
        "SmolLM2-135M-Instruct: 400 pairs of GSM8K's own answer and another question's, 16 an "
        "iteration; 32 held-out pairs; `dpo.lr=5e-6`."),
    "tools_grpo": (("eval/right_number_rewards", "env/num_tool_calls"),
        "SmolLM2-135M-Instruct and a chat template that knows tools: 4 iterations of 16 "
        "conversations with turns of up to 48 tokens; 16 held-out ones. So small a model calls no "
        "tool unless it is shown calls by SFT first, which the run says."),
    "distill": (("train/teacher_kl", "train/teacher_agreement"),
        "SmolLM2-135M-Instruct as the teacher of its own first 8 layers: 10 iterations of 32 "
        "answers of 48 tokens; `lr=1e-3`."),
    "cluster_grpo": (("train/staleness",),
        "stories260K on two cores: 2 learners (FSDP2), 4 samplers with the torch engine, 3 "
        "iterations of 32 completions of 16 tokens."),
}  # fmt: skip
HEAD = """# Gallery

What each example learns: the curve of its result (dashed: its pass mark), and completions of the
policy before and after. `rllib example run NAME` runs one. Seconds are of the whole command, Ray's
start included. `python scripts/gallery.py` makes this page from the folders of the runs.

"""


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def best_trials(run: Path) -> list[tuple[dict[str, Any], Path]]:
    """The plan of each stage, and the folder of its best trial."""
    found = []
    for plan in json.loads((run / "run.json").read_text(encoding="utf-8"))["experiments"]:
        stage = run / plan["name"]
        ended = json.loads((stage / "stage.json").read_text(encoding="utf-8"))
        found.append((plan, stage / ended["trial_folders"][ended["best"] or 0]))
    return found


def wall_seconds(run: Path) -> float:
    """From the command's start, which is in the folder's name, to the end of the last stage."""
    ended = max(file.stat().st_mtime for file in run.glob("*/stage.json"))
    return ended - datetime.strptime(run.name[-19:], STARTED).timestamp()


def draw(
    curves: dict[str, list[dict[str, Any]]], marks: dict[str, float], target: Path
) -> None:
    """`curves`: results by the label, "" of the only one; of one result, a level."""
    target.parent.mkdir(parents=True, exist_ok=True)
    size = (4.2 * len(marks), 2.4 if len(curves) == 1 else 3.2)
    figure, axes = plt.subplots(1, len(marks), figsize=size, layout="constrained", squeeze=False)
    for axis, (name, least) in zip(axes[0], marks.items(), strict=True):
        for number, (label, results) in enumerate(curves.items()):
            points = [(r["training_iteration"], r[name]) for r in results if name in r]
            if len(points) == 1 and len(curves) > 1:
                axis.axhline(points[0][1], color=f"C{number}", label=label)
            else:
                marker = "." if len(points) < 12 else None
                axis.plot(
                    *zip(*points, strict=True), marker=marker, label=label, color=f"C{number}"
                )
        if len(curves) > 1:
            axis.legend(fontsize="xx-small", loc="lower right", framealpha=0.5)
        axis.axhline(least, linestyle="--", color="grey", linewidth=0.8)
        axis.set(xlabel="iteration", title=name)
        axis.grid(alpha=0.3)
    figure.savefig(target, dpi=70)
    plt.close(figure)


def cell(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    return text.replace("|", "\\|").replace("<", "&lt;")


def completions(stages: list[list[dict[str, Any]]]) -> str:
    """A table of what five prompts got in the first stage's first iteration and in the last
    stage's last, of held-out prompts where both have such."""
    first, last = stages[0], stages[-1]
    before, after = (
        {(row["split"], row["prompt"]): row for row in reversed(stage) if row["iteration"] == when}
        for stage, when in ((first, first[0]["iteration"]), (last, last[-1]["iteration"]))
    )
    both = sorted((key for key in before if key in after), key=lambda key: key[0] != "eval")
    if not both:
        return "No prompt of the first iteration is one of the last's, so none can be compared."
    lines = ["| prompt | before | score | after | score |", "|---|---|---|---|---|"]
    for key in both[:NUM_PROMPTS]:
        shown = (f"{cell(sampled[key]['completion'])} | {sampled[key]['score']:.2f}"
                 for sampled in (before, after))  # fmt: skip
        lines.append(f"| {cell(key[1])} | {' | '.join(shown)} |")
    return "\n".join(lines)


def section(name: str, file: Path, run: Path) -> str:
    trials = best_trials(run)
    arms = COMPARED.get(name, {})
    shown = [each for each in trials if each[0]["name"] in arms] or trials[-1:]
    plan = shown[0][0]
    curves = {
        arms.get(one["name"], ""): [flatten(row) for row in rows(trial / "result.json")]
        for one, trial in shown
    }
    watched, sizes = RECIPES.get(name, ((plan["metric"],), ""))
    marks = plan.get("pass_criteria") or dict.fromkeys(watched, float("nan"))
    draw(curves, marks, PICTURES / f"{name}.png")
    at_ends = [
        {mark: next(r[mark] for r in reversed(results) if mark in r) for mark in marks}
        for results in curves.values()
    ]
    at_end = at_ends[0]
    wanted = {
        mark: "" if math.isnan(least) else
        f" (pass mark {least}{', missed' if at_end[mark] < least else ''})"
        for mark, least in marks.items()
    }  # fmt: skip
    reached = ", ".join(f"`{mark}` {at_end[mark]:.2f}{wanted[mark]}" for mark in marks)
    for label, other in [*zip(curves, at_ends, strict=True)][1:]:
        reached += "; " + label + " " + ", ".join(f"{other[mark]:.2f}" for mark in marks)
    parts = [
        f"## {name}",
        description(file),
        *([f"Here, beside other programs, with {sizes}"] if sizes else []),
        f"{wall_seconds(run):.0f} seconds on {machine(run)}. At the end {reached}.",
        f"![{', '.join(marks)} over the iterations](images/gallery/{name}.png)",
    ]
    sampled = shown[:1] if arms else trials
    samples = [file for _, folder in sampled if (file := folder / "samples.jsonl").is_file()]
    parts.append(
        completions([rows(file) for file in samples]) if samples else
        f"{plan['run']} samples nothing while it trains, so there are no completions."
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"


def machine(run: Path) -> str:
    known = json.loads(next(run.glob("*/environment.json")).read_text(encoding="utf-8"))
    return f"{known['processor']}, {known['cores']} cores, no GPU, {known['begun'][:10]}"


def page(folder: Path) -> str:
    sections = _sections_as_they_are()
    for name, file in example_files().items():
        if done := [run for run in folder.glob(f"{name}_20*") if _is_done(run)]:
            sections[name] = section(name, file, max(done))
    left = [
        f"- `{name}`: {NOT_SHOWN.get(name, 'not run for this page')}."
        for name in example_files()
        if name not in sections
    ]
    shown = "\n".join(sections[name] for name in example_files() if name in sections)
    return HEAD + shown + "\n## Not shown\n\n" + "\n".join(left) + "\n"


def _sections_as_they_are() -> dict[str, str]:
    parts = re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: part.rstrip() + "\n"
        for part in parts
        if (name := part.splitlines()[0].removeprefix("## ")) in example_files()
    }


def _is_done(run: Path) -> bool:
    plan = json.loads((run / "run.json").read_text(encoding="utf-8"))["experiments"]
    return (run / plan[-1]["name"] / "stage.json").is_file()


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
