"""Settings that every RLHF algorithm shares: sampling, scores, advantages, the KL and the loss."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided

from rllib_llm.algorithms.evaluation import evaluate_held_out
from rllib_llm.algorithms.language_model import LanguageModelConfig
from rllib_llm.algorithms.settings.checks import check_reference, check_timeout, require
from rllib_llm.algorithms.settings.engine_checks import check_engine, check_pipeline
from rllib_llm.algorithms.settings.rlhf_checks import (
    check_choices,
    check_loss,
    check_ranges,
    check_sampling,
    check_transport,
)
from rllib_llm.rollouts.env_runner import RLHFEnvRunner


class RLHFConfig(LanguageModelConfig):
    """Settings shared by PPO-ptx, GRPO, RLOO and REINFORCE++."""

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        # Runner: whole completions, judged in batches; its state is a position, kept here.
        self.env_runner_cls = RLHFEnvRunner
        self.batch_mode = "complete_episodes"
        self.merge_env_runner_states = False
        self.broadcast_env_runner_states = False
        self.sample_timeout_s = None
        self.sampler_timeout_s: float | str | None = "auto"
        self.delay_between_env_runner_restarts_s = 1.0
        self.num_env_runners = 0
        self.create_local_env_runner = False
        self.enable_connectors = False
        # Sampling.
        self.num_completions = 1
        self.temperature = 1.0
        self.top_p = 1.0
        self.top_k = 0
        self.min_new_tokens = 0
        self.max_new_tokens = 64
        self.stop_token_ids: list[int] | None = None
        self.sampling_batch_size: int | None = None
        self.cuda_graphs = True
        self.pipeline_depth = 0
        self.engine = "torch"
        self.engine_settings: dict[str, Any] | None = None
        # Critic.
        self.critic = "none"
        self.critic_model: str | None = None
        # The KL to the reference policy. Not RLlib's `kl_coeff`, which is old against new policy.
        self.ref_kl_coeff = 0.05
        self.ref_kl_in = "reward"
        self.ref_kl_estimator = "k1"
        self.ref_kl_unbiased = True
        self.ref_kl_target: float | None = None
        self.ref_kl_horizon = 10_000.0
        self.reference_in: str | None = None
        # Loss.
        self.policy_loss = "ppo"
        self.loss_reduction = "token_mean"
        self.clip_param = 0.2
        self.clip_param_high: float | None = None
        self.dual_clip: float | None = None
        self.vf_clip_param: float | None = 0.2
        self.vf_loss_coeff = 0.1
        self.entropy_coeff = 0.0
        self.gamma = 1.0
        self.lambda_ = 0.95
        self.target_kl: float | None = None
        self.whiten_advantages = True
        self.whiten_rewards = False
        self.recompute_old_logprobs = False
        self.importance_sampling: str | None = None
        self.importance_sampling_cap = 2.0
        self.importance_sampling_level = "token"
        # Scores.
        self.score_clip: float | None = None
        self.scale_scores = False
        self.missing_eos_penalty = 0.0
        self.length_penalty = 0.0
        self.overlong_buffer = 0
        self.scale_by_std = True
        self.drop_zero_variance_groups = False
        # Weights on their way to the samplers, and to whoever else follows the run.
        self.weights_transport = "store"
        self.weights_checksum = False
        self.weights_name: str | None = None
        self.weights_keep = 2
        # What is written down.
        self.log_samples_every = 10
        self.num_logged_samples = 8
        self.train_batch_size_per_learner = 64
        # Evaluation on held-out prompts, greedy, through RLlib's evaluation samplers.
        self.evaluation_duration = 64
        self.evaluation_duration_unit = "episodes"
        self.custom_evaluation_function = evaluate_held_out
        self.evaluation_error_after_n_consecutive_skips = 3

    def sampling(
        self,
        *,
        num_completions: int = NotProvided,
        temperature: float = NotProvided,
        top_p: float = NotProvided,
        top_k: int = NotProvided,
        min_new_tokens: int = NotProvided,
        max_new_tokens: int = NotProvided,
        stop_token_ids: list[int] | None = NotProvided,
        sampling_batch_size: int | None = NotProvided,
        cuda_graphs: bool = NotProvided,
        pipeline_depth: int = NotProvided,
        engine: str = NotProvided,
        engine_settings: dict[str, Any] | None = NotProvided,
        log_samples_every: int = NotProvided,
        num_logged_samples: int = NotProvided,
    ):
        """Sets how completions are sampled.

        Args:
            num_completions: completions of each prompt; group algorithms need at least 2.
            temperature: logits are divided by it, in the sampler and in the loss; > 0.
            top_p, top_k: truncation; 1.0 and 0 (off) keep sampling on-policy.
            min_new_tokens, max_new_tokens: bounds on a completion, EOS included.
            stop_token_ids: ids that end a completion; None: all EOS ids of the model.
            sampling_batch_size: completions decoded at once by one sampler, the next prompts taking
                the places of those that have ended; None: all that fit.
            cuda_graphs: on a CUDA device, engine "torch" records the decode steps of Llama-shaped
                models and replays them (default); False launches each operation by itself.
            pipeline_depth: 1 has remote samplers make the next batch while this one is learnt from,
                with weights one update older (`train/staleness`); 0 (default): they wait.
            engine: what generates in remote samplers: "torch" (default, our decode loop) or "vllm";
                for evaluation alone, in `evaluation_config`, "openai": a server with that
                interface. A sampler in the driver's process shares the learner's module and
                generates with "torch" instead of "vllm".
            engine_settings: further arguments of `VLLMEngine` or `OpenAIEngine`.
            log_samples_every: iterations between training samples in samples.jsonl; 0: none.
            num_logged_samples: rows written each time.
        """
        self._assign(locals(), RLHFConfig.sampling)
        return self

    def weight_broadcast(
        self,
        *,
        weights_transport: str = NotProvided,
        weights_checksum: bool = NotProvided,
        weights_name: str | None = NotProvided,
        weights_keep: int = NotProvided,
    ):
        """Sets how new weights leave the learner.

        Args:
            weights_transport: "store" (default): through the object store, everywhere; "cuda_ipc":
                they stay on the GPU that learner and samplers share, as fractions of one (on two
                buffers of their size there); "nixl": straight from the learner's memory into the
                samplers', by RDMA or NVLink where GPUs have it (`pip install
                'rllib-llm[nixl]'`). From the first time on that a sampler cannot read them, these
                two go through the store.
            weights_checksum: every receiver compares a CRC-32 of the bytes, and fetches them again
                where it differs; costs half a second per GB on each side.
            weights_name: name under which other processes of the cluster, such as replicas of a
                server, follow this run's weights (`rllib_llm.weights.follower`); None: nobody.
            weights_keep: versions that stay in the object store for them, at least 1.
        """
        self._assign(locals(), RLHFConfig.weight_broadcast)
        return self

    def fault_tolerance(self, *, sampler_timeout_s: float | str | None = NotProvided, **kwargs):
        """Settings of what happens to processes that die or hang; others are passed on.

        Args:
            sampler_timeout_s: seconds after which a sampler that has not answered a request is
                killed and started again, its prompts going to another; doubled for a request that
                was already taken from a silent one. "auto" (default): ten times the slowest answer
                so far, in proportion to the prompts asked for, and at least 120 s; 1800 s for the
                first. Set a number to notice a hang sooner, None to wait for ever.
        """
        super().fault_tolerance(**kwargs)
        self._assign(locals(), RLHFConfig.fault_tolerance)
        return self

    def training(
        self,
        *,
        critic: str = NotProvided,
        critic_model: str | None = NotProvided,
        ref_kl_coeff: float = NotProvided,
        ref_kl_in: str = NotProvided,
        ref_kl_estimator: str = NotProvided,
        ref_kl_unbiased: bool = NotProvided,
        ref_kl_target: float | None = NotProvided,
        ref_kl_horizon: float = NotProvided,
        reference_in: str | None = NotProvided,
        policy_loss: str = NotProvided,
        loss_reduction: str = NotProvided,
        clip_param: float = NotProvided,
        clip_param_high: float | None = NotProvided,
        dual_clip: float | None = NotProvided,
        vf_clip_param: float | None = NotProvided,
        vf_loss_coeff: float = NotProvided,
        entropy_coeff: float = NotProvided,
        lambda_: float = NotProvided,
        target_kl: float | None = NotProvided,
        whiten_advantages: bool = NotProvided,
        whiten_rewards: bool = NotProvided,
        recompute_old_logprobs: bool = NotProvided,
        importance_sampling: str | None = NotProvided,
        importance_sampling_cap: float = NotProvided,
        importance_sampling_level: str = NotProvided,
        score_clip: float | None = NotProvided,
        scale_scores: bool = NotProvided,
        missing_eos_penalty: float = NotProvided,
        length_penalty: float = NotProvided,
        overlong_buffer: int = NotProvided,
        scale_by_std: bool = NotProvided,
        drop_zero_variance_groups: bool = NotProvided,
        **kwargs,
    ):
        """Settings of advantages and loss; others are passed on to `LanguageModelConfig`.

        Args:
            critic: "shared" (value head on the policy's trunk), "separate" or "none".
            critic_model: what a separate critic starts from: usually the reward model.
            ref_kl_coeff: β, weight of the KL to the reference in nats; 0 switches it off.
            ref_kl_in: "reward" (per token, Ziegler 2019) or "loss" (Shao 2024).
            ref_kl_estimator: "k1", "k2" or "k3" (Schulman, "Approximating KL divergence"), or
                "full", the exact KL over the vocabulary, which a reference in the environment
                cannot give.
            ref_kl_unbiased: the loss's KL is weighed by each token's π/π_old and its gradient, so
                that the mean gradient is that of the exact KL, on policy too, where the ratio is 1
                and its gradient is not 0 (DeepSeek-V3.2, 3.1; default, as in TRL since 1.10).
                False: Shao 2024's, whose gradient for k3 is that of the KL the other way round.
            ref_kl_target: nats per completion that an adaptive β aims at; None: β is fixed.
            ref_kl_horizon: samples over which the adaptive β changes by at most a fifth.
            reference_in: who computes the reference's log-probs: "environment" (a frozen model in
                every sampler, quantised if so set), "policy" (the trunk with its adapters off; with
                lora, where it is the default) or "learner" (a copy in every learner).
            policy_loss: "ppo" (ratio of each token), "gspo" (a completion's geometric mean),
                "rloo" (a completion's whole ratio) or "cispo".
            loss_reduction: "token_mean" (dapo), "sequence_mean" (grpo) or "dr_grpo".
            clip_param: ε below, and above unless `clip_param_high` (DAPO's clip-higher) is set.
            dual_clip: bound on the loss of negative advantages, > 1; None: off.
            vf_clip_param, vf_loss_coeff: of the critic's loss.
            entropy_coeff: bonus on the policy's entropy.
            lambda_: of GAE (`gamma` is RLlib's); 1 and 0.95 as in the original RLHF code.
            target_kl: epochs stop when approxkl passes 1.5 times this; None: never.
            whiten_advantages, whiten_rewards: over the whole batch of all learners.
            recompute_old_logprobs: the learner computes them again instead of taking the
                sampler's, which in float32 are the same and cost nothing; so with the values of a
                shared critic, which a sampler in the learner's process gives too. With a critic
                half precision recomputes both in any case.
            importance_sampling: "truncate" or "mask" corrects the gap between sampler and
                trainer when old log-probs are recomputed; None: off.
            importance_sampling_cap: largest weight (Yao et al. 2025: 2).
            importance_sampling_level: "token", or "sequence": the weight of a whole completion,
                unbiased, but far from 1 for long ones.
            score_clip: scores are held to ± this; None: off.
            scale_scores: divide scores by their running standard deviation.
            missing_eos_penalty: subtracted from the score of a completion that hit the limit.
            length_penalty: subtracted per completion token.
            overlong_buffer: DAPO's soft punishment over the last so many tokens; 0: off.
            scale_by_std: divide group advantages by the group's std; False: Dr. GRPO.
            drop_zero_variance_groups: keep groups with equal scores out of the loss.
        """
        super().training(**kwargs)
        self._assign(locals(), RLHFConfig.training)
        return self

    def get_evaluation_config_object(self):
        """As RLlib's; evaluation is greedy unless its config has `explore: true`."""
        config = super().get_evaluation_config_object()
        if config is not None and not isinstance(self.evaluation_config, AlgorithmConfig):
            config.explore = (self.evaluation_config or {}).get("explore", False)
        return config

    def module_class(self) -> type:
        from rllib_llm.modules.causal_lm import CausalLMModule

        return CausalLMModule

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "temperature": self.temperature,
            "critic": self.critic,
            "critic_model": self.critic_model,
        }

    @property
    def reference_place(self) -> str:
        """Who computes the reference's log-probs: "environment", "policy" or "learner"."""
        return self.reference_in or ("environment" if self.lora is None else "policy")

    @property
    def num_prompts_per_iteration(self) -> int:
        """Prompt groups that one iteration samples."""
        return self.total_train_batch_size // self.num_completions

    def validate(self) -> None:
        super().validate()
        check_choices(self)
        check_loss(self)
        check_reference(self)
        check_sampling(self)
        check_transport(self)
        check_timeout("sampler_timeout_s", self.sampler_timeout_s)
        check_engine(self)
        check_pipeline(self)
        require(
            self.env is not None, "env", self.env, "an environment's name or class",
            "prompts and rewards come from it", "Set env: rllib_llm/RLHF-v0, say",
        )  # fmt: skip
        check_ranges(self)
