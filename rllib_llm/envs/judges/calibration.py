"""How well a judge agrees with given labels: before it is trusted with a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rllib_llm.envs.judges.rewards import RewardBatch, RewardError, RewardSum
from rllib_llm.shared.errors import require

_RESERVED = ("prompt", "completion")


@dataclass(frozen=True)
class Bin:
    """Rows of neighbouring scores."""

    low: float
    high: float
    num_rows: int
    mean_score: float
    mean_label: float


@dataclass(frozen=True)
class Calibration:
    """Scores of a judge against labels.

    num_invalid: rows that it did not judge, which count nowhere else; `reasons` says why, the
    commonest first. concordance: share of the pairs of rows with different labels that it puts in
    the order of the labels, ties counting half (for two labels the area under the ROC curve; 0.5 is
    chance). rank_correlation: Spearman's, ties sharing their mean rank. threshold, accuracy,
    kappa: of labels 0 and 1 alone, the score from which on "1" is said with the fewest mistakes,
    the share of right ones then, and Cohen's kappa (1960), the share above chance; NaN for other
    labels. Where labels or scores are all alike, what compares them is NaN.
    """

    num_rows: int
    num_invalid: int
    reasons: tuple[tuple[str, int], ...]
    concordance: float
    rank_correlation: float
    threshold: float
    accuracy: float
    kappa: float
    bins: tuple[Bin, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        numbers = [
            ("rows", f"{self.num_rows}"), ("not judged", f"{self.num_invalid}"),
            ("concordance", f"{self.concordance:.3f}"),
            ("rank correlation", f"{self.rank_correlation:.3f}"),
            ("best threshold", f"{self.threshold:.3g}"),
            ("accuracy there", f"{self.accuracy:.3f}"), ("kappa there", f"{self.kappa:.3f}"),
        ]  # fmt: skip
        table = [f"{name:<17} {value:>9}" for name, value in numbers if value != "nan"]
        table += ["", f"{'scores':<21} {'rows':>6} {'score':>8} {'label':>8}"]
        table += [
            f"{f'{b.low:.3g} to {b.high:.3g}':<21} {b.num_rows:>6} {b.mean_score:>8.3f} "
            f"{b.mean_label:>8.3f}"
            for b in self.bins
        ]
        table += [f"not judged, {count} times: {reason}" for reason, count in self.reasons]
        return table


def calibrate(
    judge: Any, rows: Sequence[Mapping[str, Any]], *, label_column: str = "label", num_bins: int = 5
) -> Calibration:
    """Compares a judge's scores with labels, on rows with "prompt", "completion" and a label.

    Args:
        judge: a reward function as `RewardSum` takes it; it must read texts.
        rows: their other columns go to the judge.
        label_column: numbers, the higher the better.
        num_bins: of the table, each with as many rows.

    Raises:
        Problems: no rows, rows without the columns, or a label that is no finite number.
        RewardError: the judge failed on all rows.
    """
    needed = {label_column, *_RESERVED}
    missing = sorted(needed - {*(rows[0] if rows else ())})
    require(not missing, "rows", ..., f"have the columns {sorted(needed)}",
            f"there is no {missing}",
            "Rename the columns, or name that of the labels: label_column, --label")  # fmt: skip
    for number, row in enumerate(rows):
        label = row.get(label_column)
        require(isinstance(label, (int, float)) and math.isfinite(label),
                f"{label_column} in row {number}", label, "be a finite number")  # fmt: skip
    sums = RewardSum(judge)
    require(
        sums.wants_texts, "judge", ..., "read texts", "rows of a file have no token ids",
        kind=RewardError,
    )  # fmt: skip
    names = [name for name in rows[0] if name not in (label_column, *_RESERVED)]
    prompts, completions = ([str(row[name]) for row in rows] for name in _RESERVED)
    columns = {name: [row.get(name) for row in rows] for name in names}
    judged = sums(RewardBatch.of_texts(prompts, completions, columns))
    labels = torch.tensor([float(row[label_column]) for row in rows])
    return compare(judged.scores, labels, judged.valid, judged.reasons, num_bins=num_bins)


def compare(
    scores: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, reasons: Sequence[str] = (),
    *, num_bins: int = 5,
) -> Calibration:  # fmt: skip
    """The comparison of scores and labels, float [rows]; valid bool [rows]."""
    kept, said = labels[valid].double(), scores[valid].double()
    concordance, rank_correlation = _agreement(said, kept)
    threshold, accuracy, kappa = _best_threshold(said, kept)
    parts = [part for part in said.argsort(stable=True).tensor_split(num_bins) if len(part)]
    held = [(said[part], kept[part]) for part in parts]
    return Calibration(
        num_rows=len(labels),
        num_invalid=int((~valid).sum()),
        reasons=tuple(Counter(filter(None, reasons)).most_common(3)),
        concordance=concordance, rank_correlation=rank_correlation,
        threshold=threshold, accuracy=accuracy, kappa=kappa,
        bins=tuple(
            Bin(float(s.min()), float(s.max()), len(s), float(s.mean()), float(label.mean()))
            for s, label in held
        ),
    )  # fmt: skip


def _agreement(scores: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """(concordance, Spearman's rank correlation); NaN where labels or scores are all alike."""
    from scipy import stats  # takes a second to import

    if len(labels.unique()) < 2:
        return math.nan, math.nan
    # Somers' D of scores given labels: (pairs in order - pairs out of it) / pairs of unlike labels.
    concordance = (1.0 + float(stats.somersd(labels, scores).statistic)) / 2
    if len(scores.unique()) < 2:
        return concordance, math.nan
    return concordance, float(stats.spearmanr(scores, labels).statistic)


def _best_threshold(scores: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """(threshold, accuracy, kappa) of "1 from the threshold on"; NaN where labels are not 0, 1."""
    if set(labels.tolist()) != {0.0, 1.0}:
        return math.nan, math.nan, math.nan
    right = labels.bool()
    tried = torch.cat([scores.unique(), torch.tensor([math.inf], dtype=scores.dtype)])
    found = [(float(((scores >= t) == right).double().mean()), -float(t)) for t in tried]
    accuracy, threshold = max(found)
    says, is_right = float((scores >= -threshold).double().mean()), float(right.double().mean())
    chance = says * is_right + (1 - says) * (1 - is_right)
    return -threshold, accuracy, (accuracy - chance) / (1 - chance)
