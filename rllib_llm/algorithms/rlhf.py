"""The loop that every RLHF algorithm shares.

    prompts ─▶ samplers ─▶ judged completions ─▶ learners ─▶ new weights ─▶ samplers

`RLHF.training_step` is one turn. With `pipeline_depth=1` the samplers make the next batch while the
learners learn from this one. The settings are in `rlhf_config.py`; what an algorithm adds is in its
learner class.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
)

from rllib_llm import columns
from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.ray_compat import local_learner
from rllib_llm.rollouts.ahead import RequestInFlight
from rllib_llm.rollouts.collect import Collector
from rllib_llm.rollouts.env_runner import RLHFEnvRunner
from rllib_llm.rollouts.errors import PublishedWeightsLostError, SamplingError
from rllib_llm.rollouts.faults import Faults
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.rollouts.samplers import Samplers, stop_samplers
from rllib_llm.tune.samples import SampleLog
from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.broadcast import WeightsPublisher
from rllib_llm.weights.coordinator import CoordinatorClient

logger = logging.getLogger(__name__)

PIPELINE_STATE = "rllib_llm"  # the algorithm's own share of its state
MAX_SECONDS_TO_STOP = 60.0  # that the end of a run waits for a request in flight


class RLHF(LanguageModelAlgorithm):
    """Samples, learns, publishes.

    Its own state is the prompt position, the weight version and, with `pipeline_depth=1`, the batch
    sampled ahead: saving waits for it, and a restored run learns from that very batch.
    """

    config: RLHFConfig

    @classmethod
    def get_default_config(cls) -> RLHFConfig:
        return RLHFConfig(algo_class=cls)

    def setup(self, config) -> None:
        self.position = 0  # prompt groups handed out so far
        self.weights_version = 0  # learner updates so far
        self.faults = Faults()
        self.num_evaluations_skipped = 0  # in a row
        start = time.monotonic()
        self._in_flight: RequestInFlight | None = None  # the next batch, being sampled
        try:
            super().setup(config)
        except IndexError:  # RLlib asked the first sampler for its spaces, and nobody answered
            Samplers(self.env_runner_group, self.faults).require_built()
            raise
        self._collectors = self._make_collectors(time.monotonic() - start)
        for collector in self._collectors.values():
            collector.samplers.require_built()
        self.samples = SampleLog(self.trial_folder)
        local = self.learner_group.is_local
        self._publisher = WeightsPublisher(
            self.learner_group,
            shared_module=local and self.config.num_env_runners == 0,
            checksum=self.config.weights_checksum,
            background=self._background_publisher(),
            transport=self.config.weights_transport,
        )
        if local:
            module = local_learner(self.learner_group).module[DEFAULT_MODULE_ID].unwrapped()
            for runner in (self.env_runner, self.eval_env_runner):
                if runner is not None:
                    runner.share_module(module)
        self.published_weights = self._publisher.publish(self.weights_version)

    def _background_publisher(self) -> BackgroundPublisher | None:
        """For receivers that this algorithm does not ask, if the run has a name for them."""
        config = self.config
        if config.weights_name is None:
            return None
        client = CoordinatorClient(
            config.weights_name, keep=config.weights_keep, restarts_hung=True
        )
        return BackgroundPublisher(client, checksum=config.weights_checksum)

    def training_step(self) -> None:
        if self.position == 0 and self.config.evaluation_interval and self.eval_metrics is None:
            self.doing(f"evaluating {self.config.evaluation_duration} completions before training")
            self.evaluate()
        start = time.perf_counter()
        num_rows = self.config.num_prompts_per_iteration * self.config.num_completions
        self.doing(f"sampling and judging {num_rows} completions")
        sampled = self._sample()
        self._sample_ahead()
        learn_start = time.perf_counter()
        self.doing(f"learning from {num_rows} completions")
        self.update_learners(sampled.columns, sampled.num_rows)
        publish_start = time.perf_counter()
        self.position += self.config.num_prompts_per_iteration
        self.weights_version += 1
        self.published_weights = self._publisher.publish(self.weights_version)
        end = time.perf_counter()
        self._log(
            sampled,
            {
                "iteration": end - start,
                "sample": learn_start - start,
                "learn": publish_start - learn_start,
                "publish": end - publish_start,
            },
        )

    @property
    def num_iterations_done(self) -> int:
        """Iterations learnt so far, the current one included once its weights are published."""
        return self.weights_version

    def _sample(self) -> JudgedBatch:
        """All completions of this iteration, in the order of their prompts' positions."""
        batch = self._sampled()
        self.tell(batch.messages)
        return batch

    def _sampled(self) -> JudgedBatch:
        try:
            if self._in_flight is not None and self._in_flight.position == self.position:
                return self._in_flight.result()
            return self._collect(ahead=0)()
        except PublishedWeightsLostError as error:
            self._in_flight = None
            self._publish_again(error)
            return self._collect(ahead=0)()
        except SamplingError:
            self._in_flight = None  # whoever tries again asks anew
            raise

    def _sample_ahead(self) -> None:
        """Has remote samplers make the next batch while this one is learnt from."""
        self._in_flight = None
        if self.config.pipeline_depth and self.config.num_env_runners:
            position = self.position + self.config.num_prompts_per_iteration
            self._in_flight = RequestInFlight(position, self._collect(ahead=1))

    def _collect(self, *, ahead: int) -> Callable[[], JudgedBatch]:
        """Samples the batch `ahead` iterations from now, with the weights as they are now."""
        write = self.config.log_samples_every
        num_prompts = self.config.num_prompts_per_iteration
        request = SampleRequest(
            position=self.position + ahead * num_prompts,
            num_prompts=num_prompts,
            num_completions=self.config.num_completions,
            return_texts=bool(write) and (self.iteration + ahead) % write == 0,
        )
        collector = self._collectors[self.env_runner_group]
        return functools.partial(collector.collect, request, self.published_weights)

    def collect(self, group: EnvRunnerGroup, request: SampleRequest) -> JudgedBatch:
        """The answer of a group of samplers, made with the weights as they are published."""
        collector = self._collectors[group]
        try:
            batch = collector.collect(request, self.published_weights)
        except PublishedWeightsLostError as error:
            self._publish_again(error)
            batch = collector.collect(request, self.published_weights)
        self.tell(batch.messages)
        return batch

    def _publish_again(self, error: PublishedWeightsLostError) -> None:
        """Once: where they are lost again, something is wrong that this does not mend."""
        logger.warning("Weights %d are published again: %s", self.weights_version, error)
        self.published_weights = self._publisher.publish_again(self.weights_version)

    def verify_weights(self) -> dict[int, list[str]]:
        """Parameters that are not bit for bit as published, by sampler; {} when all is well.

        For a look by hand: each sampler reads all its weights. Those in a vLLM engine's own layout
        are not compared, nor is the one sampler that uses the learner's module itself.
        """
        found = self.env_runner_group.foreach_env_runner(
            functools.partial(RLHFEnvRunner.differing_weights, published=self.published_weights),
            local_env_runner=False,
        )
        return {worker: names for worker, names in found if names}

    def held_out_losses(self) -> dict[str, float]:
        """What an evaluation reports beside the judged completions, for the weights as they are."""
        return {}

    # --- results -----------------------------------------------------------------------------

    def _log(self, sampled: JudgedBatch, seconds: dict[str, float]) -> None:
        groups = self.learner_metrics()
        val = groups.setdefault("val", {})
        if "ratio_square" in val:  # absent until the loss of an iteration had a finite token
            val["ratio_var"] = max(0.0, val.pop("ratio_square") - val["ratio"] ** 2)
        groups["train"] |= sampled.train_metrics()
        scores = sampled.columns[columns.SCORES][sampled.columns[columns.VALID]]
        if len(scores) > 1:
            groups.setdefault("objective", {})["scores_std"] = float(scores.float().std())
        # Updates between the weights that sampled the batch and those that learnt from it.
        versions = sampled.columns[columns.WEIGHTS_VERSION].float()
        groups["train"]["staleness"] = self.weights_version - 1 - float(versions.mean())
        groups["env"] = sampled.env_metrics()
        groups["weights"] = {
            "version": self.published_weights.version,
            "publish_seconds": self.published_weights.publish_seconds,
            **self._publisher.metrics(),
            **sampled.weights_metrics(),
        }
        sampled_with = self.published_weights.version - 1  # published for the next iteration
        groups["weights"]["versions_behind"] = sampled_with - groups["weights"]["oldest_version"]
        num_tokens = int(sampled.columns[columns.COMPLETION_MASK].sum())
        groups["throughput"] = {
            "tokens_per_s": num_tokens / seconds["iteration"],
            "samples_per_s": sampled.num_rows / seconds["iteration"],
            **{f"{name}_seconds": value for name, value in seconds.items()},
            **sampled.timings,
        }
        lr = groups.pop("", {}).get("lr", 0.0)
        self.known_metrics = {
            **groups,
            "lr": lr,
            "episode": self.position * self.config.num_completions,
            "eps": sampled.num_rows / seconds["iteration"],
        }
        self._log_rllib_results(sampled)
        self.samples.write(
            sampled,
            iteration=self.iteration + 1,
            split="train",
            limit=self.config.num_logged_samples,
        )

    def _log_rllib_results(self, sampled: JudgedBatch) -> None:
        """RLlib's own names; an episode is one step long here."""
        num_rows = sampled.num_rows
        for name in (NUM_ENV_STEPS_SAMPLED, NUM_EPISODES):
            self.metrics.log_value((ENV_RUNNER_RESULTS, name), num_rows, reduce="sum")
        for name in (NUM_ENV_STEPS_SAMPLED_LIFETIME, NUM_EPISODES_LIFETIME):
            self.metrics.log_value((ENV_RUNNER_RESULTS, name), num_rows, reduce="lifetime_sum")
        returns = sampled.train_metrics()["rewards"]
        self.metrics.log_value((ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN), returns, window=1)

    def step(self) -> dict[str, Any]:
        """As of all algorithms, with what samplers suffered; no held-out results but the latest."""
        results = super().step()
        results["faults"] = self.faults.metrics()
        if self.eval_metrics is None:  # the last evaluation was skipped: RLlib shows the one before
            results.get(EVALUATION_RESULTS, {}).pop(ENV_RUNNER_RESULTS, None)
        return results

    # --- samplers ----------------------------------------------------------------------------

    def _make_collectors(self, start_seconds: float) -> dict[EnvRunnerGroup, Collector]:
        return {
            group: Collector(
                group,
                timeout_s=self.config.sampler_timeout_s,
                faults=self.faults,
                start_seconds=start_seconds,
            )
            for group in (self.env_runner_group, self.eval_env_runner_group)
            if group is not None
        }

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Ids of the samplers that came back. Nobody waits for the others, and nothing has to be
        restored: a request brings the weights with it."""
        return self._collectors[env_runner_group].samplers.pop_revived()

    def cleanup(self) -> None:
        if self._in_flight is not None:
            self._in_flight.wait(MAX_SECONDS_TO_STOP)
        self._publisher.stop()
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                stop_samplers(group)
        super().cleanup()

    # --- state -------------------------------------------------------------------------------

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        state[PIPELINE_STATE] = {
            "position": self.position,
            "weights_version": self.weights_version,
            "eval_metrics": self.eval_metrics,
            "in_flight": None if self._in_flight is None else self._in_flight.get_state(),
        }
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if PIPELINE_STATE in state:
            own = state[PIPELINE_STATE]
            self.position = own["position"]
            self.weights_version = own["weights_version"]
            self.eval_metrics = own["eval_metrics"]
            if self._in_flight is not None:
                self._in_flight.wait()  # its samplers are wanted
            self._in_flight = RequestInFlight.from_state(own.get("in_flight"))

    def restore_from_path(self, path, *args, **kwargs) -> None:
        super().restore_from_path(path, *args, **kwargs)
        # The same version may now mean other weights: every sampler must load them.
        self.published_weights = self._publisher.publish(self.weights_version)
