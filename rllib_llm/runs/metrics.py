"""Every result by name, with unit and meaning, and which of them a person wants to see.

The reference page and its test read `GROUPS`. A part of a name in angle brackets stands for a name
of the user's: a reward, a component, a kind of failure. `describes` says whether a name is known.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.runs.results import fresh_series, number
from rllib_llm.shared.errors import suggestion


@dataclass(frozen=True)
class Row:
    """One result: name as it is joined by `/`, unit, meaning."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """Results that belong together."""

    title: str
    rows: tuple[Row, ...]


def _group(title: str, *rows: tuple[str, str, str]) -> Group:
    return Group(title, tuple(Row(*row) for row in rows))


GROUPS = (
    _group(
        "What Tune's own table shows",
        ("reward", "score", "`objective/scores`"),
        ("held_out_reward", "score", "`eval/scores`"),
        ("kl", "nats per completion", "`objective/kl`"),
        ("length", "tokens", "`train/output_length`"),
        ("sft_loss", "nats per token", "`loss/sft`"),
        ("rm_loss", "nats per pair", "`loss/reward_model`"),
        ("dpo_loss", "nats per pair", "`loss/dpo`"),
        ("held_out_loss", "nats", "`eval/loss`"),
        ("accuracy", "share", "`train/accuracy`"),
        ("held_out_accuracy", "share", "`eval/accuracy`"),
        ("entropy", "nats per token", "`policy/entropy_avg`"),
        ("tokens_per_s", "tokens/s", "`throughput/tokens_per_s`"),
    ),
    _group(
        "What is learnt towards",
        ("objective/scores", "score", "what the judges say, before any KL share"),
        ("objective/scores_std", "score", "standard deviation of the batch's scores"),
        ("objective/kl", "nats per completion", "KL from the reference, where there is one"),
        ("objective/entropy", "nats per completion", "−log-prob of the sampled completion"),
        ("objective/non_score_reward", "score", "−β times the KL, if it is in the reward"),
        ("objective/rlhf_reward", "score", "processed score plus `non_score_reward`"),
        ("objective/ref_kl_coeff", "1", "current β"),
    ),
    _group(
        "The update",
        ("policy/approxkl_avg", "nats²", "½ · mean (log-prob − old log-prob)² per token"),
        ("policy/clipfrac_avg", "share", "tokens whose ratio was clipped"),
        ("policy/entropy_avg", "nats per token", "entropy of the next-token distribution"),
        ("loss/policy_avg", "1", "policy loss"),
        ("loss/value_avg", "1", "critic loss"),
        ("loss/ref_kl_avg", "nats per token", "KL to the reference, if it is in the loss"),
        ("loss/ptx_avg", "nats per token", "cross-entropy of pretraining text"),
        ("val/ratio", "1", "mean ratio of new to old probability per token"),
        ("val/ratio_var", "1", "variance of that ratio"),
        ("val/clipfrac_avg", "share", "tokens whose value was clipped"),
        ("val/num_eos_tokens", "share", "completions that ended with a stop token"),
        ("sampler/logprob_gap", "nats per token", "mean absolute gap of their log-probs"),
        ("grad_norm", "1", "global gradient norm before clipping"),
        ("lr", "1", "learning rate of the last optimiser step"),
        ("effective/<setting>", "as the setting", "values that optimiser and loss used"),
    ),
    _group(
        "Training data",
        ("train/rewards", "reward", "mean reward of the rows that were judged"),
        ("train/<name>_rewards", "reward", "mean of one reward function, before its weight"),
        ("train/output_length", "tokens", "mean completion length, stop token included"),
        ("train/num_invalid", "completions", "rows without a score, which are not trained on"),
        (
            "train/truncated_share",
            "share",
            "prompts (of SFT: texts) cut to the maximum length; of completions: `env/truncated`",
        ),
        ("train/zero_variance_groups", "share", "groups with equal scores"),
        ("train/padding_share", "share", "padding among the tokens computed"),
        ("train/staleness", "updates", "age of the weights that sampled the batch"),
        ("env/distinct", "share", "distinct completions in the batch"),
        ("env/sampled_share", "share", "completion tokens that the policy sampled"),
        ("env/<function>_failed", "share", "rows on which a reward function failed"),
        (
            "env/truncated",
            "share",
            "conversations that `max_turns`, `max_tokens` or `max_new_tokens` ended; of prompts: "
            "`train/truncated_share`",
        ),
        ("env/<name>", "its own", "metrics of the environment and its judges"),
        ("env/gold_score", "-3 to 3", "of Reviews-v0: how positive a review is, by its grammar"),
        ("episode", "completions", "completions trained on so far"),
        ("epoch", "passes", "passes over the data of a supervised stage"),
        ("eps", "completions per second", "over the whole iteration"),
    ),
    _group(
        "Older data, where `off_policy` is set",
        ("off_policy/age_mean", "updates", "age of the weights that sampled a token"),
        ("off_policy/age_max", "updates", "age of the oldest token"),
        ("off_policy/age_<updates>", "share", "tokens of that age; the last bin: or older"),
        ("off_policy/versions", "versions", "mean number of weight versions in a completion"),
        ("off_policy/k1", "nats per token", "mean −log(π/π_sampler) before the update"),
        ("off_policy/k3", "nats per token", "mean r − 1 − log r, r = π/π_sampler"),
        ("off_policy/k1_lag_<updates>", "nats per token", "k1 of the tokens of that age"),
        ("off_policy/k3_lag_<updates>", "nats per token", "k3 of the tokens of that age"),
        ("off_policy/weight", "1", "mean importance weight after the bounds"),
        ("off_policy/bounded_share", "share", "tokens whose weight was changed by the bounds"),
        ("off_policy/ess_share", "share", "effective sample size, (Σw)²/Σw², over tokens"),
        ("off_policy/rejected_share", "share", "tokens left out of the loss by `rejection`"),
    ),
    _group(
        "Supervised stages",
        ("loss/sft", "nats per token", "cross-entropy of the target tokens"),
        ("loss/reward_model", "nats per pair", "−log σ(chosen − rejected)"),
        ("loss/dpo", "nats per pair", "loss of the preference objective"),
        ("train/accuracy", "share", "pairs in the right order"),
        ("train/kto_kl", "nats per completion", "reference point of the `kto` loss"),
        ("rewards/<name>", "nats", "implicit rewards: chosen, rejected, margins"),
        ("logps/<name>", "nats per completion", "log-probs of chosen and rejected answers"),
    ),
    _group(
        "Held out",
        ("eval/scores", "score", "mean over held-out prompts"),
        ("eval/scores_std", "score", "its standard deviation"),
        ("eval/output_length", "tokens", "mean length of a completion"),
        ("eval/finished", "share", "completions that ended with a stop token"),
        ("eval/loss", "nats", "held-out loss of a supervised stage"),
        ("eval/accuracy", "share", "held-out pairs in the right order"),
        ("eval/ptx_loss", "nats per token", "cross-entropy of held-out pretraining text"),
        (
            "eval/distinct",
            "share",
            "distinct completions; of greedy ones, which are all alike for a prompt, one of each "
            "prompt counts",
        ),
        ("eval/iteration", "iterations", "iteration of the evaluation"),
        ("eval/pass@<k>", "share", "prompts with at least one of k completions right; _low, _high"),
        ("eval/pass^<k>", "share", "prompts with all of k completions right; _low, _high"),
        ("eval/<name>", "its own", "components and diagnostics"),
        ("eval/<environment>/<name>", "as above", "the same for one of `eval_envs`"),
    ),
    _group(
        "Weights on their way",
        ("weights/version", "updates", "newest published version"),
        ("weights/oldest_version", "updates", "oldest version that sampled a row of the batch"),
        ("weights/versions_behind", "updates", "lag of the batch behind the newest version"),
        ("weights/bytes", "bytes", "size of one version"),
        ("weights/publish_seconds", "s", "time of publishing on the learner's side"),
        ("weights/push_seconds", "s", "time of pushing weights to servers"),
        ("weights/transfer_seconds", "s", "time until the slowest sampler had them"),
        ("weights/load_seconds", "s", "time of loading them"),
        ("weights/gb_per_s", "GB/s", "rate of transfer and load"),
        ("weights/age_seconds", "s", "age of the weights in use"),
        ("weights/skips", "versions", "versions that a sampler skipped"),
        ("weights/republished", "times", "lost weights published again"),
        ("weights/failures/<kind>", "times", "failed transfers"),
        ("weights/<name>", "its own", "background publisher: snapshots, announcements"),
    ),
    _group(
        "Groups on their way, and what became of them",
        ("rollouts/tokens_generated", "tokens", "tokens sampled so far"),
        ("rollouts/tokens_trained", "tokens", "of these, trained on"),
        ("rollouts/tokens_rejected", "tokens", "of these, rejected"),
        ("rollouts/tokens_carried", "tokens", "of these, waiting"),
        ("rollouts/groups_trained", "groups", "groups trained on so far"),
        ("rollouts/groups_rejected", "groups", "groups rejected so far"),
        ("rollouts/groups_failed", "groups", "groups that no sampler could complete, so far"),
        ("rollouts/rejected/<reason>", "groups", "rejected so far, by reason: a filter's, "
         "`too_few`, `stale` or `late`"),
        ("rollouts/groups_<state>", "groups", "waiting, leased, partial, judged or ready now"),
        ("rollouts/leases_expired", "leases", "leases not answered in time"),
        ("rollouts/age_mean", "updates", "mean age of the batch's groups, by their oldest token"),
        ("rollouts/age_max", "updates", "age of the oldest group"),
        ("rollouts/wait_seconds", "s", "time that the learner waited for the batch"),
    ),
    _group(
        "Replayed groups, where `replay_groups` is set",
        ("replay/groups", "groups", "size of the buffer"),
        ("replay/occupancy", "share", "share of the capacity in use"),
        ("replay/mean_uses", "updates", "mean number of updates that used a buffered group"),
        ("replay/mean_age", "iterations", "mean age of buffered groups"),
        ("replay/added", "groups", "groups added so far"),
        ("replay/drawn", "groups", "groups drawn so far"),
        ("replay/reuse", "1", "groups drawn per group added"),
        ("replay/evicted", "groups", "groups evicted from a full buffer"),
        ("replay/used_up", "groups", "groups removed after `replay_max_uses`"),
    ),
    _group(
        "Rollouts kept, since the process began",
        ("rollout_store/rows", "completions", "rows written"),
        ("rollout_store/files", "files", "files written"),
        ("rollout_store/bytes", "bytes", "bytes written"),
        ("rollout_store/lost", "completions", "completions not stored after a write error"),
        ("rollout_store/wait_seconds", "s", "time that the run waited for the writer"),
        ("rollout_store/write_seconds", "s", "time of writing in the background"),
    ),
    _group(
        "Speed and faults",
        ("throughput/tokens_per_s", "tokens/s", "sampled tokens over the whole iteration"),
        ("throughput/samples_per_s", "completions/s", "completions over the whole iteration"),
        ("throughput/<name>_seconds", "s", "time of the parts of an iteration"),
        ("time_share/starved", "share", "time in which trial or sampler was ready but had no core"),
        ("time_share/<phase>", "share", "time since the last result, by activity"),
        ("faults/<name>", "times, s", "faults of samplers that were recovered from"),
    ),
    _group(
        "RLlib's and Tune's own",
        ("training_iteration", "iterations", "iterations so far; usually used in `stop:`"),
        ("num_env_steps_sampled_lifetime", "completions", "an episode is one step long"),
        ("time_total_s", "s", "time of all iterations so far"),
        ("iterations_since_restore", "iterations", "iterations since the trial was resumed"),
        ("time_since_restore", "s", "time of the iterations since the trial was resumed"),
        ("env_runners/<name>", "RLlib's", "`episode_return_mean` and the like"),
        ("evaluation/<name>", "RLlib's", "the held-out results under RLlib's name"),
        ("learners/<name>", "RLlib's", "metrics of each module"),
        ("<name>_this_iter", "RLlib's", "counts of this iteration"),
        ("should_checkpoint", "true", "a checkpoint was requested by a command"),
        ("stop_run", "true", "last result of a run ended by `rllib stop`"),
    ),
)  # fmt: skip


# Results that count how far a trial is: what `stop:` usually names, and progress is told by.
USUAL_COUNTERS = ("training_iteration", "episode", "time_total_s")  # what trials stop by
COUNTERS = (*USUAL_COUNTERS, "epoch", "num_env_steps_sampled_lifetime")


def is_counter(name: str) -> bool:
    """Whether a result of this name counts how far a trial is, of RLlib's own algorithms too."""
    last = name.rpartition("/")[2]
    ends = r"\w+(_since_restore|_lifetime|_total)|num_\w*steps_(sampled|trained)"
    return last in COUNTERS or re.fullmatch(ends, last) is not None


def describes(name: str) -> bool:
    """Whether a result of this name is in the registry."""
    return _pattern().fullmatch(name) is not None


# What Tune and RLlib add to every result, and the registry leaves to them.
TUNES_OWN = (
    "time_this_iter_s", "time_since_restore", "iterations_since_restore", "timestamp",
    "num_training_step_calls_per_iteration",
)  # fmt: skip
# Groups that RLlib and Tune fill, or to which engines and transports of ours add names.
OPEN_GROUPS = (
    "perf", "config", "timers", "env_runner_group", "fault_tolerance", "throughput", "faults",
    "env_runners", "evaluation", "learners",
)  # fmt: skip


def is_reported(name: str) -> bool:
    """Whether trials report a result of this name: those of the registry, Tune's and RLlib's."""
    return describes(name) or name in TUNES_OWN or name.partition("/")[0] in OPEN_GROUPS


SAMPLING = frozenset({"GRPO", "RLOO", "ReinforcePP", "PPOPtx"})
SUPERVISED = frozenset({"SFT", "RewardModel", "DPO"})
# Patterns of results that only some of our algorithms report. The first match counts.
REPORTED_BY: tuple[tuple[str, frozenset[str]], ...] = (
    ("loss/ptx_avg", frozenset({"PPOPtx"})),
    (r"loss/(policy|value|ref_kl)_avg", SAMPLING),
    (r"reward|kl|length|entropy|(objective|policy|val|sampler|env)/.+", SAMPLING),
    (r"(weights|rollouts|replay|rollout_store|off_policy)/.+", SAMPLING),
    (r"train/(.+_)?rewards|train/(num_invalid|zero_variance_groups|staleness)", SAMPLING),
    ("train/output_length", SAMPLING | {"Generate"}),
    ("epoch", SUPERVISED),
    ("sft_loss|loss/sft", frozenset({"SFT"})),
    ("rm_loss|loss/reward_model", frozenset({"RewardModel"})),
    ("dpo_loss|loss/dpo|(rewards|logps)/.+|train/kto_kl", frozenset({"DPO"})),
    ("(held_out_)?accuracy|(train|eval)/accuracy", frozenset({"RewardModel", "DPO"})),
    (r"held_out_reward|eval/scores(_std)?", SAMPLING),
    ("held_out_loss|eval/loss", SUPERVISED),
    (r"(eval|evaluation)/.+", SAMPLING | SUPERVISED),
)
# A result by which trials of an algorithm may be compared.
TYPICAL = {
    **dict.fromkeys(SAMPLING, "objective/scores"),
    "SFT": "loss/sft",
    "RewardModel": "train/accuracy",
    "DPO": "train/accuracy",
    "Generate": "episode",
}


def reporters(name: str) -> frozenset[str] | None:
    """Those of our algorithms that report a result of this name; None where any may."""
    return next((algos for form, algos in REPORTED_BY if re.fullmatch(form, name)), None)


def is_held_out(name: str) -> bool:
    """Whether a result of this name comes from evaluations."""
    return name.startswith(("eval/", "evaluation/", "held_out_"))


def may_report(run: str, name: str) -> bool:
    """Whether trials of our algorithm `run` may report a result of the registry.

    An environment may have a held-out metric of any name, such as `eval/accuracy`.
    """
    algos = reporters(name)
    return algos is None or run in algos or (run in SAMPLING and is_held_out(name))


def result_like(name: str, run: str = "") -> str:
    """A sentence with the results whose names are nearest to `name`; with `run`, those of one of
    our algorithms."""
    rows = (row.name for group in GROUPS for row in group.rows)
    known = [row for row in rows if "<" not in row and (not run or may_report(run, row))]
    return suggestion(name, known)


@functools.cache
def _pattern() -> re.Pattern[str]:
    alternatives = []
    for group in GROUPS:
        for row in group.rows:
            parts = re.split(r"<\w+>", row.name)
            alternatives.append(".+".join(re.escape(part) for part in parts))
    return re.compile("|".join(alternatives))


@dataclass(frozen=True)
class Metric:
    """One result as it is shown: `key` in the flat result, column title, number format."""

    key: str
    title: str
    form: str = ".3f"

    def text(self, value: float) -> str:
        """Return `value` as it is shown; what rounds to zero has no sign."""
        text = format(value, self.form)
        return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


NONE = "–"  # where nothing was measured
EPISODES = Metric("episode", "episodes", ",.0f")
INVALID = Metric("train/num_invalid", "completions without a score", ",.0f")
STALENESS = Metric("train/staleness", "staleness, updates", ".2f")
TOKENS_PER_S = Metric("throughput/tokens_per_s", "tokens/s", ",.0f")
# Columns of the live table, by a result that tells the kind of the stage.
COLUMNS: dict[str, tuple[Metric, ...]] = {
    "loss/sft": (
        EPISODES,
        Metric("loss/sft", "loss"),
        Metric("eval/loss", "held-out loss"),
        TOKENS_PER_S,
    ),
    "loss/reward_model": (
        EPISODES,
        Metric("loss/reward_model", "loss"),
        Metric("train/accuracy", "accuracy"),
        Metric("eval/accuracy", "held-out accuracy"),
        TOKENS_PER_S,
    ),
    "loss/dpo": (
        EPISODES,
        Metric("loss/dpo", "loss"),
        Metric("train/accuracy", "accuracy"),
        Metric("eval/accuracy", "held-out accuracy"),
        Metric("rewards/margins", "margin"),
        TOKENS_PER_S,
    ),
    "objective/scores": (
        EPISODES,
        Metric("objective/scores", "reward"),
        Metric("env/gold_score", "gold score"),
        Metric("objective/kl", "KL"),
        TOKENS_PER_S,
    ),
    "episode": (EPISODES, TOKENS_PER_S),
}
# Of RLlib's own algorithms.
STOCK_METRICS = (
    Metric("num_env_steps_sampled_lifetime", "env steps", ",.0f"),
    Metric("env_runners/episode_return_mean", "return", ".1f"),
)
# What a summary shows, first against last.
SUMMARY_METRICS = (
    EPISODES,
    Metric("loss/sft", "loss, nats per token"),
    Metric("loss/reward_model", "loss, nats per pair"),
    Metric("loss/dpo", "loss, per pair"),
    Metric("eval/loss", "  held out"),
    Metric("train/accuracy", "pairs ordered rightly"),
    Metric("eval/accuracy", "  held out"),
    Metric("rewards/margins", "reward of chosen less rejected"),
    Metric("logps/chosen", "log-prob of the chosen, nats per completion", ".1f"),
    Metric("objective/scores", "reward"),
    Metric("eval/scores", "  held out"),
    Metric("env/gold_score", "gold score, -3 to 3"),
    Metric("eval/gold_score", "  held out"),
    Metric("env/grammatical", "grammatical share"),
    Metric("eval/grammatical", "  held out"),
    Metric("env/distinct", "distinct completions, share"),
    Metric("eval/distinct", "  held out"),
    Metric("env/num_turns", "turns of a conversation", ".2f"),
    Metric("env/num_tool_calls", "  tool calls", ".2f"),
    Metric("env/tool_failures", "  failed tool calls", ".2f"),
    Metric("objective/kl", "estimated KL to the reference, nats per completion"),
    Metric("loss/ptx_avg", "pretraining loss, nats per token"),
    Metric("eval/ptx_loss", "  held out"),
    Metric("policy/entropy_avg", "entropy, nats per token"),
    Metric("train/output_length", "completion length, tokens", ".1f"),
    TOKENS_PER_S,
    STALENESS,
    INVALID,
)


def columns(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the columns of the live table for the flat `results` of a stage's trials."""
    for marker, metrics in COLUMNS.items():
        if any(marker in result for result in results):
            return _held(results, metrics)
    return _held(results, STOCK_METRICS)


def summary_metrics(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the lines of the summary for the flat `results` of a trial."""
    is_ours = any("episode" in result for result in results)
    if not is_ours:
        return _held(results, STOCK_METRICS)
    keys = sorted({key for result in results for key in result})
    metrics = [*SUMMARY_METRICS, *_drifts(keys), *_losses_of_rows(keys)]
    after = next(i for i, metric in enumerate(metrics) if metric.key == "eval/scores") + 1
    metrics[after:after] = [Metric(k, f"  {n}") for k, n in reward_parts(results).items()]
    silent = {INVALID.key, STALENESS.key, *(metric.key for metric in _losses_of_rows(keys))}
    return [
        metric
        for metric in _held(results, metrics)
        # 0 is as it should be.
        if metric.key not in silent or any(number(result.get(metric.key)) for result in results)
    ]


def reward_parts(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The names of a reward's components by their results, if there are several."""
    keys = sorted({key for result in results for key in result})
    parts = [key for key in keys if key.startswith("train/") and key.endswith("_rewards")]
    names = {key: key.removeprefix("train/").removesuffix("_rewards") for key in parts}
    return names if len(names) > 1 else {}


def _drifts(keys: Sequence[str]) -> list[Metric]:
    """How far quantised models are from their unquantised weights."""
    found = (key.removeprefix("env/").partition("/drift/") for key in keys if "/drift/" in key)
    return [Metric(f"env/{a}{b}{c}", f"drift of {a}, {c}") for a, b, c in found]


def _losses_of_rows(keys: Sequence[str]) -> list[Metric]:
    """Shares of rows with a failed reward function, a limit that was reached or a truncated
    prompt."""
    failed = [key for key in keys if key.startswith("env/") and key.endswith("_failed")]
    names = [key.removeprefix("env/").removesuffix("_failed") for key in failed]
    shares = [Metric(k, f"share on which {n} failed") for k, n in zip(failed, names, strict=True)]
    cut = Metric("env/truncated", "share of conversations that a limit ended")
    return [*shares, cut, Metric("train/truncated_share", "share of prompts that were cut")]


def _held(results: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]) -> list[Metric]:
    """Return those `metrics` that are a number in at least one of the `results`."""
    return [m for m in metrics if any(number(r.get(m.key)) is not None for r in results)]


def progress(flat: Mapping[str, Any], stop: Mapping[str, Any]) -> float:
    """Return how far a trial is, 0 to 1, by the criterion of `stop` that is nearest.

    Only counters tell progress: a reward to be reached does not.
    """
    shares = [0.0]
    for key, limit in stop.items():
        value, bound = number(flat.get(key)), number(limit)
        if value is None or not bound or not is_counter(key):
            continue
        shares.append(min(1.0, max(0.0, value / bound)))
    return max(shares)


def first_and_last(rows: list[dict[str, Any]], metric: Metric) -> tuple[str, str]:
    """A metric at both ends of a run; of a single evaluation the end at which it was made."""
    if not metric.key.startswith("eval/"):
        first = number(rows[0].get(metric.key))
        values = [value for row in rows if (value := number(row.get(metric.key))) is not None]
        return NONE if first is None else metric.text(first), metric.text(values[-1])
    made, values = fresh_series(rows, "training_iteration", metric.key)
    if len(values) > 1:
        return metric.text(values[0]), metric.text(values[-1])
    return (metric.text(values[0]), NONE) if made[0] == 0 else (NONE, metric.text(values[0]))
