"""Why samplers could not serve a request."""

from __future__ import annotations


class SamplingError(RuntimeError):
    """No sampler can serve the request; the message carries the first sampler's traceback."""


class BrokenSamplerError(SamplingError):
    """What samplers run has a bug, a reward function say: asking again does not help."""


class PublishedWeightsLostError(SamplingError):
    """A sampler could not get the weights that it was asked to sample with."""


class NoServerError(SamplingError):
    """The server that generates for the samplers gave no answer, however often it was asked."""


class NoSamplersError(SamplingError):
    """All samplers are gone and none came back in time."""
