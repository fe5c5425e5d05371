"""Settings that every RLHF algorithm shares: sampling, scores, advantages, the KL and the loss; and
the base of the algorithms without a critic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.algorithms.evaluation import eval_env_config, eval_env_rules, evaluate_held_out
from rllib_llm.algorithms.language_model_config import LanguageModelConfig
from rllib_llm.config.distillation import DISTILLATION, distillation_rules, teacher_of
from rllib_llm.config.environments import (
    ENVIRONMENTS,
    entry_config,
    environment_rules,
    has_held_out,
)
from rllib_llm.config.experts import BALANCE, ROUTING_REPLAY, expert_rules
from rllib_llm.config.loss import (
    LOSS,
    REFERENCE,
    advantage_rules,
    loss_rules,
    reference_rules,
)
from rllib_llm.config.model import LANGUAGE_MODEL, SAMPLER_FAULTS
from rllib_llm.config.rllib import COMMON, ONLINE
from rllib_llm.config.sampling import (
    ROLLOUTS,
    SAMPLING,
    asks_a_server,
    engine_rules,
    evaluation_rules,
    sampling_rules,
    takes_rows,
)
from rllib_llm.config.sections import SectionMethod, defaults, idle, row_called, wrong
from rllib_llm.config.streaming import (
    OFF_POLICY,
    REPLAY,
    STREAMING,
    off_policy_rules,
    streaming_rules,
)
from rllib_llm.config.tabled_config import flattened
from rllib_llm.config.weights import WEIGHTS, follower_rules, transport_rules
from rllib_llm.envs.registry import check_name
from rllib_llm.envs.settings import CONVERSATION, PROMPTS, REWARDS
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules
from rllib_llm.shared.errors import Problem, errors_of
from rllib_llm.shared.setting import Section

_ALSO_OF_CONVERSATIONS = replace(
    CONVERSATION,
    settings=tuple(row for row in LANGUAGE_MODEL.settings if row.name == "template_settings"),
)


class RLHFConfig(LanguageModelConfig):
    """Settings shared by PPO-ptx, GRPO, RLOO and REINFORCE++."""

    sections: tuple[Section, ...] = (
        *LanguageModelConfig.sections,
        SAMPLING,
        STREAMING,
        ROLLOUTS,
        REPLAY,
        PROMPTS,
        REWARDS,
        CONVERSATION,
        _ALSO_OF_CONVERSATIONS,
        ENVIRONMENTS,
        REFERENCE,
        LOSS,
        DISTILLATION,
        BALANCE,
        ROUTING_REPLAY,
        OFF_POLICY,
        WEIGHTS,
        SAMPLER_FAULTS,
    )
    rllib_sections: tuple[Section, ...] = (*COMMON, *ONLINE)
    module_path = "rllib_llm.modules.rl_modules:CausalLMModule"

    env_runner_cls: type | None

    sampling = SectionMethod()
    streaming = SectionMethod()
    rollouts = SectionMethod()
    replay = SectionMethod()
    prompts = SectionMethod()
    rewards = SectionMethod()
    conversation = SectionMethod()
    environments = SectionMethod()
    reference = SectionMethod()
    distillation = SectionMethod()
    experts = SectionMethod()
    weights = SectionMethod()

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        # Runner: whole completions, judged in batches; its state is a position, kept here.
        self.batch_mode = "complete_episodes"
        self.merge_env_runner_states = False
        self.broadcast_env_runner_states = False
        self.sample_timeout_s = None
        self.delay_between_env_runner_restarts_s = 1.0
        self.num_env_runners = 0
        self.create_local_env_runner = False
        self.enable_connectors = False
        # Evaluation on held-out prompts, greedy, through RLlib's evaluation samplers.
        self.evaluation_duration = 64
        self.evaluation_duration_unit = "episodes"
        self.custom_evaluation_function = evaluate_held_out
        self.evaluation_error_after_n_consecutive_skips = 3

    def set_section(self, section: str, args: tuple[Any, ...], given: Mapping[str, Any]):
        """Other names than settings are those of environments in `.environments(...)`."""
        if section == ENVIRONMENTS.name:
            named = {k: v for k, v in given.items() if row_called(type(self), section, k) is None}
            given = {k: v for k, v in given.items() if k not in named}
            if named:
                given["envs"] = {**(given.get("envs") or self.envs or {}), **named}
        return super().set_section(section, args, given)

    @property
    def env_names(self) -> tuple[str, ...]:
        """The names of several environments; the only one has none, ""."""
        return tuple(self.envs or ("",))

    def env_configs(self) -> dict[str, Any]:
        """The config of each environment by its name; of the only one itself, as ""."""
        return {name: entry_config(self, name) if name else self for name in self.env_names}

    def weights_of_envs(self) -> tuple[float, ...]:
        """The weights of the environments; in evaluation 0 of those without held-out prompts."""
        return tuple(
            0.0 if self.in_evaluation and name and not has_held_out(entry)
            else float(self.envs[name].get("weight", 1)) if name else 1.0
            for name, entry in self.env_configs().items()
        )  # fmt: skip

    def samplers_of_envs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the samplers that open each environment: in turns as many as its entry says; ()
        of one that all open."""
        found, num_samplers, first = [], 0 if self.in_evaluation else self.num_env_runners, 0
        for name, weight in zip(self.env_names, self.weights_of_envs(), strict=True):
            own = (self.envs or {}).get(name, {}).get("num_env_runners") if weight else None
            workers = range(first, first + own) if own and num_samplers else ()
            found.append(tuple(str(worker % num_samplers + 1) for worker in workers))
            first += len(workers)
        return tuple(found)

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The loss of whole completions weighs each completion alike, unless told otherwise."""
        follows = super().implied(given)
        is_default = self.loss_reduction == defaults(type(self)).loss_reduction
        if given.get("policy_loss") == "rloo" and is_default:
            follows["loss_reduction"] = "sequence_mean"
        return follows

    def get_evaluation_config_object(self):
        """As RLlib's; evaluation is greedy unless its config has `explore: true`."""
        config = super().get_evaluation_config_object()
        if config is not None and not isinstance(self.evaluation_config, AlgorithmConfig):
            config.explore = (self.evaluation_config or {}).get("explore", False)
        return config

    def sampler_configs(self) -> list[Any]:
        """Configs of training's samplers, evaluation's and those of `eval_envs`, which RLlib starts
        also where no `evaluation_interval` is set."""
        named = [eval_env_config(self, name) for name in self.eval_envs or ()]
        return [self, self.get_evaluation_config_object(), *named]

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "temperature": self.temperature,
            "critic": self.critic,
            "critic_model": self.critic_model,
            "off_policy": self.off_policy,
            "router_aux_coeff": self.router_aux_coeff,
            "routing_replay": self.routing_replay and not self.in_evaluation,
        }

    @property
    def reference_place(self) -> str:
        """Where the reference's log-probs are computed: "environment", "policy" or "learner"."""
        return self.reference_in or ("environment" if self.lora is None else "policy")

    @property
    def teacher_settings(self) -> dict[str, Any]:
        """The teacher as a mapping, its "model" among them; {} without one."""
        return teacher_of(self)

    @property
    def num_prompts_per_iteration(self) -> int:
        """Prompt groups that one iteration samples."""
        return self.total_train_batch_size // self.num_completions

    @property
    def streams(self) -> bool:
        """Whether groups stream: samplers are at work while the learner trains. Else a batch is
        sampled when it is wanted."""
        return self.max_staleness > 0 or self.schedule == "free"

    def stream_rules(self) -> StreamRules:
        """How far samplers may be ahead, and in which order groups are learnt from."""
        num_groups = self.num_prompts_per_iteration
        num_extra = math.ceil(round((self.oversample - 1) * num_groups, 6))
        # The first that are finished of all that are begun for an iteration.
        any_begun = num_groups + num_extra if num_extra and self.schedule == "free" else 1
        return StreamRules(
            num_groups=num_groups,
            max_staleness=self.max_staleness,
            schedule=self.schedule,
            window=max(self.window, any_begun) if self.schedule == "free" else 1,
            num_extra=num_extra,
            oversample_keep=self.oversample_keep,
            publish_every=self.weights_publish_every,
            on_stale=self.on_stale if self.schedule == "free" else "train",
            groups_per_lease=self.groups_per_lease or max(1, num_groups // 8),
            max_rejected=int(self.max_resampling * num_groups),
            num_parts=None if self.streams else self.sampling_parts or max(1, self.num_env_runners),
            # Where a batch is of several versions, all have texts.
            texts_every=min(1, self.log_samples_every)
            if self.streams or num_extra else self.log_samples_every,
            bounds_age=not asks_a_server(self),
            timeout_s=self.sampler_timeout_s,
            env_weights=self.weights_of_envs(),
            mix_by=self.mix_by,
            env_samplers=self.samplers_of_envs(),
            judged_with=tuple(name for name, (coeff, place) in {
                "reference": (self.ref_kl_coeff, self.reference_place),
                "teacher": (self.distill_coeff, self.teacher_in),
            }.items() if coeff and place == "environment"),
        )  # fmt: skip

    def serving_settings(self) -> ServingSettings:
        """Settings common to all samplers."""
        rules, envs = self.stream_rules(), self.env_configs().values()
        return ServingSettings(
            num_completions=self.num_completions,
            groups_per_lease=rules.groups_per_lease if self.streams else 1,
            min_valid=2,
            oversample_keep=self.oversample_keep,
            env_filters=tuple(tuple(each.filters or ()) for each in envs),
            env_completions=tuple(each.num_completions for each in envs),
            by_row=self.schedule == "free"
            and takes_rows(self)
            and self.generate_function is None
            and bool(self.num_env_runners),
            max_groups=-(-rules.capacity // max(1, self.num_env_runners)),
            in_flight=self.in_flight,
            masks_stale_prefix=self.mask_stale_prefix,
            judges_beside=self.streams,
        )

    @property
    def gives_weights_away(self) -> bool:
        """Whether others than this run's samplers are given its weights."""
        return self.weights_name is not None or bool(self.weights_push)

    def get_default_env_runner_class(self) -> type:
        """The EnvRunner class if no `env_runner_cls` is set; the algorithm sets it then. A config
        is made and checked without importing all that samplers need, which takes seconds."""
        from rllib_llm.rollouts.env_runner import RLHFEnvRunner

        return RLHFEnvRunner

    def problems(self) -> list[Problem]:
        if self.env is None and not self.envs:  # prompts and rewards name theirs
            rows = [row for part in (PROMPTS, REWARDS, CONVERSATION) for row in part.settings]
            envs = {row.env for row in rows if row.name in self.env_config}
            self.env = min(envs, default=None)  # as `needed_env` chooses
        found = super().problems()
        if errors_of(found) or self.in_evaluation:
            return found
        overlay, held_out = self.evaluation_config, {}
        if isinstance(overlay, Mapping) and overlay:
            held_out["evaluation_config"] = own = self.get_evaluation_config_object()
            names = flattened(type(self), overlay)
            unused = (problem for problem in idle(own, self) if problem.name in names)
            found += [problem.within("evaluation_config") for problem in unused]
        for name in self.envs or ():
            held_out[f"envs.{name}"] = entry_config(self, name)
        if self.evaluation_interval:
            for name in self.eval_envs or ():
                held_out[f"eval_envs.{name}"] = eval_env_config(self, name)
        for place, config in held_out.items():
            # Groups are cut by the run's number of completions, whatever an environment's.
            found += [
                problem.within(place) for problem in errors_of(config.problems())
                if not (place.startswith("envs.") and problem.is_of("train_batch_size_per_learner"))
            ]  # fmt: skip
        return found

    def env_rules(self) -> Iterator[Problem]:
        """There is an environment."""
        if self.env is None and not self.envs:
            yield Problem("env", "be an environment's name or class",
                          "prompts and rewards come from it",
                          "Give prompts and rewards, or set env")  # fmt: skip
        check_name(self.env)

    rules = (
        *LanguageModelConfig.rules, loss_rules, advantage_rules, reference_rules,
        distillation_rules, expert_rules, sampling_rules, transport_rules,
        engine_rules, follower_rules, off_policy_rules, streaming_rules,
        environment_rules, env_rules, evaluation_rules, eval_env_rules,
    )  # fmt: skip


class CriticFreeConfig(RLHFConfig):
    """Settings of algorithms whose advantages come from scores alone."""

    ignored_settings: tuple[str, ...] = ("critic_model", "vf_clip_param", "vf_loss_coeff")

    def critic_rules(self) -> Iterator[Problem]:
        """There is no critic."""
        if self.critic != "none":
            yield wrong(self, "critic", "'none'", "advantages come from the group or the batch, "
                        "and a value head would not be trained",
                        "Use PPOPtx to train a critic")  # fmt: skip

    rules = (*RLHFConfig.rules, critic_rules)


def group_rules(config: RLHFConfig) -> Iterator[Problem]:
    """A group algorithm is given groups."""
    if config.num_completions < 2:
        yield wrong(config, "num_completions", "at least 2", "the baseline is the group's rest",
                    "Use 4 to 16")  # fmt: skip
