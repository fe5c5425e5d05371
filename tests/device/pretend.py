"""A pretend GPU for machines without one: tensors of device "cuda:0" that lie in host memory.

    with pretend.gpu() as gpu:
        x = torch.ones(3, device="cuda")
        x + torch.ones(3)       # RuntimeError: two devices, as on CUDA
        x.numpy()               # TypeError, as on CUDA
        gpu.transfers           # what went to the host and from there, and which line asked for it

Every operator of such a tensor is computed on the host by `_run`, after it has refused what CUDA
refuses. Nothing here is about speed, and nothing about kernels: results are those of the CPU.

    tensors     `PretendTensor`, a wrapper around the host tensor `raw`
    factories   `torch.zeros(..., device="cuda")` are registered with the dispatcher, key "CUDA"
    torch.cuda  streams, events, memory queries, graphs: `cuda_module.py`, while `gpu()` is open
    copies      to page-locked memory with `non_blocking` arrive when somebody waits for the device
    graphs      while one is captured nothing is computed; each replay runs the operators again

torch has to be a build without CUDA; with a real GPU the marker `gpu` has its own tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as any optimiser does; it looks at functions of torch that are replaced here
from torch.utils import _pytree as pytree

from rllib_llm.modules.llama_trunk import PLAIN_TENSORS
from tests.device import cuda_module

DEVICE = torch.device("cuda", 0)
# What torch's C++ takes the tensors for: autograd knows no CUDA in this build, and one other type.
_INNER = torch.device("privateuseone", 0)
_TYPES = ("cuda", "privateuseone", "pretend")
PACKAGE = "rllib_llm"
_NAME = "pretend"
_CUDA_SLOT, _PYTHON_SLOT = 1, 20  # of c10's table of device guards: CUDA, PrivateUse1
_NAME_OF_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
# Operators whose results have sizes or values that the host must know: on CUDA they wait.
_WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# Operators that take no number of the host either.
_STRICT = {
    "aten::stack", "aten::cat", "aten::gather", "aten::index_select", "aten::index_copy_",
    "aten::index_add_", "aten::scatter", "aten::scatter_", "aten::scatter_add_",
}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_foreach_copy_"}
_FACTORIES = {"aten::copy_", "aten::_copy_from"}  # reached without the Python key, too


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One copy between host and device, or one wait for the device."""

    kind: str  # "to_host", "to_device", "wait"
    num_bytes: int
    site: str  # "file:function" of the package's innermost frame
    waits: bool  # whether the host waits for all that the device was given before


class Gpu:
    """What the pretend GPU knows of itself."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.free, self.total = 60 * 1024**3, 80 * 1024**3
        self.reserved = self.allocated = 0
        self.share = 1.0
        # Tensors above this raise `torch.OutOfMemoryError`.
        self.largest_tensor: int | None = None
        self.largest_made = 0
        self.operators: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # of torch.cuda
        self.on_the_way: list[Callable[[], None]] = []  # copies that nobody has waited for
        self.pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def counted(self) -> dict[str, int]:
        """Number of transfers of each kind."""
        return dict(Counter(transfer.kind for transfer in self.transfers))

    def sites(self, kind: str) -> Counter[str]:
        """Number of transfers of that kind for each place in the package."""
        return Counter(transfer.site for transfer in self.transfers if transfer.kind == kind)

    def waits(self) -> Counter[str]:
        """Number of waits for the device of each place in the package."""
        return Counter(transfer.site for transfer in self.transfers if transfer.waits)

    def note(self, kind: str, num_bytes: int, waits: bool = True) -> None:
        self.transfers.append(Transfer(kind, num_bytes, _site(), waits))

    def wait(self) -> None:
        """The device has done all that it was given."""
        due, self.on_the_way = self.on_the_way, []
        for copy in due:
            copy()


_gpu: Gpu | None = None
_library: torch.library.Library | None = None
_guards: Any = None
_hook: Any = None
_capture = threading.local()  # .steps: of the graph that this thread captures


def the_gpu() -> Gpu:
    assert _gpu is not None, "pretend.gpu() is not open"
    return _gpu


class PretendTensor(torch.Tensor):
    """A tensor of the pretend GPU, around the host tensor that holds its numbers."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> PretendTensor:
        out = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, layout=raw.layout, requires_grad=False, device=_INNER,
        )  # fmt: skip
        out.raw = raw
        return out

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:
        return f"{self.raw!r} on {self.device}"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return DEVICE.index

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_inner(x) for x in args)
        return super().to(*args, **{name: _inner(value) for name, value in kwargs.items()})

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def tolist(self) -> Any:
        the_gpu().wait()
        the_gpu().note("to_host", self.raw.nbytes)
        _refuse_in_capture("tolist")
        return self.raw.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def untyped_storage(self) -> Any:
        return cuda_module.DeviceStorage(self.raw.untyped_storage())

    def _typed_storage(self) -> Any:
        return cuda_module.TypedDeviceStorage(self.untyped_storage())

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def is_pinned(self) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        memo[id(self)] = out = _rebuild(self.raw.detach().clone(), *_flags(self))
        if self.grad is not None:
            out.grad = self.grad.__deepcopy__(memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        the_gpu().note("to_host", self.raw.nbytes)
        return _rebuild, (self.raw.detach(), *_flags(self))


def _inner(x: Any) -> Any:
    """A device of CUDA as torch's C++ knows it here; everything else as it is."""
    if isinstance(x, PretendTensor):
        return x
    if isinstance(x, (str, torch.device)):
        device = torch.device(x)
        return _INNER if device.type == "cuda" and not device.index else x
    return x


def _flags(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def _rebuild(raw: torch.Tensor, requires_grad: bool, is_parameter: bool) -> PretendTensor:
    out = PretendTensor(raw)
    out.requires_grad_(requires_grad)
    if is_parameter:
        out._is_param = True
    return out


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator computed on the host tensors; refuses what CUDA refuses."""
    name = func._schema.name
    flat, _ = pytree.tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, PretendTensor)]
    hosts = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, PretendTensor)]
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if device.type in _TYPES and device.index:
            raise RuntimeError("CUDA error: invalid device ordinal")
    on_gpu = bool(ours) if device is None else device.type in _TYPES
    gpu = the_gpu()
    gpu.operators[name] += 1
    if name in _COPIES:
        _note_copy(gpu, name, args, on_gpu, bool(kwargs.get("non_blocking")))
    elif ours and hosts:
        _require_one_device(name, args, hosts)
    if name in _WAITS or _has_mask(name, args) or _is_unsized(name, kwargs):
        _refuse_in_capture(name)
        gpu.wait()
        if ours:
            gpu.note("to_host" if name == "aten::_local_scalar_dense" else "wait", 0)
    if name == "aten::_fused_sdp_choice":
        return 0  # the choice that consists of other operators
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}

    def compute() -> Any:
        return func(*pytree.tree_map(_raw, args), **pytree.tree_map(_raw, kwargs))

    if name == "aten::copy_" and _is_late(gpu, args):
        target, source = args[0], args[1].raw.clone()
        gpu.on_the_way.append(lambda: target.copy_(source))
        return target
    if name == "aten::_to_copy" and kwargs.get("non_blocking") and ours and not on_gpu:
        target, source = torch.zeros_like(compute()), compute()  # torch takes page-locked memory
        gpu.on_the_way.append(lambda: target.copy_(source))
        return target
    steps = getattr(_capture, "steps", None)
    is_captured = steps is not None and on_gpu
    result = _captured(func, compute, args, steps) if is_captured else compute()
    own = {id(x.raw): x for x in ours}

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or any(x is y for y in flat):
            return x
        if id(x) in own:
            return own[id(x)]
        if not on_gpu:
            return x
        gpu.largest_made = max(gpu.largest_made, x.untyped_storage().nbytes())
        if gpu.largest_tensor is not None and x.untyped_storage().nbytes() > gpu.largest_tensor:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return PretendTensor(x)

    return pytree.tree_map(wrap, result)


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, PretendTensor) else x


def _note_copy(gpu: Gpu, name: str, args: tuple, on_gpu: bool, late: bool = False) -> None:
    if name == "aten::_foreach_copy_":
        for target, source in zip(args[0], args[1], strict=True):
            _note_copy(gpu, "aten::copy_", (target, source), isinstance(target, PretendTensor))
        return
    if name == "aten::_to_copy":
        source, to_gpu = args[0], on_gpu
    elif name == "aten::_copy_from":
        source, to_gpu = args[0], isinstance(args[1], PretendTensor)
    else:
        source, to_gpu = args[1], isinstance(args[0], PretendTensor)
    from_gpu = isinstance(source, PretendTensor)
    if from_gpu and not to_gpu:
        _refuse_in_capture("a copy to the host")
        late = late or _is_late(gpu, args)
        if not late:
            gpu.wait()
        gpu.note("to_host", source.raw.nbytes, not late)
    elif to_gpu and not from_gpu and source.dim() > 0:
        _refuse_in_capture("a copy from the host")
        # The stream is waited for after `cudaMemcpyAsync`, unless the caller says otherwise.
        late = late or (len(args) > 2 and bool(args[2]))
        gpu.note("to_device", source.nbytes, not late)


def _is_late(gpu: Gpu, args: tuple) -> bool:
    """Whether `copy_` returns before the numbers are there: not blocking, to page-locked memory."""
    if len(args) < 3 or not args[2] or isinstance(args[0], PretendTensor):
        return False
    return cuda_module.is_pinned(gpu, args[0]) and isinstance(args[1], PretendTensor)


def _require_one_device(name: str, args: tuple, hosts: list[torch.Tensor]) -> None:
    """As CUDA: numbers of the host may go along (no dimensions), and the host's indices where the
    indexed tensor is on the device."""
    allowed: list[torch.Tensor] = []
    if name in _INDEXING and isinstance(args[0], PretendTensor):
        allowed = [x for x in args[1] if x is not None]
    wrong = [x for x in hosts if x.dim() > 0 or name in _STRICT]
    if any(not any(x is y for y in allowed) for x in wrong):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu! ({name})"
        )


def _has_mask(name: str, args: tuple) -> bool:
    """Whether an index is a mask, whose places have to be counted."""
    if name not in _INDEXING:
        return False
    masks = (torch.bool, torch.uint8)
    return any(isinstance(x, PretendTensor) and x.dtype in masks for x in args[1])


def _is_unsized(name: str, kwargs: dict[str, Any]) -> bool:
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None


def _refuse_in_capture(what: str) -> None:
    if getattr(_capture, "steps", None) is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


def _captured(func: Any, compute: Callable[[], Any], args: tuple, steps: list) -> Any:
    """What an operator gives while a graph is captured: memory without its numbers."""
    first = args[0] if args else None
    if func._schema.is_mutable:
        steps.append(compute)
        return _raw(first)
    result = compute()
    flat, _ = pytree.tree_flatten(result)
    memory = {x.raw.untyped_storage().data_ptr() for x in pytree.tree_leaves(args)
              if isinstance(x, PretendTensor)}  # fmt: skip
    fresh = [isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in memory
             for x in flat]  # fmt: skip

    def again() -> None:
        new, _ = pytree.tree_flatten(compute())
        for is_fresh, held, value in zip(fresh, flat, new, strict=True):
            if is_fresh:
                held.copy_(value)

    if any(fresh):
        steps.append(again)
        for is_fresh, held in zip(fresh, flat, strict=True):
            if is_fresh:
                held.zero_()
    return result


@contextlib.contextmanager
def capturing(steps: list) -> Iterator[None]:
    """What this thread asks of the device goes to `steps` and is not done."""
    _capture.steps = steps
    try:
        yield
    finally:
        _capture.steps = None


def _site() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parts:
            inside = path.parts[len(path.parts) - path.parts[::-1].index(PACKAGE) :]
            return f"{'/'.join(inside)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class _Module:
    """What torch asks of the type of device that its C++ takes pretend tensors for."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _gpu is not None

    def device_count(self) -> int:
        return int(_gpu is not None)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing: all its random numbers are the host's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing, as above."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Tells torch of the device: once for a process, harmless where no such tensor is made."""
    global _library, _guards, _hook
    if _library is not None:
        return
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA itself: tests marked gpu are for it")

    class Hook(torch._C._acc.PrivateUse1Hooks):
        """Autograd asks the accelerator that it runs on; it may not be CUDA in this build."""

        def is_available(self):
            return _gpu is not None

        def has_primary_context(self, index):
            return True

        def is_built(self):
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def __init__(self, device_type):
            super().__init__()
            self.device_type = device_type

        def type_(self):
            return self.device_type

    torch.utils.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _Module())
    # torch lets Python make a guard for one type of device only, PrivateUse1, and takes the first.
    # Made as CUDA's it goes to CUDA's place in the table, and another one takes its own.
    types = torch._C._autograd.DeviceType
    _guards = Guard(types.CUDA), Guard(types.PrivateUse1)
    c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    table = (ctypes.c_void_p * (_PYTHON_SLOT + 1)).in_dll(c10, _NAME_OF_TABLE)
    torch._C._acc.register_python_privateuseone_device_guard(_guards[0])
    table[_CUDA_SLOT] = table[_PYTHON_SLOT]
    torch._C._acc.register_python_privateuseone_device_guard(_guards[1])
    _hook = Hook()
    torch._C._acc.register_python_privateuseone_hook(_hook)
    _library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if func is None or torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        ):
            continue
        arguments = func._schema.arguments
        makes = any(a.name == "device" for a in arguments) and not any(
            "Tensor" in str(a.type) for a in arguments
        )
        if makes or name in _FACTORIES:
            for key in ("CUDA", "PrivateUse1"):
                _library.impl(name, _kernel(func), key)


def _kernel(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, which may move the tensor to another device."""
    mine, others = isinstance(self, PretendTensor), isinstance(value, PretendTensor)
    if mine and others:
        self.raw = value.raw
        _BASE_DATA.__set__(self, value)
    elif mine or others:
        new = torch.nn.Parameter(value.detach(), requires_grad=False)
        (requires_grad, is_parameter), grad = _flags(self), self.grad
        if not is_parameter:
            new = value.detach()
        torch.utils.swap_tensors(self, new)
        self.requires_grad_(requires_grad)
        if grad is not None:  # `module.to` moves it next
            self.grad = grad.to(value.device)
    else:
        _BASE_DATA.__set__(self, value)


_BASE_DATA = torch._C.TensorBase.data


def _pin(gpu: Gpu, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if pin_memory:
            assert made.device.type == "cpu", "only dense CPU tensors can be pinned"
            gpu.pinned.add(made)
        return made

    return pinned


@contextlib.contextmanager
def gpu() -> Iterator[Gpu]:
    """torch has one CUDA device as long as the block runs."""
    global _gpu
    assert _gpu is None, "one pretend GPU at a time"
    register()
    _gpu = made = Gpu()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        PLAIN_TENSORS.add(PretendTensor)
        stack.callback(PLAIN_TENSORS.discard, PretendTensor)
        for owner, name, value in [
            *cuda_module.replacements(made),
            (torch, "empty", _pin(made, torch.empty)),
            # `module.to(device)` sets the data of its parameters, so that tied ones stay tied.
            (torch, "_has_compatible_shallow_copy_type", lambda one, other: True),
            (torch.Tensor, "data", property(_BASE_DATA.__get__, _set_data)),
            (torch.Tensor, "is_pinned", lambda self: cuda_module.is_pinned(made, self)),
        ]:
            _replace(stack, owner, name, value)
        yield made


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner) or name == "__code__":
        stack.callback(setattr, owner, name, vars(owner).get(name) or getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _forget() -> None:
    global _gpu
    _gpu = None


def install() -> None:
    """For a worker process: torch has a CUDA device from now on."""
    context = gpu()
    context.__enter__()
    _kept.append(context)


_kept: list[Any] = []
