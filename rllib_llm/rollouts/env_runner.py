"""RLlib's side of a sampler: its parts are made from the config, and its calls are answered.

A request names prompts by position, and a completion's randomness is a function of seed and
position. So a sampler has no state worth saving: any of them, new or restarted, gives the same
completions for the same request and weights.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import engine_class
from rllib_llm.envs.bandit import check_env_lengths
from rllib_llm.envs.registry import check_batched, make
from rllib_llm.overseer.phases import IDLE, STARTING, Phases
from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.judged_batch import JudgedBatch, SampleRequest
from rllib_llm.rollouts.policy import EVALUATION_SEED, EnginePolicy, ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.sample_loop import (
    MAX_SECONDS_OF_A_TURN,
    DealtLease,
    LocalLedger,
    SampleLoop,
    SamplerThread,
    stop_streaming,
)
from rllib_llm.rollouts.sampler import MixedSampler, Sampler, SamplingEnvironment
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import Listener
from rllib_llm.shared.process import keep_freed_memory, threads_for
from rllib_llm.weights.published import PublishedWeights

if TYPE_CHECKING:
    from rllib_llm.overseer.link import Link

# The samplers of environments derived from these classes; others have a plain `Sampler`.
SAMPLERS = {
    "rllib_llm.envs.adapters.agent.AgentEnv":
        "rllib_llm.rollouts.conversation_sampler.AgentSampler",
    "rllib_llm.envs.conversation.ConversationEnv":
        "rllib_llm.rollouts.conversation_sampler.ConversationSampler",
}  # fmt: skip


class RLHFEnvRunner(EnvRunner, Checkpointable):
    """EnvRunner for variable-length token actions, in the driver's process or a remote actor.

    It is the one place of a sampler that reads the config; `Sampler` does the work.
    """

    def __init__(self, *, config, **kwargs):
        # RLlib seeds every process, which would give all samplers the same global random state;
        # nothing here draws from it.
        super().__init__(config=config, **kwargs)
        self._position = 0  # of plain `sample()` calls only
        self.streamer: SamplerThread | None = None  # while groups stream
        self._calling_back = threading.Lock()
        classes = self.config.callbacks_class
        classes = classes if isinstance(classes, (list, tuple)) else [classes]
        self._callbacks = [cls() for cls in classes]
        num_gpus = self.config.num_gpus_per_env_runner
        if not self.worker_index:
            # The driver's own samples with the module of a learner in the same process; its
            # environment's frozen models belong on the same device.
            num_gpus = 0 if self.config.num_learners else self.config.num_gpus_per_learner
        self._device = get_device(self.config, num_gpus)
        self._phase = Phases(STARTING)
        self._link = self._open_link()
        self.listener = Listener(str(self))
        # The driver's process has another listener.
        with self.listener if self.worker_index else nullcontext():
            self._make_parts()

    def _open_link(self) -> Link | None:
        """Reports to the overseer of the run, where it has one."""
        overseer = getattr(self.config, "_overseer", None)
        if overseer is None or not self.worker_index:
            return None
        from rllib_llm.overseer.link import Link  # few runs are overseen

        folder, trial = overseer
        kind = "evaluation sampler" if self.config.in_evaluation else "sampler"

        def describe() -> dict[str, Any]:
            # Its models may be loading still.
            in_use = self.sampler.weights.in_use if hasattr(self, "sampler") else None
            facts = {"kind": "sampler", "trial": trial, "device": str(self._device)}
            version = None if in_use is None else in_use.version
            return {**facts, **self._phase.report(), "version": version}

        return Link(Path(folder), f"{kind} {self.worker_index} of trial {trial}", describe)

    def _make_parts(self) -> None:
        if self._device.type == "cpu":
            keep_freed_memory()
        self._configs = self.config.env_configs()
        self.make_env()
        if self.worker_index:  # the local one usually shares the learner's module
            torch.set_num_threads(threads_for(self.config.num_cpus_per_env_runner))
            share = self.config.num_gpus_per_env_runner
            if self._device.type == "cuda" and share < 1:  # others have the rest
                torch.cuda.set_per_process_memory_fraction(share, self._device)
        policy, samplers = self._make_policy(), dict[int, Sampler]()
        for i, (name, config) in enumerate(self._configs.items()):
            if name in self.envs:
                env = self.envs[name]
                names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(env).__mro__)
                path = next((SAMPLERS[name] for name in names if name in SAMPLERS), None)
                samplers[i] = (Sampler if path is None else import_dotted(path))(
                    SamplingEnvironment(env, self.worker_index, i if name else None), policy,
                    # Asked for with each request.
                    params=functools.cache(lambda explore, own=config: SamplingParams.of(
                        own, policy.pad_token_id, policy.stop_token_ids, greedy=not explore
                    )),
                    seed=(self.config.seed or 0) + EVALUATION_SEED * bool(config.in_evaluation),
                    name=str(self), phase=self._phase, on_judged=self._on_judged,
                )  # fmt: skip
        self.sampler = samplers[0] if "" in self.envs else MixedSampler(samplers)
        self._phase.outside(IDLE)

    # --- parts -------------------------------------------------------------------------------

    def make_env(self) -> None:
        """This sampler's replica of each environment that it opens and that has a weight, with its
        own frozen models."""
        opened = self.config.stream_rules().envs_of(str(self.worker_index))
        weights = [
            weight if not self.worker_index or opened is None or number in opened else 0.0
            for number, weight in enumerate(self.config.weights_of_envs())
        ]
        sharing: AbstractContextManager[None] = nullcontext()
        if self.config.envs:
            from rllib_llm.envs.frozen_models import sharing_models  # few runs need it

            sharing = sharing_models()
        with sharing:
            each = zip(self._configs.items(), weights, strict=True)
            self.envs = {name: self._made_env(own) for (name, own), weight in each if weight}
        self.env = next(iter(self.envs.values()))

    def _made_env(self, config: Any) -> Any:
        given = dict(config.env_config)
        for name in ("chat_template", "template_settings"):
            if getattr(config, name) is not None:
                given.setdefault(name, getattr(config, name))
        defaults: dict[str, Any] = {
            "model": config.pretrained_model,
            "max_completion_len": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": config.seed or 0,
            "device": str(self._device),
            "split": "eval" if config.in_evaluation else "train",
            "reference": None,
            "frozen_quantization": "bf16" if config.mixed_precision else "none",
            "frozen_products": config.float32_products,
        }
        # Else the learner has the reference. By default it is a copy of the policy.
        is_here = config.reference_place == "environment" and bool(config.ref_kl_coeff)
        if is_here and not config.in_evaluation:
            defaults["reference"] = {"model": config.pretrained_model}
        if config.distill_coeff and config.teacher_in == "environment" and not config.in_evaluation:
            defaults["teacher"] = config.teacher_settings
            defaults["teacher_top_k"] = config.teacher_top_k
        if config.in_evaluation:  # held-out prompts need no solutions
            given.pop("teacher_prompt", None)
        context = EnvContext({**defaults, **given}, self.worker_index, num_workers=self.num_workers)
        env = make(config.env, context)
        check_batched(env)
        env.keeps_parts = config.reward_aggregation == "normalize_then_sum"
        env.max_steps = config.planned_iterations or 0  # of a reward function that asks
        check_env_lengths(
            env, model=config.pretrained_model, max_new_tokens=config.max_new_tokens,
            chosen="max_prompt_len" in config.env_config,
        )  # fmt: skip
        self._call_back("on_environment_created", env=env, env_context=context)
        return env

    def _make_policy(self) -> SamplingPolicy:
        config = self.config
        if config.engine != "torch":
            kind = engine_class(config.engine)
            # The driver's own sampler may share the learner's module, and wants no second policy.
            if self.worker_index or not kind.takes_weights:
                return EnginePolicy(kind.of(config), config.pretrained_model)
        function = None
        if config.generate_function is not None:
            from rllib_llm.rollouts.generate_function import FunctionGenerator  # few runs need it

            named = import_dotted(config.generate_function, name="generate_function")
            function = FunctionGenerator(named)
        policy = ModulePolicy(
            self._make_module, max_rows=config.sampling_batch_size, cuda_graphs=config.cuda_graphs,
            alias=bool(self.worker_index),  # the learner's own may be written to
            is_pretrained=not self.worker_index, function=function,
        )  # fmt: skip
        if self.worker_index:
            policy.build()
        return policy

    def _make_module(self) -> RLModule:
        """The policy of this sampler, without critic, on its device."""
        spec = self.config.get_multi_rl_module_spec(
            spaces=self.get_spaces(), inference_only=True
        ).rl_module_specs[DEFAULT_MODULE_ID]
        return spec.build().to(self._device)

    def make_module(self) -> None:
        """RLlib's; the policy makes its module itself."""

    @property
    def policy(self) -> SamplingPolicy:
        """The generating policy."""
        return self.sampler.policy

    @property
    def module(self) -> RLModule | None:
        """The policy's module; None where an engine generates, or before it is made."""
        return self.policy.module if isinstance(self.policy, ModulePolicy) else None

    def images_at(self, positions: list[int], number: int = 0) -> dict[str, torch.Tensor]:
        """Columns of what the prompts at these positions of an environment show: samplers hand in
        rows alone. `number`: of several environments, which it is.

        Raises:
            Problems: the environment shows images, and does not say them again.
        """
        env = self.envs[[*self._configs][number]]
        require(hasattr(env, "images_at"), "env", type(env).__name__,
                "have images_at(positions) where it shows images")  # fmt: skip
        return env.images_at(positions)

    def share_module(self, module: RLModule) -> None:
        """Samples with `module`, the learner's in the same process; a separate engine is kept."""
        if isinstance(self.policy, ModulePolicy):
            self.policy.share(module)

    def get_spaces(self) -> dict[str, tuple]:
        spaces = (self.env.single_observation_space, self.env.single_action_space)
        return {"__env_single__": spaces, "__env__": spaces, DEFAULT_MODULE_ID: spaces}

    def __repr__(self) -> str:
        return f"sampler {self.worker_index}"  # in Ray's messages

    def assert_healthy(self) -> None:
        assert self.env is not None, "the environment was not created"

    # --- sampling ----------------------------------------------------------------------------

    def sample(
        self, *, num_timesteps: int | None = None, num_episodes: int | None = None,
        explore: bool | None = None, random_actions: bool = False, force_reset: bool = False,
    ) -> list[MultiAgentBatch]:  # fmt: skip
        """RLlib's own call: one judged batch of at least so many completions (an episode and a
        step are the same here), from where the last such call ended, with the weights of the last
        request or `set_state`.

        Raises:
            RuntimeError: it was never given any.
        """
        assert not random_actions, "random token ids are no text"
        number, group = next((i, own.num_completions) for i, (name, own)
                             in enumerate(self._configs.items()) if name in self.envs)  # fmt: skip
        num_prompts = -(-(num_episodes or num_timesteps or self.env.num_envs) // group)
        explore = self.config.explore if explore is None else explore
        request = SampleRequest(self._position, num_prompts, group, explore, env=number)
        batch = self.sampler.sample(request)
        self._position += num_prompts
        for name in (NUM_ENV_STEPS_SAMPLED, NUM_EPISODES):
            self.metrics.log_value(name, batch.num_rollouts, reduce="sum")
        self.metrics.log_value(
            NUM_ENV_STEPS_SAMPLED_LIFETIME, batch.num_rollouts, reduce="lifetime_sum"
        )
        self.metrics.log_value(EPISODE_RETURN_MEAN, batch.mean_reward(), window=1)
        rows = SampleBatch(batch.columns)
        return [MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=batch.num_rows)]

    def serve(self, lease: Lease, settings: ServingSettings) -> list[JudgedGroup] | SampleFailure:
        """The judged groups of a lease.

        An exception is returned as text: raised in an actor it would end it, and the driver
        would see a dead sampler instead of the reason.
        """
        dealt = DealtLease(lease)
        try:
            loop = SampleLoop(LocalLedger(dealt), self.sampler, settings)
            with self.listener, closing(loop):
                while loop.turn():
                    pass
            return dealt.groups
        except Exception as error:  # noqa: BLE001  (the border of the process; raised by the source)
            return SampleFailure.from_exception(error)

    def _on_judged(self, batch: JudgedBatch) -> JudgedBatch:
        """The batch as it leaves the sampler, after `on_sample_end`; in any thread."""
        if self.worker_index and ray.is_initialized():
            batch.node = ray.get_runtime_context().get_node_id()
        with self._calling_back:
            self._call_back("on_sample_end", samples=[batch])
        if not self.worker_index:
            return batch
        batch.messages = self.listener.take()
        return batch.to("cpu")

    def _call_back(self, name: str, **arguments: Any) -> None:
        arguments |= {"env_runner": self, "metrics_logger": self.metrics}
        functions = getattr(self.config, f"callbacks_{name}")
        make_callback(name, self._callbacks, functions, kwargs=arguments)

    # --- RLlib's side ------------------------------------------------------------------------

    def get_metrics(self) -> dict[str, Any]:
        with self._calling_back:
            return self.metrics.reduce()

    def get_state(self, components=None, *, not_components=None, **kwargs) -> StateDict:
        """Weights only: all else is a function of the request."""
        if not self._check_component(COMPONENT_RL_MODULE, components, not_components):
            return {}
        weights = self.policy.get_state()
        return {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: weights}} if weights else {}

    def set_state(self, state: StateDict) -> None:
        if COMPONENT_RL_MODULE in state:
            self.policy.set_state(state[COMPONENT_RL_MODULE][DEFAULT_MODULE_ID])

    def differing_weights(self, published: PublishedWeights) -> tuple[int, list[str]]:
        """This sampler's index, and the names of parameters that differ from the published ones; or
        the error if the published weights cannot be read. A stream is stopped for it, and asked for
        again by the driver a second later; it is compared with the version that it has, since its
        weights may be newer."""
        streamed = self.streamer is not None
        stop_streaming(self, MAX_SECONDS_OF_A_TURN)
        return self.worker_index, self.sampler.differing(None if streamed else published)

    def get_ctor_args_and_kwargs(self):
        names = ("config", "worker_index", "num_workers")
        return (), {name: getattr(self, name) for name in names}

    def get_checkpointable_components(self):
        return []

    def stop(self) -> None:
        if self._link is not None:
            self._link.close()
        stop_streaming(self)
        self.sampler.close()
