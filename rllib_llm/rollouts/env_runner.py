"""The sampler: draws prompts from its environment, generates completions, has them judged.

A request names prompts by position, and a completion's randomness is a function of seed and
position. So a sampler has no state worth saving: any of them, new or restarted, gives the same
completions for the same request and weights.
"""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.framework import get_device
from ray.rllib.utils.metrics import (
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
)
from ray.rllib.utils.typing import StateDict

from rllib_llm import columns
from rllib_llm.engines.external_engine import ExternalEngine, open_engine
from rllib_llm.envs.bandit import check_env_lengths
from rllib_llm.envs.registry import make
from rllib_llm.listening import Listener
from rllib_llm.rollouts.generation import generate_completions
from rllib_llm.rollouts.request import JudgedBatch, SampleFailure, SampleRequest
from rllib_llm.weights.broadcast import WeightsReceiver
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.loading import ModuleLoader, differing
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.transfer import WeightsLostError


class RLHFEnvRunner(EnvRunner, Checkpointable):
    """EnvRunner for variable-length token actions, in the driver's process or a remote actor."""

    def __init__(self, *, config, **kwargs):
        # RLlib seeds every process, which would give all samplers the same global random state;
        # nothing here draws from it.
        super().__init__(config=config, **kwargs)
        self.module = None
        self.engine: ExternalEngine | None = None  # None: the module generates
        self.weights = WeightsReceiver()
        # The local one may share the learner's module, which is written to.
        self._loader = ModuleLoader(alias=bool(self.worker_index))
        self._pending_state: StateDict | None = None
        self._position = 0  # of plain `sample()` calls only
        self._callbacks = [cls() for cls in self._callback_classes()]
        self._device = get_device(
            self.config, 0 if not self.worker_index else self.config.num_gpus_per_env_runner
        )
        self._listener = Listener(f"sampler {self.worker_index}")
        if not self.worker_index:  # the process has a listener of its own
            self._make_parts()
            return
        with self._listener:
            self._make_parts()

    def _make_parts(self) -> None:
        self.make_env()
        if self.worker_index:  # the local one usually shares the learner's module
            torch.set_num_threads(max(1, int(self.config.num_cpus_per_env_runner)))
        self.engine = open_engine(self.config, worker_index=self.worker_index)
        if self.worker_index and self.engine is None:
            self.make_module()

    def _callback_classes(self) -> list[type]:
        classes = self.config.callbacks_class
        return list(classes) if isinstance(classes, (list, tuple)) else [classes]

    # --- parts -------------------------------------------------------------------------------

    def make_env(self) -> None:
        """The environment replica of this sampler, with its own frozen models."""
        config = self.config
        settings = dict(config.env_config)
        settings.setdefault("model", config.pretrained_model)
        settings.setdefault("max_completion_len", config.max_new_tokens)
        settings.setdefault("temperature", config.temperature)
        settings.setdefault("seed", config.seed or 0)
        if config.chat_template is not None:
            settings.setdefault("chat_template", config.chat_template)
        settings.setdefault("device", str(self._device))
        settings.setdefault("split", "eval" if config.in_evaluation else "train")
        elsewhere = config.reference_place != "environment"  # then the learner has it
        if config.in_evaluation or not config.ref_kl_coeff or elsewhere:
            settings.setdefault("reference", None)
        else:
            settings.setdefault("reference", {"model": config.pretrained_model})
        context = EnvContext(settings, self.worker_index, num_workers=self.num_workers)
        self.env = make(config.env, context)
        check_env_lengths(
            self.env,
            model=config.pretrained_model,
            max_new_tokens=config.max_new_tokens,
            chosen="max_prompt_len" in config.env_config,
        )
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env,
                "env_context": context,
            },
        )

    def make_module(self) -> None:
        """The policy of this sampler, without critic, on its device."""
        spec = self.config.get_multi_rl_module_spec(
            spaces=self.get_spaces(), inference_only=True
        ).rl_module_specs[DEFAULT_MODULE_ID]
        self.module = spec.build().to(self._device)
        if self._pending_state is not None:
            self.module.set_state(self._pending_state)
            self._pending_state = None

    def built_module(self) -> RLModule:
        """The policy of this sampler, made on first use."""
        if self.module is None:
            self.make_module()
        return self.module

    def share_module(self, module) -> None:
        """Samples with `module` itself, the learner's in the same process: no copy, no transfer."""
        self.module = module
        self._pending_state = None

    def get_spaces(self) -> dict[str, tuple]:
        spaces = (self.env.single_observation_space, self.env.single_action_space)
        return {"__env_single__": spaces, "__env__": spaces, DEFAULT_MODULE_ID: spaces}

    def __repr__(self) -> str:
        return f"sampler {self.worker_index}"  # in Ray's messages

    def assert_healthy(self) -> None:
        assert self.env is not None, "the environment was not created"

    # --- sampling ----------------------------------------------------------------------------

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[MultiAgentBatch]:
        """RLlib's own call: one judged batch of at least so many completions (an episode and a
        step are the same here), from where the last such call ended."""
        if random_actions:
            raise ValueError(
                "random_actions=True must be False: random token ids are no text. "
                "Sample from the policy."
            )
        group = self.config.num_completions
        num_prompts = -(-(num_episodes or num_timesteps or self.env.num_envs) // group)
        explore = self.config.explore if explore is None else explore
        batch = self._serve(SampleRequest(self._position, num_prompts, group, explore))
        self._position += num_prompts
        self._log_samples(batch)
        rows = SampleBatch(batch.columns)
        return [MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=batch.num_rows)]

    def serve(
        self, request: SampleRequest, published: PublishedWeights
    ) -> JudgedBatch | SampleFailure:
        """Judged completions made with the published weights, on the CPU when this is an actor.

        An exception is returned as text: raised in an actor it would end it, and the driver
        would see a dead sampler instead of the reason.
        """
        if not self.worker_index:
            return self._serve_with(request, published)
        try:
            with self._listener:
                batch = self._serve_with(request, published)
            batch.messages = self._listener.take()
            return batch
        except Exception as error:  # noqa: BLE001  (the border of the process; raised by collect)
            return SampleFailure.from_exception(error)

    def _serve_with(self, request: SampleRequest, published: PublishedWeights) -> JudgedBatch:
        if self.engine is None or self.engine.takes_weights:
            self.weights.ensure(published, self._load_published)
        self.env.global_step = self.weights.version
        batch = self._serve(request)
        batch.columns[columns.WEIGHTS_VERSION] = torch.full(
            (batch.num_rows,), self.weights.version, dtype=torch.int64, device=self._device
        )
        batch.weights = self.weights.metrics()
        if self.worker_index and ray.is_initialized():
            batch.node = ray.get_runtime_context().get_node_id()
        make_callback(
            "on_sample_end",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_sample_end,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "samples": [batch]},
        )
        return batch.to("cpu") if self.worker_index else batch

    def _serve(self, request: SampleRequest) -> JudgedBatch:
        if self.module is None and self.engine is None:
            self.make_module()
        n = request.num_completions
        self.env.return_texts = request.return_texts
        observation, prompt_infos = self.env.reset(
            options={
                "position": request.position,
                "num_prompts": request.num_prompts,
                "num_completions": n,
            }
        )
        start = time.perf_counter()
        first = request.position * n
        row_ids = torch.arange(first, first + request.num_prompts * n)
        completions = self._generate(observation, request, row_ids)
        generated = time.perf_counter()
        _, rewards, _, _, infos = self.env.step(completions)
        judged = time.perf_counter()
        row_columns = {
            **observation,
            **completions,
            columns.SCORES: infos["scores"],
            columns.VALID: infos["valid"],
            columns.PROMPT_INDEX: prompt_infos["prompt_index"],
            columns.ROW_ID: row_ids.to(rewards.device),
        }
        if "ref_logprobs" in infos:
            row_columns[columns.REF_LOGPROBS] = infos["ref_logprobs"]
        texts = {}
        if request.return_texts:
            texts = {"prompt": infos["prompt_texts"], "completion": infos["completion_texts"]}
        return JudgedBatch(
            columns=row_columns,
            rewards=rewards,
            components=infos["components"],
            metrics=infos["metrics"],
            texts=texts,
            timings={"generate_seconds": generated - start, "judge_seconds": judged - generated},
        )

    def _generate(
        self, observation: dict[str, torch.Tensor], request: SampleRequest, row_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        policy = self.built_module() if self.engine is None else self.engine
        return generate_completions(policy, self.config, observation, request, row_ids)

    # --- RLlib's side ------------------------------------------------------------------------

    def _log_samples(self, batch: JudgedBatch) -> None:
        for name in (NUM_ENV_STEPS_SAMPLED, NUM_EPISODES):
            self.metrics.log_value(name, batch.num_rows, reduce="sum")
        self.metrics.log_value(
            NUM_ENV_STEPS_SAMPLED_LIFETIME, batch.num_rows, reduce="lifetime_sum"
        )
        self.metrics.log_value(EPISODE_RETURN_MEAN, float(batch.rewards.mean()), window=1)

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics.reduce()

    def get_state(self, components=None, *, not_components=None, **kwargs) -> StateDict:
        """Weights only: all else is a function of the request."""
        if not self._check_component(COMPONENT_RL_MODULE, components, not_components):
            return {}
        if self.engine is not None:
            return {}  # it has no weights but those that come with a request
        weights = self.built_module().get_state(inference_only=True)
        if self._loader.is_aliased:  # pickled, each view would take the whole buffer along
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        return {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: weights}}

    def set_state(self, state: StateDict) -> None:
        if COMPONENT_RL_MODULE not in state:
            return
        weights = state[COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
        if self.engine is not None:
            if self.engine.takes_weights:
                self.engine.load_weights(weights)
        elif self.module is None:
            self._pending_state = weights
        else:
            self._loader.own_memory(self.module)
            self.module.set_state(weights)

    def _load_published(self, flat: FlatBuffer) -> None:
        if self.engine is not None:
            self.engine.load_weights(unpack(flat))
            return
        self._loader.load(self.built_module(), flat)

    def differing_weights(self, published: PublishedWeights) -> tuple[int, list[str]]:
        """This sampler's index, and the names of parameters that are not as published; the error
        in their place where the published ones cannot be had."""
        if self.engine is not None or not published.ref:
            return self.worker_index, []
        try:
            self.weights.ensure(published, self._load_published)
            published_bytes = self.weights.published_bytes()
            return self.worker_index, differing(self.built_module(), published_bytes)
        except WeightsLostError as error:
            return self.worker_index, [str(error)]

    def get_ctor_args_and_kwargs(self):
        return (), {
            "config": self.config,
            "worker_index": self.worker_index,
            "num_workers": self.num_workers,
        }

    def get_checkpointable_components(self):
        return []

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.env.close()
