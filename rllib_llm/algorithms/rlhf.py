"""The loop that every RLHF algorithm shares.

    prompts ─▶ samplers ─▶ judged completions ─▶ learners ─▶ new weights ─▶ samplers

`RLHF.training_step` is one turn: next batch, update, publish. Who waits for whom:

    training_step                       ledger                        sampler: SampleLoop.turn
    ─────────────                       ──────                        ────────────────────────
    rollouts.next ──── waits for ─────▶ a full batch ◀──── push ───── judges, in threads
    learn ──────────── waits for the learners                            ▲ a group's last row ended
    publish ──────────────────────────▶ admits groups ─── leases ───▶ step of the rows in flight
                       wakes samplers that wait for a lease; a push wakes the driver that waits

A synchronous run (`max_staleness=0`) is the ledger that admits one batch, once the weights that
sample it are published: driver and samplers wait for each other in turns. Where the sampler is in
this process there is one thread, and nobody is woken; nine hops lead to a token:

    training_step ─▶ RolloutSource.next ─▶ LocalWorker.work ─▶ SampleLoop.turn ─▶ Batches.step
      ─▶ Sampler.generate ─▶ ModulePolicy.generate ─▶ RLModule.forward_exploration
      ─▶ engines.engine.generate ─▶ Decoder.step

Samplers in actors take the same turns. `RemoteWorkers` looks who died, hangs, left or came back,
and ends the leases of those; how leases come to samplers is known to the ledger's transport alone.
They are dealt by the driver (`DealtLeases`), one to each (a call of `RLHFEnvRunner.serve`), which
waits for the first that answers, dies, or is too late. Or samplers pull them (`PulledLeases`) and
are at work while the learner trains (`max_staleness`, or `schedule="free"`): the ledger is an
actor, since nobody could ask a driver that learns, and a thread of each sampler's actor takes the
turns; five hops:

    SamplerThread ─▶ SampleLoop.turn ─▶ SingleRows.step ─▶ HotSwapEngine.step ─▶ TorchEngine.step
      ─▶ Decoder.step

It waits where nothing is in flight: for a lease, which `publish` and `push` bring, or for a judge.
What is admitted is the business of the ledger alone (`rollouts/ledger.py`): filters, over-sampling
and staleness change that. The settings are in `rlhf_config.py`; what an algorithm adds is in its
learner class.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS

from rllib_llm.algorithms.evaluation import open_eval_envs
from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.algorithms.language_model_config import frozen_with
from rllib_llm.algorithms.results import (
    log_as_rllib,
    of_environments,
    stored_rollouts,
    throughput,
    weights_metrics,
    with_sampling,
)
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.config.sampling import asks_a_server
from rllib_llm.modules.images import with_images
from rllib_llm.numerics.off_policy import age_metrics
from rllib_llm.overseer.phases import EVALUATING, LEARNING, PUBLISHING, WAITING
from rllib_llm.rollouts.errors import BrokenSamplerError, Faults
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.recorder import RolloutRecorder, SampleLog
from rllib_llm.rollouts.sampler_pool import SamplerActors, SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules, texts_are_due
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require
from rllib_llm.shared.ray_compat import local_learner
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.publisher import WeightsPublisher

if TYPE_CHECKING:
    from rllib_llm.algorithms.custom_loop import CustomLoop, Metrics, PendingCall
    from rllib_llm.algorithms.env_weights import EnvWeights
    from rllib_llm.rollouts.source import RolloutSource
    from rllib_llm.weights.flat_buffer import FlatBuffer

SECONDS_FOR_METRICS = 1.0  # that samplers have to give what callbacks have logged
PIPELINE_STATE = "rllib_llm"  # the algorithm's own share of its state


class RLHF(LanguageModelAlgorithm):
    """Samples, learns, publishes.

    Its own state is the weight version and that of the rollout source: the prompt position, and
    what is on its way where groups stream.
    """

    config: RLHFConfig
    config_class = RLHFConfig
    weights: WeightsPublisher

    def setup(self, config) -> None:
        self.weights_version = 0  # learner updates so far
        self.num_episodes = 0  # completions learnt from so far
        self._server: Any = None  # beside the run
        self._older_weights: tuple[int, FlatBuffer] | tuple[()] = ()  # to be published next
        self.faults = Faults()
        self.num_evaluations_skipped = 0  # in a row
        self._pools: dict[EnvRunnerGroup, SamplerPool] = {}
        self._held_out: dict[EnvRunnerGroup, RolloutSource] = {}
        self.evaluation_groups: dict[str, tuple[RLHFConfig, EnvRunnerGroup]] = {}
        self._setup_start = time.monotonic()
        if self.config.env_runner_cls is None:
            default = self.config.get_default_env_runner_class()
            self.config = frozen_with(self.config, env_runner_cls=default)
        try:
            super().setup(config)
        except IndexError:  # RLlib asked the first sampler for its spaces, without an answer
            SamplerPool(SamplerActors(self.env_runner_group), self.faults).require_built()
            raise

    def _set_up_metrics(self) -> None:
        """RLlib's last step before `on_algorithm_init`, which finds all parts open."""
        super()._set_up_metrics()
        if self.eval_env_runner_group is not None:
            self.evaluation_groups = open_eval_envs(self)
        own, named = self.env_runner_group, [group for _, group in self.evaluation_groups.values()]
        seconds, parts = time.monotonic() - self._setup_start, self.config.sampling_parts
        for group in (own, self.eval_env_runner_group, *named):
            if group is not None:
                num_parts = parts if group is own else None
                actors = SamplerActors(group)
                self._pools[group] = SamplerPool(actors, self.faults, seconds, num_parts)
        for pool in self._pools.values():
            pool.require_built()
        self.samples = SampleLog(self.trial_folder, self.config.env_names)
        self.env_weights: EnvWeights | None = None
        if (chosen := self.config.env_weights) is not None:
            from rllib_llm.algorithms.env_weights import EnvWeights  # few runs need it

            weights = self.config.weights_of_envs()
            self.env_weights = EnvWeights(chosen, self.config.env_names, weights)
        self.weights = self._open_weights()
        local = (group.local_env_runner for group in named)
        for runner in (self.env_runner, self.eval_env_runner, *local):
            if runner is not None:
                runner.sampler.phase = self.phase
                keeps_own = runner is self.env_runner and self.config.weights_publish_every > 1
                if self.learner_group.is_local and not keeps_own:
                    module = local_learner(self.learner_group).module[DEFAULT_MODULE_ID]
                    runner.share_module(module.unwrapped())
        self.recorder = RolloutRecorder()  # records nothing
        if self.config.store_rollouts:
            storage = getattr(self, "_storage", None)
            self.recorder = stored_rollouts(self.config, storage, self.trial_folder)
        num_prompts = self.config.num_prompts_per_iteration
        self._waits_for = f"sampling and judging completions of {num_prompts} prompts"
        self._env_names = self.config.env_names
        self.rollouts = self.make_rollouts()
        self._publish()
        self.learner_group.publish = self._publish
        if self.config.serve is not None:
            self._server = self.serve(**self.config.serve)

    def _open_weights(self) -> WeightsPublisher:
        """The publisher of the learners' weights to samplers, followers and servers."""
        config, background, push = self.config, None, None
        if (name := config.weights_name) is not None:  # few runs have one
            from rllib_llm.weights.background import BackgroundPublisher
            from rllib_llm.weights.coordinator import CoordinatorClient

            client = CoordinatorClient(name, keep=config.weights_keep, restarts_hung=True)
            background = BackgroundPublisher(client, checksum=config.weights_checksum)
        if config.weights_push:
            folder = Path(config.weights_push_folder or self.trial_folder / "pushed")
            from rllib_llm.weights.push import WeightsPush, open_servers  # few runs need it

            push = WeightsPush(
                open_servers(config.weights_push), folder, self.export_model, self.export_adapters
            )
        return WeightsPublisher(
            self.learner_group, checksum=config.weights_checksum, background=background, push=push,
            shared_module=self.learner_group.is_local
            and config.num_env_runners == 0
            and config.weights_publish_every == 1,
            transport=config.weights_transport, needs_epoch=asks_a_server(config),
            keeps=config.weights_publish_every > 1,
        )  # fmt: skip

    def make_rollouts(self) -> RolloutSource:
        """Where batches come from; algorithms that sample otherwise override it."""
        from rllib_llm.rollouts.source import open_rollouts

        config, replay = self.config, None
        if config.replay_groups:
            from rllib_llm.rollouts.replay import ReplayBuffer  # few runs need it

            replay = ReplayBuffer(
                num_groups=config.replay_groups, max_uses=config.replay_max_uses,
                capacity=config.replay_capacity or 4 * config.num_prompts_per_iteration,
                recency=config.replay_recency, seed=config.seed or 0, env_names=config.env_names,
            )  # fmt: skip
        return open_rollouts(
            self._pools[self.env_runner_group], self.env_runner, config.stream_rules(),
            config.serving_settings(), folder=self.trial_folder / "ledger",
            recorder=self.recorder, publish_again=self._publish_again,
            tell=lambda num_prompts: self.phase.progress(f"{num_prompts} are there"),
            replay=replay,
        )  # fmt: skip

    def training_step(self) -> None:
        if self.position == 0 and self.config.evaluation_interval and self.eval_metrics is None:
            self.evaluate()
        with self.phase(WAITING, self._waits_for):
            sampled = self.rollouts.next()
        self.tell(sampled.messages)
        self.learn(sampled)
        self._log(sampled)

    def learn(self, sampled: JudgedBatch) -> None:
        """Updates the learners and publishes their weights."""
        with self.phase(LEARNING, f"learning from {sampled.num_rows} rows"):
            given = with_images(sampled.columns, self._images_at)
            report = self.update_learners(given, sampled.num_rows, self.weights_version)
            self._record_trained(sampled, report)
        self.of_envs = of_environments(self._env_names, sampled.fresh, self.weights_version)
        env_weights = None if self.env_weights is None else self.env_weights.after(self.of_envs)
        with self.phase(PUBLISHING):
            self.publish_next(env_weights, self.config.weights_publish_every)

    def publish_next(
        self, env_weights: tuple[float, ...] | None = None, every: int = 1
    ) -> None:  # fmt: skip
        """Publishes the weights under the next version, if that is an `every`-th one.
        `env_weights`: of the environments, for the groups that are sampled from now on."""
        self.weights_version += 1
        if self.weights_version % every == 0:
            self._publish(env_weights)
        else:
            self.rollouts.publish(self.weights.published, env_weights, self.weights_version)

    def add_gradients(self, sampled: JudgedBatch) -> None:
        """Adds the gradients of a batch on all learners; it is kept as one that was learnt from."""
        from rllib_llm.learners.rlhf_learner import RLHFLearner

        call = functools.partial(
            RLHFLearner.forward_backward, batch=with_images(sampled.columns, self._images_at),
            version=self.weights_version,
        )  # fmt: skip
        self._record_trained(sampled, self.foreach_learner(call))

    def _images_at(self, positions: list[int], number: int) -> dict[str, Any]:
        """Columns of what prompts of an environment show, as a sampler that opens it reads them."""
        pool = self._pools[self.env_runner_group]
        if pool.num_samplers:
            among = self.config.samplers_of_envs()[number]
            return pool.ask("images_at", positions, number, among=among)
        return self.env_runner.images_at(positions, number)

    # --- its steps in a custom loop, see `custom_loop.py` ---------------------------------

    @functools.cached_property
    def custom_loop(self) -> CustomLoop:
        """Its calls."""
        from rllib_llm.algorithms.custom_loop import CustomLoop  # few programs need it

        return CustomLoop(self)

    def next_batch(self) -> PendingCall[JudgedBatch]:
        """The batch to be learnt from next."""
        return self.custom_loop.begin(self.rollouts.next)

    def submit(self, batch: JudgedBatch) -> PendingCall[Metrics]:
        """Learns from a batch and publishes the weights; the learners' metrics by group."""
        return self.custom_loop.begin_learning(self.learn, batch)

    def forward_backward(self, batch: JudgedBatch) -> PendingCall[Metrics]:
        """Adds a batch's gradient to what `optimizer_step` takes: the whole batch at once, each
        row once; the learners' metrics by group."""
        return self.custom_loop.begin_learning(self.add_gradients, batch)

    def optimizer_step(self) -> PendingCall[Metrics]:
        """Takes an optimiser step with the gradients added up; its metrics by group."""
        from rllib_llm.learners.rlhf_learner import RLHFLearner

        return self.custom_loop.begin_learning(self.foreach_learner, RLHFLearner.optimizer_step)

    def publish_weights(self) -> PendingCall[None]:
        """Gives samplers the weights as they are; the next batch is one version later."""
        return self.custom_loop.begin(self.publish_next)

    def _record_trained(self, sampled: JudgedBatch, report: dict[str, Any]) -> None:
        """Counts the batch, and stores it with the first learner's advantages."""
        self.num_episodes += sampled.fresh.num_rollouts
        if not self.config.store_rollouts:
            return
        found = {name: report[name] for name in (columns.ADVANTAGES,) if name in report}
        sampled = sampled.to("cpu")  # where the advantages are
        sampled = dataclasses.replace(sampled, columns=sampled.columns | found)
        self.recorder.record(sampled.fresh, "trained", iteration=self.weights_version + 1)

    @property
    def position(self) -> int:
        """Prompt groups learnt from so far."""
        return self.rollouts.position

    def _publish(self, env_weights: tuple[float, ...] | None = None) -> None:
        # The same version may mean other weights after a restore: every sampler loads them.
        older, self._older_weights = self._older_weights, ()
        published = self.weights.publish(*(older or (self.weights_version,)))
        self.rollouts.publish(published, env_weights, self.weights_version)

    def sample_held_out(
        self, group: EnvRunnerGroup, num_prompts: int, settings: ServingSettings,
        env_weights: tuple[float, ...] = (1.0,),
    ) -> JudgedBatch:  # fmt: skip
        """Completions of the first prompts by a group of samplers, as `settings` say, made with the
        newest weights; `env_weights`: of their environments.

        Raises:
            BrokenSamplerError: none of them could be judged.
        """
        from rllib_llm.rollouts.source import open_rollouts

        pool = self._pools[group]
        shared_module = self.learner_group.is_local and not pool.num_samplers

        def newest() -> PublishedWeights:
            return self.weights.newest(self.weights_version, shared_module=shared_module)

        def publish_again(error: str) -> PublishedWeights:
            self._publish_again(error)
            return newest()

        if group not in self._held_out:
            rules = StreamRules(
                num_prompts, max_staleness=0, num_parts=max(1, pool.num_parts), texts_every=1,
                bounds_age=False, timeout_s=self.config.sampler_timeout_s, env_weights=env_weights,
            )  # fmt: skip
            self._held_out[group] = open_rollouts(
                pool, group.local_env_runner, rules, settings, folder=self.trial_folder,
                recorder=RolloutRecorder(), publish_again=publish_again,
            )  # fmt: skip
        batch = self._held_out[group].next_from(0, newest())
        self.tell(batch.messages)
        if batch.cause and not bool(batch.columns[columns.VALID].any()):
            raise BrokenSamplerError(batch.cause)
        return batch

    def _publish_again(self, error: str) -> PublishedWeights:
        published = self.weights.publish_again(error)
        self.rollouts.publish(published, step=self.weights_version)
        return published

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """As RLlib's, without its broadcast of the state: evaluation samplers get the weights with
        the request, as training's do, so that the whole model need not be copied to them twice.

        Raises:
            Problems: the algorithm was built without evaluation samplers.
        """
        config, group = self.config, self.eval_env_runner_group
        require(
            group is not None, "evaluation_interval", None, "be at least 1",
            "else there are no samplers for it", "Set it, large where only evaluate() is called",
        )  # fmt: skip
        when = "" if self.weights_version else " before training"
        activity = f"evaluating {config.evaluation_duration} completions{when}"
        options = {"algorithm": self, "metrics_logger": self.metrics}
        with self.phase(EVALUATING, activity):
            make_callback(
                "on_evaluate_start", self.callbacks, config.callbacks_on_evaluate_start,
                kwargs=options,
            )  # fmt: skip
            config.custom_evaluation_function(self, group)
            results = self.metrics.peek(EVALUATION_RESULTS, default={}, latest_merged_only=True)
            make_callback(
                "on_evaluate_end", self.callbacks, config.callbacks_on_evaluate_end,
                kwargs={**options, "evaluation_metrics": results},
            )  # fmt: skip
        return results

    def verify_weights(self) -> dict[int, list[str]]:
        """Parameters that are not bit for bit as published, by sampler; {} when all is well.

        For a look by hand: each sampler reads all its weights. Those in a vLLM engine's own layout
        are not compared, nor is the one sampler that uses the learner's module itself.
        """
        from rllib_llm.rollouts.env_runner import RLHFEnvRunner

        found = self.env_runner_group.foreach_env_runner(
            functools.partial(RLHFEnvRunner.differing_weights, published=self.weights.published),
            local_env_runner=False,
        )
        return {worker: names for worker, names in found if names}

    def serve(self, **settings: Any) -> Any:
        """Starts a server of the policy on this cluster that follows the run's weights. `settings`
        are those of `serving.deployment.serve`. Close the returned object to stop it.

        Raises:
            Problems: the run has no name for its weights.
        """
        # Here, since few runs need it, and it needs the extra `serve`.
        from rllib_llm.serving.deployment import serve

        config = self.config
        require(config.weights_name, "weights_name", None, "be a name",
                "a server finds the run's weights by it", "Set weights_name")  # fmt: skip
        given = {
            "name": config.weights_name, "weights_name": config.weights_name,
            "chat_template": config.chat_template, "template_settings": config.template_settings,
        }  # fmt: skip
        if config.lora is not None:
            given |= {"lora": config.lora, "quantization": config.quantization}
        return serve(config.given_model(), **{**given, **settings})

    def held_out_losses(self) -> dict[str, float]:
        """Held-out losses of the current weights, reported with an evaluation."""
        return {}

    # --- results -----------------------------------------------------------------------------

    def _log(self, batch: JudgedBatch) -> None:
        sampled, took = batch.fresh, self.phase.took
        seconds = {"sample": took[WAITING], "learn": took[LEARNING], "publish": took[PUBLISHING]}
        seconds["iteration"] = sum(seconds.values())
        ages: dict[str, float] = {}  # of all rows that were learnt from, where it is corrected for
        if self.config.off_policy is not None:
            versions = batch.columns[columns.WEIGHTS_VERSION]
            mask = columns.sampled_mask(batch.columns)
            ages = age_metrics(versions, mask, self.weights_version - 1)
        groups = with_sampling(self.learner_metrics(), sampled, self.weights_version - 1, ages)
        groups |= self.rollouts.metrics()
        groups["rollout_store"] = self.recorder.metrics()
        groups["weights"] = weights_metrics(
            self.weights.published, self.weights.metrics(), sampled, self.weights_version - 1
        )  # fmt: skip
        groups["throughput"] = throughput(sampled, seconds)
        groups["env"] |= self.of_envs
        for name in self._env_names:
            if (num := self.of_envs.get(f"{name}/episodes")) is not None:
                groups["env"][f"{name}/eps"] = num / seconds["iteration"]
        self.note(groups, self.num_episodes, sampled.num_rollouts / seconds["iteration"])
        log_as_rllib(self.metrics, sampled, groups["train"]["rewards"])
        self.log_callbacks(self.env_runner_group, ENV_RUNNER_RESULTS)
        if texts_are_due(self.weights_version - 1, self.config.log_samples_every):
            limit = self.config.num_logged_samples
            self.samples.write(sampled, iteration=self.iteration + 1, split="train", limit=limit)

    def log_callbacks(self, group: EnvRunnerGroup, key: str | tuple[str, ...]) -> None:
        """Logs under `key` what callbacks have logged in samplers; of busy ones, with a later
        result."""
        config = self.config
        functions = config.callbacks_on_sample_end or config.callbacks_on_environment_created
        if config.callbacks_class is RLlibCallback and not functions:
            return
        group.foreach_env_runner_async("get_metrics", tag="metrics")
        found = group.fetch_ready_async_reqs(tags="metrics", timeout_seconds=SECONDS_FOR_METRICS)
        logged = [metrics for _, metrics in found]
        if group.local_env_runner is not None:
            logged.append(group.local_env_runner.get_metrics())
        self.metrics.aggregate(logged, key=key)

    def step(self) -> dict[str, Any]:
        """With what samplers suffered; no held-out results but the latest."""
        results = super().step()
        results["faults"] = self.faults.metrics()
        if self.eval_metrics is None:  # the last evaluation was skipped: RLlib shows the one before
            results.get(EVALUATION_RESULTS, {}).pop(ENV_RUNNER_RESULTS, None)
        return results

    # --- samplers ----------------------------------------------------------------------------

    def scale_samplers(self, num_samplers: int) -> str:
        """Sets the number of samplers between two iterations; does not change what is learnt."""
        require(not any(self.config.samplers_of_envs()), "samplers", num_samplers,
                "be left as they are", "environments have samplers of their own",
                "Leave num_env_runners out of envs")  # fmt: skip
        pool = self._pools[self.env_runner_group]
        # Where groups stream, idle samplers lease them.
        return pool.scale(num_samplers, at_most=None if self.config.streams else pool.num_parts)

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Ids of the samplers that came back. The others are not waited for, and nothing has to be
        restored: a request brings the weights with it."""
        return self._pools[env_runner_group].pop_revived()

    def cleanup(self) -> None:
        if "custom_loop" in vars(self):
            self.custom_loop.stop()
        if self._server is not None:
            self._server.close()
        self.rollouts.stop()
        self.recorder.stop()
        self.weights.stop()
        for pool in self._pools.values():
            pool.actors.stop()
        super().cleanup()

    # --- state -------------------------------------------------------------------------------

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        state[PIPELINE_STATE] = {
            "weights_version": self.weights_version, "eval_metrics": self.eval_metrics,
            "num_episodes": self.num_episodes, **self.rollouts.state(),
            "recorded": self.recorder.state(),
            "env_weights": self.env_weights and self.env_weights.get_state(),
        }  # fmt: skip
        published = self.weights.published.version
        if published != self.weights_version:  # samplers go on with what the learners have no more
            state[PIPELINE_STATE]["published"] = published, self.weights.kept
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        with self.learner_group.setting_weights():
            super().set_state(state)
            if (own := state.get(PIPELINE_STATE)) is not None:
                self.weights_version = own["weights_version"]
                self.eval_metrics = own["eval_metrics"]
                older = own.get("published", ())
                age = self.weights_version - older[0] if older else 0
                if age < self.config.weights_publish_every:
                    self._older_weights = older
                self.rollouts.set_state(own)
                of_older = self.position * self.config.num_completions  # whose state has no count
                self.num_episodes = own.get("num_episodes", of_older)
                self.recorder.set_state(own.get("recorded", {}))
                if self.env_weights is not None and own.get("env_weights"):
                    self.env_weights.set_state(own["env_weights"])

    def about(self) -> dict[str, Any]:
        """Adds the version of the weights."""
        return super().about() | {"weights_version": self.weights_version}
