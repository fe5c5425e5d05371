"""Every result by name, with unit and meaning: the reference page and its test read it here.

A part of a name in angle brackets stands for a name of the user's: a reward, a component, a kind of
failure. `describes` says whether a name is known.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


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
        ("objective/non_score_reward", "score", "−β times the KL, where it is in the reward"),
        ("objective/rlhf_reward", "score", "processed score plus `non_score_reward`"),
        ("objective/ref_kl_coeff", "1", "β as it is now"),
    ),
    _group(
        "The update",
        ("policy/approxkl_avg", "nats²", "½ · mean (log-prob − old log-prob)² per token"),
        ("policy/clipfrac_avg", "share", "tokens whose ratio the loss held"),
        ("policy/entropy_avg", "nats per token", "entropy of the next-token distribution"),
        ("loss/policy_avg", "1", "policy loss"),
        ("loss/value_avg", "1", "critic's loss"),
        ("loss/ref_kl_avg", "nats per token", "KL to the reference, where it is in the loss"),
        ("loss/ptx_avg", "nats per token", "cross-entropy of pretraining text"),
        ("val/ratio", "1", "mean ratio of new to old probability per token"),
        ("val/ratio_var", "1", "its variance"),
        ("val/clipfrac_avg", "share", "tokens whose value the loss held"),
        ("val/num_eos_tokens", "share", "completions that a stop token ended"),
        ("sampler/logprob_gap", "nats per token", "mean absolute gap of their log-probs"),
        ("grad_norm", "1", "global gradient norm before clipping"),
        ("lr", "1", "learning rate of the last optimiser step"),
        ("effective/<setting>", "as the setting", "what optimiser and loss really used"),
    ),
    _group(
        "Training data",
        ("train/rewards", "reward", "mean reward of the rows that were judged"),
        ("train/<name>_rewards", "reward", "mean of one reward function, before its weight"),
        ("train/output_length", "tokens", "mean length of a completion, the stop token included"),
        ("train/num_invalid", "completions", "rows without a score, which are not learnt from"),
        ("train/truncated_share", "share", "prompts, or texts, that were too long and were cut"),
        ("train/zero_variance_groups", "share", "groups whose scores are all alike"),
        ("train/padding_share", "share", "of the tokens that went through the trunk"),
        ("train/staleness", "updates", "age of the weights that sampled the batch"),
        ("env/distinct", "share", "completions that no other of the batch equals, once each"),
        ("env/sampled_share", "share", "of the completions' tokens that the policy sampled"),
        ("env/<function>_failed", "share", "rows on which a reward function failed"),
        ("env/<name>", "its own", "diagnostics of the environment and its judges"),
        ("episode", "completions", "learnt from so far"),
        ("epoch", "passes", "over the data of a supervised stage"),
        ("eps", "completions per second", "of the whole iteration"),
    ),
    _group(
        "Older data, where `off_policy` is set",
        ("off_policy/age_mean", "updates", "age of the weights that sampled a token"),
        ("off_policy/age_max", "updates", "of the oldest token"),
        ("off_policy/age_<updates>", "share", "tokens of that age, the last one and older"),
        ("off_policy/versions", "versions", "mean number of them in one completion"),
        ("off_policy/k1", "nats per token", "mean −log(π/π_sampler) before the update"),
        ("off_policy/k3", "nats per token", "mean r − 1 − log r of it, r = π/π_sampler"),
        ("off_policy/k1_lag_<updates>", "nats per token", "of the tokens of one age"),
        ("off_policy/k3_lag_<updates>", "nats per token", "of the tokens of one age"),
        ("off_policy/weight", "1", "mean importance weight, bounds applied"),
        ("off_policy/bounded_share", "share", "tokens whose weight the bounds changed"),
        ("off_policy/ess_share", "share", "effective sample size, (Σw)²/Σw², over tokens"),
        ("off_policy/rejected_share", "share", "tokens kept out of the loss by `rejection`"),
    ),
    _group(
        "Supervised stages",
        ("loss/sft", "nats per token", "cross-entropy of the target tokens"),
        ("loss/reward_model", "nats per pair", "−log σ(chosen − rejected)"),
        ("loss/dpo", "nats per pair", "loss of the preference objective"),
        ("train/accuracy", "share", "pairs in the right order"),
        ("rewards/<name>", "nats", "implicit rewards: chosen, rejected, margins"),
        ("logps/<name>", "nats per completion", "log-probs of chosen and rejected answers"),
    ),
    _group(
        "Held out",
        ("eval/scores", "score", "mean over held-out prompts"),
        ("eval/scores_std", "score", "its standard deviation"),
        ("eval/output_length", "tokens", "mean length of a completion"),
        ("eval/finished", "share", "completions that a stop token ended"),
        ("eval/loss", "nats", "loss on held-out rows of a supervised stage"),
        ("eval/accuracy", "share", "held-out pairs in the right order"),
        ("eval/ptx_loss", "nats per token", "on held-out pretraining text"),
        ("eval/iteration", "iterations", "learnt when it was measured"),
        ("eval/pass@<k>", "share", "prompts of which one of k completions passes; _low, _high"),
        ("eval/pass^<k>", "share", "prompts of which all of k completions pass; _low, _high"),
        ("eval/<name>", "its own", "components and diagnostics"),
        ("eval/<environment>/<name>", "as above", "of one of `eval_envs`"),
    ),
    _group(
        "Weights on their way",
        ("weights/version", "updates", "published last"),
        ("weights/oldest_version", "updates", "that sampled a row of the batch"),
        ("weights/versions_behind", "updates", "that the batch is behind the newest"),
        ("weights/bytes", "bytes", "of one version"),
        ("weights/publish_seconds", "s", "that the learner's side took"),
        ("weights/push_seconds", "s", "that servers took which are told of them"),
        ("weights/transfer_seconds", "s", "until they arrived, the slowest sampler"),
        ("weights/load_seconds", "s", "until they were in use"),
        ("weights/gb_per_s", "GB/s", "transfer and load"),
        ("weights/age_seconds", "s", "since the weights in use were published"),
        ("weights/skips", "versions", "that a sampler passed over"),
        ("weights/republished", "times", "that lost weights were published again"),
        ("weights/failures/<kind>", "times", "failed transfers"),
        ("weights/<name>", "its own", "of the background publisher: snapshots, announcements"),
    ),
    _group(
        "Groups on their way, and what became of them",
        ("rollouts/tokens_generated", "tokens", "that samplers handed in so far"),
        ("rollouts/tokens_trained", "tokens", "of them, learnt from"),
        ("rollouts/tokens_rejected", "tokens", "of them, not to be learnt from"),
        ("rollouts/tokens_carried", "tokens", "of them, waiting for their turn"),
        ("rollouts/groups_trained", "groups", "learnt from so far"),
        ("rollouts/groups_rejected", "groups", "not to be learnt from, so far"),
        ("rollouts/groups_failed", "groups", "that no sampler could make, so far"),
        ("rollouts/rejected/<reason>", "groups", "rejected so far, by a filter's reason, as "
         "`too_few`, `stale` or `late`"),
        ("rollouts/groups_<state>", "groups", "waiting, leased, partial, judged or ready now"),
        ("rollouts/leases_expired", "leases", "that their sampler did not answer in time"),
        ("rollouts/age_mean", "updates", "of the batch's groups, by their oldest token"),
        ("rollouts/age_max", "updates", "of the oldest group"),
        ("rollouts/wait_seconds", "s", "that the learner waited for the batch"),
    ),
    _group(
        "Replayed groups, where `replay_groups` is set",
        ("replay/groups", "groups", "in the buffer"),
        ("replay/occupancy", "share", "of its capacity"),
        ("replay/mean_uses", "updates", "that learnt from a group in it"),
        ("replay/mean_age", "iterations", "since a group in it was sampled"),
        ("replay/added", "groups", "so far"),
        ("replay/drawn", "groups", "so far"),
        ("replay/reuse", "1", "drawn groups for each that was added"),
        ("replay/evicted", "groups", "that went for want of room"),
        ("replay/used_up", "groups", "that went after `replay_max_uses`"),
    ),
    _group(
        "Rollouts kept, since the process began",
        ("rollout_store/rows", "completions", "written"),
        ("rollout_store/files", "files", "written"),
        ("rollout_store/bytes", "bytes", "written"),
        ("rollout_store/lost", "completions", "not written, since writing had failed"),
        ("rollout_store/wait_seconds", "s", "that the run waited for the writer"),
        ("rollout_store/write_seconds", "s", "that writing took in the background"),
    ),
    _group(
        "Speed and faults",
        ("throughput/tokens_per_s", "tokens/s", "sampled tokens over the whole iteration"),
        ("throughput/samples_per_s", "completions/s", "over the whole iteration"),
        ("throughput/<name>_seconds", "s", "of the parts of an iteration"),
        ("time_share/starved", "share", "in which trial or sampler was ready and had no core"),
        ("time_share/<phase>", "share", "of the time since the last result, by what it went into"),
        ("faults/<name>", "times, s", "what went wrong among samplers and was mended"),
    ),
    _group(
        "RLlib's and Tune's own",
        ("training_iteration", "iterations", "so far; `stop:` usually names it"),
        ("num_env_steps_sampled_lifetime", "completions", "an episode is one step long"),
        ("env_runners/<name>", "RLlib's", "`episode_return_mean` and the like"),
        ("evaluation/<name>", "RLlib's", "the held-out results under RLlib's name"),
        ("learners/<name>", "RLlib's", "of each module"),
        ("<name>_this_iter", "RLlib's", "counts of this iteration"),
        ("should_checkpoint", "true", "where a checkpoint was asked for while the run went on"),
        ("stop_run", "true", "in the last result of a run that `rllib stop` ended"),
    ),
)  # fmt: skip


def describes(name: str) -> bool:
    """Whether a result of this name is in the registry."""
    return _pattern().fullmatch(name) is not None


@functools.cache
def _pattern() -> re.Pattern[str]:
    alternatives = []
    for group in GROUPS:
        for row in group.rows:
            parts = re.split(r"<\w+>", row.name)
            alternatives.append(".+".join(re.escape(part) for part in parts))
    return re.compile("|".join(alternatives))
