"""What `torch.cuda` says and does where there is a pretend GPU.

Streams do their work at once, in order; a graph is a list of steps that are done again.
"""

from __future__ import annotations

import contextlib
import types
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import torch

UUID = "GPU-9c5b94b1-35ad-49bb-b118-8e8fc24abf80"


class Stream:
    """A queue of work that is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        _gpu().wait()

    def query(self) -> bool:
        return True


class Event:
    """A place in a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream or current_stream()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return not _gpu().on_the_way

    def synchronize(self) -> None:
        _gpu().wait()


_streams = [Stream()]


def current_stream(device: Any = None) -> Stream:
    return _streams[-1]


@contextlib.contextmanager
def stream(new: Stream | None) -> Iterator[None]:
    _streams.append(new or _streams[-1])
    try:
        yield
    finally:
        _streams.pop()


class CUDAGraph:
    """Operators that were asked for between begin and end, done again by `replay`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[Any] = []
        self.is_complete = False

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def replay(self) -> None:
        assert self.is_complete, "replayed before it was captured"
        _gpu().calls["replay"] += 1
        for step in self.steps:
            step()


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: Any = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    from tests.device import pretend

    assert capture_error_mode in ("global", "thread_local", "relaxed")
    if stream is not None and stream is _streams[0]:
        raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
    _gpu().calls["capture"] += 1
    with pretend.capturing(cuda_graph.steps), _on(stream or Stream()):
        yield
    cuda_graph.is_complete = True


_on = stream


class device:  # noqa: N801  (torch's name)
    """`with torch.cuda.device(d):`"""

    def __init__(self, device: Any) -> None:
        _index(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass


def _index(device: Any) -> int:
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = device.index or 0
    if index != 0:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


class DeviceStorage:
    """The storage of a pretend tensor: the address is the host tensor's."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.device = torch.device("cuda", 0)
        self.is_cuda = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.raw, name)

    def __len__(self) -> int:
        return len(self.raw)


class TypedDeviceStorage:
    """As `torch.TypedStorage`, as far as sharing asks for it."""

    def __init__(self, untyped: DeviceStorage) -> None:
        self._untyped_storage = untyped
        self.is_cuda = True


_blocks: dict[str, Any] = {}  # shared memory of this process, by name


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple]:
    """As `torch.multiprocessing.reductions.reduce_tensor` of a CUDA tensor: its memory becomes one
    that other processes can map. Like CUDA IPC's it lives as long as this process holds it."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError("Cowardly refusing to serialize non-leaf tensor which requires_grad")
    block = shared_memory.SharedMemory(create=True, size=max(1, tensor.nbytes))
    _blocks[block.name] = block
    shared = torch.frombuffer(block.buf, dtype=torch.uint8)[: tensor.nbytes]
    shared.copy_(tensor.raw.reshape(-1).view(torch.uint8))
    tensor.raw.set_(shared.view(tensor.dtype).view(tensor.shape))
    return rebuild_cuda_tensor, (
        torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(),
        torch.storage.TypedStorage, tensor.dtype, tensor.device.index, block.name,
        tensor.nbytes, 0, tensor.requires_grad, uuid.uuid4().hex, 0, None, False,
    )  # fmt: skip


def rebuild_cuda_tensor(
    tensor_cls, tensor_size, tensor_stride, tensor_offset, storage_cls, dtype, storage_device,
    storage_handle, storage_size_bytes, storage_offset_bytes, requires_grad, ref_counter_handle,
    ref_counter_offset, event_handle, event_sync_required,
) -> torch.Tensor:  # fmt: skip
    """As torch's, with the same names of arguments."""
    from tests.device import pretend

    if storage_handle in _blocks:
        # cudaIpcOpenMemHandle in the process that made the handle
        raise RuntimeError("CUDA error: invalid resource handle")
    block = _opened.get(storage_handle)
    if block is None:
        try:
            block = shared_memory.SharedMemory(name=storage_handle, track=False)
        except TypeError:  # before Python 3.13 it is tracked, and removed with this process
            from multiprocessing import resource_tracker

            block = shared_memory.SharedMemory(name=storage_handle)
            resource_tracker.unregister(block._name, "shared_memory")
        _opened[storage_handle] = block
    raw = torch.frombuffer(block.buf, dtype=torch.uint8)[:storage_size_bytes]
    return pretend.PretendTensor(raw.view(dtype).as_strided(tensor_size, tensor_stride))


_opened: dict[str, Any] = {}


def is_pinned(gpu: Any, tensor: torch.Tensor) -> bool:
    """Whether a host tensor lies in page-locked memory."""
    if tensor.device.type != "cpu":
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(held.untyped_storage().data_ptr() == address for held in gpu.pinned)


class NoInferenceMode(torch.no_grad):
    """For `torch.inference_mode`, whose tensors cannot be wrapped."""

    def __new__(cls, mode: Any = True) -> Any:
        return super().__new__(cls)

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.mode = mode

    def __enter__(self) -> None:
        self.prev = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode and self.prev)

    def clone(self) -> NoInferenceMode:
        return type(self)(self.mode)


def _over_gloo(init: Any) -> Any:
    """Learners on GPUs add up by NCCL, which this build does not have."""

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init("gloo" if backend == "nccl" else backend, *args, **kwargs)

    return init_process_group


def _device_of_rllib(config, num_gpus_requested: int = 1):
    import torch  # its code takes the place of a function of another module

    return torch.device("cuda", 0) if num_gpus_requested > 0 else torch.device("cpu")


def _gpu() -> Any:
    from tests.device import pretend

    return pretend.the_gpu()


def replacements(gpu: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, what takes its place) of everything that is asked of a CUDA build."""

    def counted(name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            gpu.calls[name] += 1
            return result

        return call

    def synchronize() -> None:
        gpu.calls["synchronize"] += 1
        gpu.wait()

    def set_fraction(fraction: float, device: Any = None) -> None:
        _index(device)
        gpu.share = fraction

    properties = types.SimpleNamespace(
        name="Pretend GPU", total_memory=gpu.total, uuid=UUID, major=9, minor=0,
        multi_processor_count=132,
    )  # fmt: skip

    def of_device(value: Any) -> Any:
        def ask(device: Any = None) -> Any:
            _index(device)
            return value() if callable(value) else value

        return ask

    fakes = {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None if _index(device) == 0 else None,
        "device": device,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _streams[0],
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": of_device(lambda: (gpu.free, gpu.total)),
        "memory_reserved": of_device(lambda: gpu.reserved),
        "memory_allocated": of_device(lambda: gpu.allocated),
        "max_memory_allocated": of_device(lambda: gpu.allocated),
        "reset_peak_memory_stats": of_device(None),
        "get_per_process_memory_fraction": of_device(lambda: gpu.share),
        "set_per_process_memory_fraction": set_fraction,
        "empty_cache": counted("empty_cache"),
        "get_device_properties": of_device(properties),
        "get_device_name": of_device("Pretend GPU"),
        "get_device_capability": of_device((9, 0)),
        "manual_seed": counted("manual_seed"),
        "manual_seed_all": counted("manual_seed_all"),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state_all": lambda states: None,
    }  # fmt: skip
    reductions = torch.multiprocessing.reductions
    from ray.rllib.utils import framework

    return [
        *((torch.cuda, name, fake) for name, fake in fakes.items()),
        (torch._C, "_cuda_synchronize", synchronize),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),  # of who imports inductor
        (torch, "inference_mode", NoInferenceMode),
        (torch.distributed, "init_process_group", _over_gloo(torch.distributed.init_process_group)),
        # RLlib's says `torch.device(0)`, which is another type of device in this build.
        (framework.get_device, "__code__", _device_of_rllib.__code__),
        (reductions, "reduce_tensor", reduce_tensor),
        (reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor),
    ]
