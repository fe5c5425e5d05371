"""Draws the README's picture from the folder of a run of `make demo`.

    python scripts/demo_picture.py results/reviews_ppo_ptx_...

Reward of the reward model, and KL to the model that PPO-ptx began with, over its iterations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "demo.png"


def last_stage(run: Path) -> list[dict[str, float]]:
    """Results of the run's PPO-ptx stage, flat, one for each iteration."""
    (file,) = run.glob("ppo*/*/result.json")
    return [_flat(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _flat(nested: dict, before: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in nested.items():
        flat.update(_flat(value, f"{before}{name}/") if isinstance(value, dict) else
                    {before + name: value})  # fmt: skip
    return flat


def draw(rows: list[dict[str, float]], target: Path) -> None:
    panels = {
        "objective/scores": "reward of the reward model",
        "objective/kl": "KL to the starting model, nats per completion",
        "train/completion_length": "completion length, tokens",
    }
    shown = {name: title for name, title in panels.items() if name in rows[-1]}
    size = (4.2 * len(shown), 2.8)
    figure, axes = plt.subplots(1, len(shown), figsize=size, layout="constrained", squeeze=False)
    for axis, (name, title) in zip(axes[0], shown.items(), strict=True):
        axis.plot([row["training_iteration"] for row in rows], [row[name] for row in rows])
        axis.set(xlabel="iteration of PPO-ptx", title=title)
        axis.grid(alpha=0.3)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(last_stage(Path(sys.argv[1])), TARGET)
