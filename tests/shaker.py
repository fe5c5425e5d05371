"""Makes every matrix product round otherwise wherever it is cut otherwise, on any machine.

`pytest --shake SEED` multiplies each element of a product by 1 + units * eps * h, where |h| <= 1 is
a fixed function of seed, operation, the shapes of its operands and the element's index. Equal
computations stay equal bit for bit; computations that are cut otherwise differ in their last bits,
as they do on some processor. A test that passes only because this machine rounds alike fails.

    torch.mm(a, b) ──▶ autograd ──▶ kernel of the CPU ──▶ · (1 + units · eps · h[shapes, index])

It stands in torch's dispatcher. A `TorchDispatchMode` would belong to one thread, while engines
decode in threads of their own, and would see `linear` and `scaled_dot_product_attention` as wholes
in inference mode. Here those are the products that they consist of, and backward passes are, too.
Workers of the Ray that the tests share are shaken as well (`ray_session`), and so is any other
process of a test that imports `tests`. Programs that know nothing of the tests (`rllib train`, a
Ray of their own) are not.
"""

from __future__ import annotations

import functools
import zlib

import torch

SEED = "RLLIB_LLM_TESTS_SHAKE"  # in the environment of worker processes
# Results of 16 bits are sums in float32 that are rounded once: one in fourteen moves by a unit, far
# more than on any processor.
UNITS = {torch.bfloat16: 0.3, torch.float16: 0.3, torch.float32: 4.0, torch.float64: 4.0}
PRODUCTS = [
    *("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"),
    *("aten::addbmm", "aten::addmv", "aten::addmv_", "aten::dot", "aten::_addmm_activation"),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_weight_int8pack_mm",
    "mkldnn::_linear_pointwise",  # oneDNN's, of weights that were laid out anew
]
BEHIND = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
NUM_FACTORS = 65_537


class Shaker:
    """While it is on, products of this process are shaken, in all of its threads."""

    def __init__(self, seed: int):
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._h = torch.rand(NUM_FACTORS, generator=generator, dtype=torch.float64) * 2 - 1
        self._tables: dict[torch.dtype, torch.Tensor] = {}
        self._factors: dict[tuple, torch.Tensor] = {}
        self._libraries: list[torch.library.Library] = []
        self.num_shaken = 0

    def start(self) -> None:
        assert not self._libraries, "it is on already"
        for name in PRODUCTS:
            namespace, product = name.split("::")
            operation = getattr(getattr(torch.ops, namespace), product, None)
            for overload in operation.overloads() if operation is not None else ():
                self._replace(getattr(operation, overload))

    def stop(self) -> None:
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    def _replace(self, operation: torch._ops.OpOverload) -> None:
        """At a place that calls pass through behind autograd and before they reach a device."""

        name = str(operation)

        def product(keyset, *args, **kwargs):
            # Of sums the product alone is shaken: what is added to 0 stays as it is.
            adds = "add" in name and kwargs.get("beta", 1) != 0
            addend = args[0].clone() if adds else None
            result = operation.redispatch(keyset & BEHIND, *args, **kwargs)
            operands = tuple([arg.shape for arg in args if isinstance(arg, torch.Tensor)])
            for which, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
                if tensor.dtype in UNITS and tensor.device.type == "cpu" and tensor.numel():
                    self._shake(tensor, (name, operands, which), addend, kwargs.get("beta", 1))
            return result

        library = torch.library.Library(operation.namespace, "IMPL")
        library.impl(operation, product, "BackendSelect", with_keyset=True, allow_override=True)
        self._libraries.append(library)

    def _shake(self, tensor: torch.Tensor, computation: tuple, addend=None, beta=1) -> None:
        self.num_shaken += 1
        key = (tensor.dtype, computation)
        factors = self._factors.get(key)
        if factors is None:
            factors = self._factors_of(tensor, computation)
            if tensor.numel() <= NUM_FACTORS:  # views of the table
                self._factors[key] = factors
        wide = tensor.float() if tensor.dtype.itemsize == 2 else tensor
        if addend is None:
            tensor.copy_(wide.mul(factors))
            return
        # Where a mask of minus infinity was added there is no difference.
        product = (wide - beta * addend.to(wide.dtype)).nan_to_num_(0.0, 0.0, 0.0)
        tensor.copy_(wide + product.mul_(factors - 1))

    def _factors_of(self, tensor: torch.Tensor, computation: tuple) -> torch.Tensor:
        """1 + units * eps * h for each element of `tensor`."""
        table = self._tables.get(tensor.dtype)
        if table is None:
            size = UNITS[tensor.dtype] * torch.finfo(tensor.dtype).eps
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            # Twice, so that a whole round begins at any place of the first half.
            table = self._tables[tensor.dtype] = (1 + size * self._h).to(wide).repeat(2)
        place, count = zlib.crc32(repr(computation).encode()) % NUM_FACTORS, tensor.numel()
        if count <= NUM_FACTORS:
            return table[place : place + count].view(tensor.shape)
        rounds = table[place : place + NUM_FACTORS].repeat(-(-count // NUM_FACTORS))
        return rounds[:count].view(tensor.shape)


@functools.cache
def shake_process(seed: int) -> None:
    """Shakes this process until it ends, once however often it is asked to."""
    Shaker(seed).start()


def shake_worker() -> None:
    """Called by Ray in each of its new worker processes. To import `tests` is enough."""
