"""Failures of samplers: their causes, how they reach the driver, and counts of recoveries.

Without torch, as the ledger's process, which is to be back soon after it was killed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray.exceptions import RayError

from rllib_llm.shared.messages import short_traceback
from rllib_llm.shared.remote import ServerError
from rllib_llm.weights.published import WeightsLostError


class BrokenSamplerError(RuntimeError):
    """A bug in code that samplers run, such as a reward function; retrying does not help."""


class NoSamplersError(RuntimeError):
    """All samplers are gone and none came back in time."""


@dataclass(frozen=True)
class SampleFailure:
    """An exception raised while a request was served, as text that survives any process.

    may_pass: whether asking again can help: a network, a disk or Ray failed, not the code.
    weights_lost: the published weights are gone; asking again helps once they are published anew.
    lost_key: the publication whose bytes these are; empty where that is not known.
    no_server: the server that generates was asked as often as it may be.
    """

    error: str
    traceback: str
    may_pass: bool = False
    weights_lost: bool = False
    lost_key: str = ""
    no_server: bool = False

    @classmethod
    def from_exception(cls, error: BaseException) -> SampleFailure:
        return cls(
            f"{type(error).__name__}: {error}",
            short_traceback(error),
            may_pass=_may_pass(error),
            weights_lost=isinstance(error, WeightsLostError),
            lost_key=getattr(error, "key", ""),
            no_server=isinstance(error, ServerError),
        )


def _may_pass(error: BaseException | None) -> bool:
    """Whether the exception, or its cause, is external and may pass.

    What was merely being handled when it was raised says nothing: a bug may lie in the lines that
    handle a lost connection.
    """
    while error is not None:
        if isinstance(error, (OSError, RayError)):  # OSError: timeouts and connections as well
            return True
        error = error.__cause__
    return False


@dataclass
class Faults:
    """Counts since this process started; reported under `faults/`.

    sampler_restarts: samplers that came back, evaluation's included.
    samplers_hung: of them, those that were killed for their silence.
    requests_retried: requests given to another sampler, or to the same after its restart.
    seconds_lost: seconds that samplers spent on requests which they did not answer.
    evaluations_skipped: evaluations without results because no evaluation sampler came back, or
        their server gave no answer.
    """

    sampler_restarts: int = 0
    samplers_hung: int = 0
    requests_retried: int = 0
    seconds_lost: float = 0.0
    evaluations_skipped: int = 0

    def metrics(self) -> dict[str, float]:
        return dict(vars(self))
