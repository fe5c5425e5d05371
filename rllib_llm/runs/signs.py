"""Signs in a trial's results that something is wrong, each as one sentence with what to look at.

Pure functions of flat results, one per iteration, so that progress and report say the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.runs.metrics import reward_parts
from rllib_llm.runs.results import number

Rows = Sequence[Mapping[str, Any]]

IN_A_ROW = 3  # results that must agree: one alone is chance
FALLEN = 0.9  # of the first training loss: it has learnt something
COLLAPSED = 0.1  # of the first entropy
LITTLE_ENTROPY = 0.1  # nats per token; text has 1 to 3
MUCH_STARVED = 0.3  # of the time without a core, though ready to compute
LONG_S = 30.0  # of such iterations together: less is soon over
SLOW = 3.0  # times the median of the iterations before
NUM_BEFORE = 20  # iterations that a slow one is compared with
MUCH_KL = 2.0  # nats per token: each sampled token e^2 times likelier than under the reference
FELL = 4.0  # times the usual spread of a batch's reward, and its standard error
FEWER_ENDED = 0.1  # of the completions
OTHER_LENGTH = 1.3  # times shorter or longer
OF_THE_CONFIG = ("config/num_env_runners", "config/num_learners")  # what the rules read of it
NO_CORE = "{:.0%} of the time it was ready and had no core: look at what else runs on the machine"
KEYS_FROM_THE_START = ("loss/reward_model", "policy/entropy_avg")  # compared with the first rows


@dataclass(frozen=True)
class Sign:
    """A warning sign: the rule's name, the first iteration at which it applied, and its meaning."""

    name: str
    iteration: int
    text: str


def kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """A flat result without the config, of which the rules need little."""
    return {k: v for k, v in result.items() if k in OF_THE_CONFIG or not k.startswith("config/")}


class Watch:
    """Signs of one trial as its results come; the work for a result does not grow with their
    number, because the rules get only the rows that they read: the first ones, those of the last
    evaluations, and the last ones."""

    def __init__(self) -> None:
        self._first: list[tuple[int, dict[str, Any]]] = []
        self._evaluations: deque[tuple[int, dict[str, Any]]] = deque(maxlen=2)
        self._last: deque[tuple[int, dict[str, Any]]] = deque(maxlen=NUM_BEFORE + 1)
        self._num = 0
        self._found: set[str] = set()

    def remember(self, earlier: Rows) -> None:
        """Takes from the results before a resume those that later ones are compared with."""
        for result in earlier:
            self._take(result)

    def new_signs(self, result: Mapping[str, Any]) -> list[Sign]:
        """Return the signs that a flat result shows and none before it did."""
        row = self._take(result)
        made = _made(row[1])
        if not self._evaluations or made != _made(self._evaluations[-1][1]):
            self._evaluations.append(row)
        self._last.append(row)
        known = {**dict(self._first), **dict(self._evaluations), **dict(self._last)}
        rows = [known[place] for place in sorted(known)]
        new = [sign for sign in latest_signs(rows) if sign.name not in self._found]
        self._found.update(sign.name for sign in new if sign.name not in OF_ONE_BATCH)
        return new

    def _take(self, result: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Number a result, keep it where it is one of the first, and return it as the rules read
        it."""
        row = (self._num, kept(result))
        self._num += 1
        if len(self._first) <= IN_A_ROW and any(key in row[1] for key in KEYS_FROM_THE_START):
            self._first.append(row)
        return row


def signs(rows: Rows) -> list[Sign]:
    """The signs in a trial's results so far, each at the first iteration that shows it."""
    watch = Watch()
    return [sign for row in rows for sign in watch.new_signs(row)]


def _made(row: Mapping[str, Any]) -> Any:
    """When a row's held-out loss was measured."""
    return row.get("eval/iteration", row.get("training_iteration"))


def latest_signs(rows: Rows) -> list[Sign]:
    """The signs that the last of the results shows."""
    iteration = int(number(rows[-1].get("training_iteration")) or len(rows)) if rows else 0
    texts = {name: rule(rows) for name, rule in RULES.items()}
    return [Sign(name, iteration, text) for name, text in texts.items() if text]


def constant_rewards(rows: Rows) -> str:
    """Every completion of the last results has the same score."""
    spread = _last(rows, "objective/scores_std")
    score = _last(rows, "objective/scores")
    if not spread or not score or max(spread) > 1e-6 * max(1.0, *map(abs, score)):
        return ""
    why = f"every completion gets the same reward, {score[-1]:.4g}, which teaches nothing"
    return f"{why}. Look at the reward functions, and at samples.jsonl."


def flat_groups(rows: Rows) -> str:
    """The completions of each prompt have equal scores, though prompts differ."""
    flat = _last(rows, "train/zero_variance_groups")
    if not flat or min(flat) < 1.0 or constant_rewards(rows):
        return ""
    look = "Look at num_completions, temperature, and whether all prompts are too easy or too hard."
    return f"all completions of a prompt get the same reward, which teaches nothing. {look}"


def no_tool_calls(rows: Rows) -> str:
    """Conversations with tools in which none is called."""
    calls = _last(rows, "env/num_tool_calls")
    if not calls or any(calls):
        return ""
    look = "Look at samples.jsonl and tool_syntax; train it with SFT on calls of these tools first."
    return f"no conversation calls a tool, so the policy cannot learn how. {look}"


def overfitted_judge(rows: Rows) -> str:
    """A reward model that orders held-out pairs worse than chance, and no better than before, while
    it fits its own."""
    losses = [value for row in rows if (value := number(row.get("loss/reward_model"))) is not None]
    measured = ((_made(row), number(row.get("eval/loss"))) for row in rows)
    made = {when: value for when, value in measured if value is not None}
    held_out = list(made.values())[-2:]
    learns = len(losses) >= IN_A_ROW and losses[-1] < FALLEN * losses[0]
    rises = len(held_out) == 2 and held_out[1] >= held_out[0] > math.log(2)
    if not (learns and rises):
        return ""
    found = f"held-out loss {held_out[-1]:.3f}, above ln 2 = {math.log(2):.3f} of a coin, training "
    found += f"loss {losses[0]:.3f} to {losses[-1]:.3f}: it overfits"
    return f"{found}. Look at the pairs (number, labels), num_epochs and lr."


def entropy_collapse(rows: Rows) -> str:
    """The policy samples nearly the same tokens, unlike at first."""
    entropy = [v for row in rows if (v := number(row.get("policy/entropy_avg"))) is not None]
    if len(entropy) <= IN_A_ROW or entropy[0] <= LITTLE_ENTROPY:
        return ""
    if max(entropy[-IN_A_ROW:]) >= min(LITTLE_ENTROPY, COLLAPSED * entropy[0]):
        return ""
    found = f"the entropy fell from {entropy[0]:.3g} to {entropy[-1]:.2g} nats per token"
    look = "Look at env/distinct, samples.jsonl; lower lr, raise ref_kl_coeff, or set entropy_coeff"
    return f"{found}: the policy samples the same text again and again. {look}."


def kl_explosion(rows: Rows) -> str:
    """The policy has left the reference."""
    kl, length = _last(rows, "objective/kl"), _last(rows, "train/output_length")
    if not kl or not length:
        return ""
    per_token = [value / max(1.0, n) for value, n in zip(kl, length, strict=True)]
    if min(per_token) < MUCH_KL:
        return ""
    found = f"the KL to the reference is {kl[-1]:.4g} nats, {per_token[-1]:.2g} per token"
    look = "Look at samples.jsonl; raise ref_kl_coeff or set ref_kl_target, and lower lr."
    return f"{found}: the policy writes what the reference never would. {look}"


def starved(rows: Rows) -> str:
    """The trial's thread was ready to compute and had no core."""
    shares = _last(rows, "time_share/starved")
    seconds = _last(rows, "time_this_iter_s")
    is_short = bool(seconds) and sum(seconds) < LONG_S
    if not shares or min(shares) < MUCH_STARVED or is_short:
        return ""
    lower = [
        key.rpartition("/")[2] for key in OF_THE_CONFIG if (number(rows[-1].get(key)) or 0) > 1
    ]
    remedies = [*(f"lower {name}" for name in lower), "give each process fewer threads"]
    own = f"if it is this run's own, {' or '.join(remedies)} (OMP_NUM_THREADS)"
    return f"{NO_CORE.format(shares[-1])}; {own}."


def slow_iteration(rows: Rows) -> str:
    """The last iteration took much longer than those before, for want of cores."""
    seconds = [number(row.get("time_this_iter_s")) for row in rows[-NUM_BEFORE - 1 :]]
    known = [value for value in seconds if value is not None]
    starved_share = number(rows[-1].get("time_share/starved")) if rows else None
    if len(known) <= IN_A_ROW or seconds[-1] is None or (starved_share or 0.0) < MUCH_STARVED:
        return ""
    last, usual = known[-1], statistics.median(known[:-1])
    if last < SLOW * usual or last < LONG_S:
        return ""
    why = NO_CORE.format(starved_share)
    return f"it took {last:.3g} s, the median of those before is {usual:.3g} s: {why}."


def reward_drop(rows: Rows) -> str:
    """The last batch's reward is far below that of the batches before."""
    before, last = rows[-NUM_BEFORE - 1 : -1], rows[-1] if rows else {}
    usual, score = _usual(before, "objective/scores"), number(last.get("objective/scores"))
    if len(before) < 2 * IN_A_ROW or usual is None or score is None:
        return ""
    known = [number(row.get("objective/scores")) for row in before]
    spread = 1.5 * statistics.median(abs(value - usual) for value in known if value is not None)
    counts = [number(row.get("episode")) or 0.0 for row in (before[-1], last)]
    # Of a rare reward a batch may have none, and then no deviation either.
    deviations = number(last.get("objective/scores_std")), _usual(before, "objective/scores_std")
    deviation = max(each or 0.0 for each in deviations)
    standard_error = deviation / math.sqrt(max(1.0, counts[1] - counts[0]))
    least = max(FELL * spread, FELL * standard_error, 1e-6 * max(1.0, abs(usual)))
    if usual - score <= least:
        return ""
    causes = []
    falls = [  # of each reward function
        (usual_one - now, name, usual_one, now)
        for key, name in reward_parts([last]).items()
        if (now := number(last[key])) is not None
        and (usual_one := _usual(before, key)) is not None
    ]
    if len(falls) > 1:
        _, name, usual_one, now = max(falls)
        causes.append(f"mostly {name}, {usual_one:.3g} to {now:.3g}")
    ended = number(last.get("val/finished"))
    ended_before = _usual(before, "val/finished")
    if ended is not None and ended_before is not None and ended_before - ended >= FEWER_ENDED:
        causes.append(f"{1 - ended:.0%} of the completions were cut off ({1 - ended_before:.0%})")
    length = number(last.get("train/output_length")) or 0.0
    length_before = _usual(before, "train/output_length") or 0.0
    if not 1 / OTHER_LENGTH <= length / max(1.0, length_before) <= OTHER_LENGTH:
        causes.append(f"completions have {length:.3g} tokens ({length_before:.3g})")
    why = "; ".join(causes) or "as many end, and they are as long as before, so look at the prompts"
    return f"this batch's reward fell from {usual:.3g}, the median before, to {score:.3g}: {why}."


RULES: Mapping[str, Callable[[Rows], str]] = {
    "constant rewards": constant_rewards, "flat groups": flat_groups,
    "no tool calls": no_tool_calls, "overfitted judge": overfitted_judge,
    "entropy collapse": entropy_collapse, "KL explosion": kl_explosion, "starved": starved,
    "slow iteration": slow_iteration, "reward drop": reward_drop,
}  # fmt: skip
OF_ONE_BATCH = ("reward drop",)  # told each time


def _usual(rows: Rows, key: str) -> float | None:
    """The median of a result, None where no row has it."""
    known = [value for row in rows if (value := number(row.get(key))) is not None]
    return statistics.median(known) if known else None


def _last(rows: Rows, key: str) -> list[float]:
    """A result of the last iterations, [] where it is not in each of them."""
    values = [number(row.get(key)) for row in rows[-IN_A_ROW:]]
    known = [value for value in values if value is not None]
    return known if len(known) == IN_A_ROW else []
