"""One batch of completions from whatever samplers are alive, each prompt answered exactly once."""

from __future__ import annotations

import functools
import logging
import time

from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.sampling.request import JudgedBatch, SampleFailure, SampleRequest, concatenate
from rllib_llm.weights.broadcast import PublishedWeights

logger = logging.getLogger(__name__)

MAX_ROUNDS_WITHOUT_PROGRESS = 3  # in which samplers were asked and all of them died
MAX_SECONDS_WITHOUT_SAMPLERS = 120.0  # a restarted one first imports everything and loads models
SECONDS_BETWEEN_PROBES = 1.0


class SamplingError(RuntimeError):
    """No sampler can serve the request; the message carries the first sampler's traceback."""


def collect(
    group: EnvRunnerGroup, request: SampleRequest, published: PublishedWeights
) -> JudgedBatch:
    """The judged completions of `request`, ordered by position, however many samplers there are.

    The prompts are cut into one contiguous part per healthy sampler. A part whose sampler died is
    given to another, which makes the same completions.

    Raises:
        SamplingError: a sampler reported an exception, all died several times in a row, or none
            came back in two minutes.
    """
    if group.num_remote_env_runners() == 0:
        return group.local_env_runner.serve(request, published)
    pending = [(0, request.num_prompts)]
    done: dict[int, JudgedBatch] = {}
    lost_rounds, last_seen = 0, time.monotonic()
    while pending:
        workers = group.healthy_worker_ids()
        if workers:
            answers, pending = _ask_all(group, workers, request, pending, published)
            done.update(answers)
            lost_rounds = 0 if answers else lost_rounds + 1
            last_seen = time.monotonic()
        else:
            time.sleep(SECONDS_BETWEEN_PROBES)
        _require_progress(group, lost_rounds, time.monotonic() - last_seen)
        if pending:
            group.probe_unhealthy_env_runners(timeout_seconds=SECONDS_BETWEEN_PROBES)
    return concatenate([done[start] for start in sorted(done)])


def _require_progress(group: EnvRunnerGroup, lost_rounds: int, waited: float) -> None:
    if lost_rounds < MAX_ROUNDS_WITHOUT_PROGRESS and waited < MAX_SECONDS_WITHOUT_SAMPLERS:
        return
    reason = f"all that were asked died, {lost_rounds} times in a row"
    if lost_rounds < MAX_ROUNDS_WITHOUT_PROGRESS:
        reason = f"none came back in {waited:.0f} s"
    raise SamplingError(
        f"num_healthy_samplers={group.num_healthy_remote_workers()} must be at least 1: {reason}. "
        "Look for the reason in the workers' logs (out of memory is common), and raise "
        "max_num_env_runner_restarts."
    )


def _ask_all(
    group: EnvRunnerGroup,
    workers: list[int],
    request: SampleRequest,
    pending: list[tuple[int, int]],
    published: PublishedWeights,
) -> tuple[dict[int, JudgedBatch], list[tuple[int, int]]]:
    """Answers by start of their part, and the parts that are still without one."""
    parts = _deal(pending, len(workers))
    busy, waiting = parts[: len(workers)], parts[len(workers) :]
    workers = workers[: len(busy)]
    # One call per sampler, with its own part; the group drops the answers of those that died.
    calls = [functools.partial(_serve, start=s, part=request.part(s, n), published=published)
             for s, n in busy]
    answers: dict[int, JudgedBatch] = {}
    for start, answer in group.foreach_env_runner(
        calls, remote_worker_ids=workers, local_env_runner=False, timeout_seconds=None
    ):
        if isinstance(answer, SampleFailure):
            raise SamplingError(f"{answer.error}\n\nIn the sampler:\n{answer.traceback}")
        answers[start] = answer
    lost = [part for part in busy if part[0] not in answers]
    if lost:
        logger.warning("%d of %d samplers gave no answer; their prompts are sampled again.",
                       len(lost), len(busy))
    return answers, lost + waiting


def _serve(
    runner, *, start: int, part: SampleRequest, published: PublishedWeights
) -> tuple[int, JudgedBatch | SampleFailure]:
    return start, runner.serve(part, published)


def _deal(pending: list[tuple[int, int]], num_workers: int) -> list[tuple[int, int]]:
    """The first part cut as evenly as it goes when there are fewer parts than samplers."""
    if len(pending) != 1 or num_workers == 1:
        return pending
    start, total = pending[0]
    num_parts = min(num_workers, total)
    bounds = [start + total * i // num_parts for i in range(num_parts + 1)]
    return [(low, high - low) for low, high in zip(bounds, bounds[1:], strict=False)]
