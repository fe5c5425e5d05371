"""Every result by name, with unit and meaning, and which of them a person wants to see.

The reference page and its test read `GROUPS`. A part of a name in angle brackets stands for a name
of the user's: a reward, a component, a kind of failure. `describes` says whether a name is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.runs.results import fresh_series, number

# By title: names as they are joined by `/`, several of one kind with commas; unit; meaning.
GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "What Tune's own table shows": (
        ("reward, held_out_reward", "score", "`objective/scores`, `eval/scores`"),
        ("kl", "nats per completion", "`objective/kl`"),
        ("length", "tokens", "`train/output_length`"),
        ("sft_loss", "nats per token", "`loss/sft`"),
        ("rm_loss, dpo_loss", "nats per pair", "`loss/reward_model`, `loss/dpo`"),
        ("held_out_loss", "nats", "`eval/loss`"),
        ("accuracy, held_out_accuracy", "share", "`train/accuracy`, `eval/accuracy`"),
        ("entropy", "nats per token", "`policy/entropy_avg`"),
        ("tokens_per_s", "tokens/s", "`throughput/tokens_per_s`"),
    ),
    "What is learnt towards": (
        ("objective/scores, objective/scores_std", "score", "the judges': mean, deviation"),
        ("objective/kl", "nats per completion", "KL from the reference"),
        ("objective/entropy", "nats per completion", "−log-prob of sampled completions"),
        ("objective/non_score_reward", "score", "−β·KL, if in the reward"),
        ("objective/rlhf_reward", "score", "processed score plus `non_score_reward`"),
        ("objective/ref_kl_coeff", "1", "current β"),
    ),
    "The update": (
        ("policy/approxkl_avg", "nats²", "½ · mean (log-prob − old log-prob)² per token"),
        ("policy/clipfrac_avg, val/clipfrac_avg", "share", "clipped ratios; values"),
        ("policy/entropy_avg", "nats per token", "next-token entropy"),
        ("loss/policy_avg, loss/value_avg", "1", "policy loss, critic loss"),
        ("loss/ref_kl_avg", "nats per token", "KL to the reference, if in the loss"),
        ("loss/distill_avg", "nats per token", "divergence from the teacher"),
        ("train/teacher_kl", "nats per token", "KL from the teacher"),
        ("train/teacher_agreement", "share", "tokens that policy and teacher both like best"),
        ("train/router_aux_loss", "1", "routers' auxiliary loss; k if k experts are used alike"),
        ("loss/ptx_avg, eval/ptx_loss", "nats per token", "pretraining text, held-out text"),
        ("val/ratio, val/ratio_var", "1", "new over old token probability: mean, variance"),
        ("val/finished, eval/finished", "share", "completions ended by a stop token"),
        ("val/num_eos_tokens", "completions", "those, of the batch"),
        ("sampler/logprob_gap", "nats per token", "mean absolute gap of their log-probs"),
        ("grad_norm, lr", "1", "before clipping; of the last step"),
        ("effective/<setting>", "as the setting", "what optimiser and loss used"),
    ),
    "Training data": (
        ("train/rewards", "reward", "mean of judged rows"),
        ("train/<name>_rewards", "reward", "one reward function, before its weight"),
        ("train/output_length, eval/output_length", "tokens", "mean length, stop token included"),
        ("train/num_invalid", "completions", "without a score, not trained on"),
        ("train/truncated_share, env/truncated", "share", "cut prompts; cut conversations"),
        ("train/zero_variance_groups", "share", "groups with equal scores"),
        ("train/masked_truncated", "share", "rows cut off, out of the loss"),
        ("train/padding_share", "share", "padding among computed tokens"),
        ("train/staleness", "updates", "age of the sampling weights"),
        ("env/distinct, eval/distinct", "share", "completions; if greedy, one of each prompt"),
        ("env/sampled_share", "share", "completion tokens that the policy sampled"),
        ("env/<function>_failed", "share", "rows on which a reward function failed"),
        ("env/<name>", "its own", "metrics of environment and judges"),
        ("env/gold_score", "-3 to 3", "Reviews-v0: positivity by its grammar"),
        ("episode", "completions", "trained on so far"),
        ("epoch", "passes", "over a supervised stage's data"),
        ("eps", "completions per second", "over the iteration"),
    ),
    "Older data, where `off_policy` is set": (
        ("off_policy/age_mean, off_policy/age_max", "updates", "age of a token's weights"),
        ("off_policy/age_<updates>", "share", "tokens of that age; last bin: or older"),
        ("off_policy/versions", "versions", "mean number in a completion"),
        ("off_policy/k1, off_policy/k1_lag_<updates>", "nats per token",
         "mean −log r, r = π/π_sampler, before the update; by age"),
        ("off_policy/k3, off_policy/k3_lag_<updates>", "nats per token", "mean r − 1 − log r"),
        ("off_policy/weight", "1", "mean importance weight after the bounds"),
        ("off_policy/bounded_share, off_policy/rejected_share", "share", "of tokens"),
        ("off_policy/ess_share", "share", "effective sample size, (Σw)²/Σw²"),
    ),
    "Supervised stages": (
        ("loss/sft", "nats per token", "cross-entropy of target tokens"),
        ("loss/reward_model", "nats per pair", "−log σ(chosen − rejected)"),
        ("loss/dpo", "nats per pair", "preference objective"),
        ("train/accuracy, eval/accuracy", "share", "pairs ordered rightly"),
        ("train/kto_kl", "nats per completion", "reference point of `kto`"),
        ("rewards/<name>", "nats", "implicit: chosen, rejected, margins"),
        ("logps/<name>", "nats per completion", "chosen, rejected"),
    ),
    "Held out": (
        ("eval/scores, eval/scores_std", "score", "mean over prompts, standard deviation"),
        ("eval/loss", "nats", "of a supervised stage"),
        ("eval/iteration", "iterations", "when it was measured"),
        ("eval/pass@<k>, eval/pass^<k>", "share", "prompts with one (all) of k right; _low, _high"),
        ("eval/<name>", "its own", "components and diagnostics"),
        ("eval/<environment>/<name>", "as above", "for each of `eval_envs`, and of `envs`"),
    ),
    "Weights on their way": (
        ("weights/version, weights/oldest_version, weights/versions_behind", "updates",
         "newest published; oldest in the batch; lag"),
        ("weights/bytes", "bytes", "size of one version"),
        ("weights/publish_seconds, weights/push_seconds", "s", "by the learner, to servers"),
        ("weights/transfer_seconds, weights/load_seconds", "s", "of the slowest sampler"),
        ("weights/gb_per_s", "GB/s", "transfer and load"),
        ("weights/age_seconds", "s", "age in use"),
        ("weights/skips", "versions", "not loaded"),
        ("weights/republished, weights/failures/<kind>", "times", "after a loss; transfers"),
        ("weights/<name>", "its own", "background publisher: snapshots, announcements"),
    ),
    "Groups on their way, and what became of them": (
        ("rollouts/tokens_generated", "tokens", "sampled so far"),
        ("rollouts/tokens_trained, rollouts/tokens_rejected, rollouts/tokens_carried", "tokens",
         "of these trained on, rejected, waiting"),
        ("rollouts/groups_trained, rollouts/groups_rejected, rollouts/groups_failed", "groups",
         "so far"),
        ("rollouts/rejected/<reason>", "groups",
         "so far, by reason: a filter's, `too_few`, `stale` or `late`"),
        ("rollouts/groups_<state>", "groups", "now waiting, leased, partial, judged or ready"),
        ("rollouts/leases_expired", "leases", "not answered in time"),
        ("rollouts/age_mean, rollouts/age_max", "updates", "of the batch, by oldest tokens"),
        ("rollouts/wait_seconds", "s", "the learner waited"),
    ),
    "Replayed groups, where `replay_groups` is set": (
        ("replay/groups, replay/occupancy", "groups, share", "buffered, of the capacity"),
        ("replay/mean_uses", "updates", "that used a buffered group"),
        ("replay/mean_age", "iterations", "of buffered groups"),
        ("replay/added, replay/drawn, replay/reuse", "groups, groups, 1", "so far; their ratio"),
        ("replay/added_per_s, replay/drawn_per_s", "groups/s", "over the iteration"),
        ("replay/on_policy", "share", "of the batch's groups, that were not drawn"),
        ("replay/evicted, replay/used_up", "groups", "removed: buffer full, `replay_max_uses`"),
        ("replay/<environment>/<name>", "as above", "of each of `envs`: occupancy, added, drawn, "
         "evicted, used_up, added_per_s, drawn_per_s, on_policy"),
    ),
    "Rollouts kept, since the process began": (
        ("rollout_store/rows, rollout_store/lost", "completions", "written; not, after an error"),
        ("rollout_store/files, rollout_store/bytes", "files, bytes", "written"),
        ("rollout_store/wait_seconds", "s", "the run waited"),
        ("rollout_store/write_seconds", "s", "written in the background"),
    ),
    "Speed and faults": (
        ("throughput/tokens_per_s, throughput/samples_per_s", "tokens/s, completions/s",
         "sampled, over the whole iteration"),
        ("throughput/<name>_seconds", "s", "parts of an iteration"),
        ("time_share/starved", "share", "trial or sampler was ready but had no core"),
        ("time_share/<phase>", "share", "time by activity"),
        ("faults/<name>", "times, s", "of samplers, recovered from"),
    ),
    "RLlib's and Tune's own": (
        ("training_iteration", "iterations", "usual in `stop:`"),
        ("num_env_steps_sampled_lifetime", "completions", "an episode is one step"),
        ("time_total_s", "s", "all iterations so far"),
        ("iterations_since_restore, time_since_restore", "iterations, s", "since it was resumed"),
        ("env_runners/<name>, evaluation/<name>, learners/<name>, <name>_this_iter", "RLlib's",
         "under its names"),
        ("should_checkpoint, stop_run", "true", "asked for by a command"),
    ),
}  # fmt: skip
NAMES = [name for rows in GROUPS.values() for names, *_ in rows for name in names.split(", ")]


# Results that count how far a trial is: what `stop:` usually names, and progress is told by.
COUNTERS = (
    "training_iteration", "episode", "time_total_s", "epoch", "num_env_steps_sampled_lifetime",
)  # fmt: skip


def is_counter(name: str) -> bool:
    """Whether a result of this name counts how far a trial is, of RLlib's own algorithms too."""
    last = name.rpartition("/")[2]
    ends = r"\w+(_since_restore|_lifetime|_total)|num_\w*steps_(sampled|trained)"
    return last in COUNTERS or re.fullmatch(ends, last) is not None


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


def describes(name: str) -> bool:
    """Whether a result of this name is in the registry."""
    parts = [re.split(r"<\w+>", each) for each in NAMES]
    pattern = "|".join(".+".join(map(re.escape, each)) for each in parts)
    return re.fullmatch(pattern, name) is not None


def is_held_out(name: str) -> bool:
    """Whether a result of this name comes from evaluations."""
    return name.startswith(("eval/", "evaluation/", "held_out_"))


@dataclass(frozen=True)
class Metric:
    """A result as it is shown: `key` in the flat result, title, number format; of a curve also its
    unit, and the result that measures the same on held-out data."""

    key: str
    title: str
    form: str = ".3f"
    unit: str = ""
    held_out: str = ""

    def text(self, value: float) -> str:
        """Return `value` as it is shown; what rounds to zero has no sign."""
        text = format(value, self.form)
        return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


NONE = "–"  # where nothing was measured
EPISODES = Metric("episode", "episodes", ",.0f")
INVALID = Metric("train/num_invalid", "completions without a score", ",.0f")
STALENESS = Metric("train/staleness", "staleness, updates", ".2f")
TOKENS_PER_S = Metric("throughput/tokens_per_s", "tokens/s", ",.0f")
_ACCURACIES = (Metric("train/accuracy", "accuracy"), Metric("eval/accuracy", "held-out accuracy"))
# Columns of the live table, by a result that tells the kind of the stage; the last are of RLlib's
# own algorithms.
STOCK_METRICS = (
    Metric("num_env_steps_sampled_lifetime", "env steps", ",.0f"),
    Metric("env_runners/episode_return_mean", "return", ".1f"),
)
COLUMNS: dict[str, tuple[Metric, ...]] = {
    "loss/sft": (Metric("loss/sft", "loss"), Metric("eval/loss", "held-out loss")),
    "loss/reward_model": (Metric("loss/reward_model", "loss"), *_ACCURACIES),
    "loss/dpo": (Metric("loss/dpo", "loss"), *_ACCURACIES, Metric("rewards/margins", "margin")),
    "objective/scores": (
        Metric("objective/scores", "reward"), Metric("env/gold_score", "gold score"),
        Metric("objective/kl", "KL"),
    ),
    "episode": (),
}  # fmt: skip


CURVES = (
    Metric("loss/sft", "loss", unit="nats per token", held_out="eval/loss"),
    Metric("loss/reward_model", "loss", unit="nats per pair", held_out="eval/loss"),
    Metric("loss/dpo", "loss", unit="nats per pair", held_out="eval/loss"),
    Metric("train/accuracy", "pairs ordered rightly", unit="share", held_out="eval/accuracy"),
    Metric("rewards/margins", "reward of chosen less rejected", unit="nats"),
    Metric("logps/chosen", "log-prob of the chosen", form=".1f", unit="nats per completion"),
    Metric("objective/scores", "reward", held_out="eval/scores"),
    Metric("env/gold_score", "gold score", unit="-3 to 3", held_out="eval/gold_score"),
    Metric("env/grammatical", "grammatical", unit="share", held_out="eval/grammatical"),
    Metric("env/distinct", "distinct completions", unit="share", held_out="eval/distinct"),
    Metric("env/num_turns", "turns", form=".2f", unit="per conversation",
           held_out="eval/num_turns"),
    Metric("env/num_tool_calls", "tool calls", form=".2f", unit="per conversation",
           held_out="eval/num_tool_calls"),
    Metric("env/tool_failures", "failed tool calls", form=".2f", unit="per conversation"),
    Metric("objective/kl", "KL to the reference", unit="nats per completion"),
    Metric("loss/ptx_avg", "pretraining loss", unit="nats per token", held_out="eval/ptx_loss"),
    Metric("policy/entropy_avg", "entropy", unit="nats per token"),
    Metric("train/output_length", "completion length", form=".1f", unit="tokens",
           held_out="eval/output_length"),
)  # fmt: skip


def curves(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Those that some of the results have; of the losses that of the stage, since held-out losses
    of all kinds have one name."""
    keys = {key for result in results for key in result}
    known = [one for one in CURVES if keys & ({one.key, one.held_out} - {"eval/loss"})]
    return known + [
        Metric(f"env/{name}/reward", f"reward of {name}", held_out=f"eval/{name}/scores")
        for name in environments(results)
    ]  # fmt: skip


def environments(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the environments of a run that has several."""
    found = (re.fullmatch("env/([^/]+)/share_of_batch", key) for one in results for key in one)
    return list(dict.fromkeys(match[1] for match in found if match))


def columns(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the columns of the live table for the flat `results` of a stage's trials."""
    for marker, metrics in COLUMNS.items():
        if any(marker in result for result in results):
            of_envs = (Metric(f"env/{name}/reward", name) for name in environments(results))
            return _held(results, (EPISODES, *metrics, *of_envs, TOKENS_PER_S))
    return _held(results, STOCK_METRICS)


def summary_metrics(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the lines of the summary for the flat `results` of a trial."""
    is_ours = any("episode" in result for result in results)
    if not is_ours:
        return _held(results, STOCK_METRICS)
    keys = sorted({key for result in results for key in result})
    metrics = [EPISODES]
    for one in curves(results):
        metrics.append(Metric(one.key, ", ".join(filter(None, (one.title, one.unit))), one.form))
        metrics.append(Metric(one.held_out, "  held out", one.form))
        if one.key == "objective/scores":
            metrics += [Metric(k, f"  {n}") for k, n in reward_parts(results).items()]
    # Shares of rows with a failed reward function, a limit that was reached or a truncated prompt.
    failed = filter(None, (re.fullmatch("env/(.+)_failed", key) for key in keys))
    silent = [  # 0 is as it should be
        STALENESS, INVALID, *(Metric(e[0], f"share on which {e[1]} failed") for e in failed),
        Metric("env/truncated", "share of conversations that a limit ended"),
        Metric("train/truncated_share", "share of prompts that were cut"),
    ]  # fmt: skip
    # How far quantised models are from their unquantised weights.
    found = (key.removeprefix("env/").partition("/drift/") for key in keys if "/drift/" in key)
    drifts = [Metric(f"env/{a}{b}{c}", f"drift of {a}, {c}") for a, b, c in found]
    zero = [one for one in silent if not any(number(result.get(one.key)) for result in results)]
    metrics += [TOKENS_PER_S, *drifts, *silent]
    return [metric for metric in _held(results, metrics) if metric not in zero]


def reward_parts(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The names of a reward's components by their results, if there are several."""
    keys = sorted({key for result in results for key in result})
    parts = [key for key in keys if key.startswith("train/") and key.endswith("_rewards")]
    names = {key: key.removeprefix("train/").removesuffix("_rewards") for key in parts}
    return names if len(names) > 1 else {}


def _held(results: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]) -> list[Metric]:
    """Return those `metrics` that are a number in at least one of the `results`."""
    return [m for m in metrics if any(number(r.get(m.key)) is not None for r in results)]


def progress(flat: Mapping[str, Any], stop: Mapping[str, Any]) -> float:
    """Return how far a trial is, 0 to 1, by the criterion of `stop` that is nearest.

    Only counters tell progress: a reward to be reached does not.
    """
    counters = {key: number(limit) for key, limit in stop.items() if is_counter(key)}
    known = [(number(flat.get(key)), limit) for key, limit in counters.items() if limit]
    shares = [value / limit for value, limit in known if value is not None]
    return min(1.0, max([0.0, *shares]))


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
