"""What went wrong among the samplers and was mended, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
        return asdict(self)
