"""Work on a CUDA device recorded once, and launched again and again as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class CudaGraph:
    """A recorded function. What it read and wrote, at which addresses and in which shapes, is what
    each replay reads and writes: its inputs are changed in place, and it may not wait for the
    device.

    Args:
        function: called twice, once to warm up (libraries make their workspaces, kernels are
            loaded) and once to be recorded; the second call computes nothing.
        previous: a graph whose memory this one may use, since it will not be replayed again.
        device: the CUDA device of all its tensors.
    """

    def __init__(
        self,
        function: Callable[[], torch.Tensor],
        previous: CudaGraph | None,
        device: torch.device,
    ) -> None:
        with torch.cuda.device(device):
            stream = _recording_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # `thread_local`: what other threads of the process (weights that arrive) do meanwhile
            # on the device is no part of the recording and must not break it.
            with torch.cuda.graph(
                self._graph,
                pool=None if previous is None else previous._graph.pool(),
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._result = function()

    def replay(self) -> torch.Tensor:
        """The function's result, overwritten by the next replay."""
        self._graph.replay()
        return self._result


@functools.cache
def _recording_stream(device_index: int) -> torch.cuda.Stream:
    """One per device, since cuBLAS keeps a workspace for every stream that it has worked on."""
    return torch.cuda.Stream(device_index)
