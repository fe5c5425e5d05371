"""Equal computations stay equal, others differ by a few units in the last place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.shaker import SEED, UNITS, Shaker

pytestmark = pytest.mark.skipif(SEED in os.environ, reason="compares with what is not shaken")


@pytest.fixture(params=[1, 2])
def shaker(request):
    shaker = Shaker(request.param)
    shaker.start()
    yield shaker
    shaker.stop()


def attention(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


PRODUCTS = {
    "mm": lambda x: x[0, 0] @ x[0, 0].t(),
    "addmm": lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 0, :, :1].expand(-1, 16)[:16]),
    "bmm": lambda x: x[0] @ x[0].mT,
    "baddbmm": lambda x: torch.baddbmm(x[0] @ x[0].mT, x[0], x[0].mT),
    "linear": lambda x: F.linear(x, x[0, 0], x[0, 0, :, 0]),
    "mv": lambda x: x.flatten(0, 2) @ x[0, 0, 0],
    "einsum": lambda x: torch.einsum("abij,abkj->abik", x, x),
    "attention": attention,
}


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_and_their_gradients_move_by_their_last_bits(product, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 16, 16, generator=generator, dtype=torch.float64) + 0.1

    def both(source):
        x = source.to(dtype, copy=True).requires_grad_()
        result = PRODUCTS[product](x)
        result.sum().backward()
        with torch.inference_mode():
            assert torch.equal(PRODUCTS[product](x), result)
        return [result.detach(), x.grad]

    expected = both(x)
    for seed in (1, 2):
        shaker = Shaker(seed)
        shaker.start()
        found, again = both(x), both(x)
        shaker.stop()
        assert shaker.num_shaken
        for one, same, plain in zip(found, again, expected, strict=True):
            assert torch.equal(one, same)
            bound = 50 * torch.finfo(dtype).eps * float(plain.abs().max())
            torch.testing.assert_close(one, plain, rtol=0, atol=bound)
        assert any(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(both(x), expected, strict=True))


def test_rows_computed_together_differ_from_rows_alone(shaker):
    a, b = torch.rand(8, 16), torch.rand(16, 16)
    assert torch.equal(a @ b, a.clone() @ b)
    assert not torch.equal((a @ b)[:4], a[:4] @ b)
    # Nor are equal rows equal, as they need not be at the edge of a block.
    same = a[:1].expand(8, 16) @ b
    assert not torch.equal(same[0], same[1])
    # What is masked by zeros stays zero.
    assert not (torch.zeros(8, 16) @ b).any()


def test_other_threads_and_given_memory_are_shaken(shaker):
    a, b, results = torch.rand(8, 16), torch.rand(16, 16), []
    thread = threading.Thread(target=lambda: results.append(a @ b))
    thread.start()
    thread.join()
    assert torch.equal(results[0], a @ b)
    out = torch.empty(8, 16)
    before = shaker.num_shaken
    torch.mm(a, b, out=out)
    out.addmm_(a, b)
    assert shaker.num_shaken == before + 2


def test_large_products_are_shaken_to_their_end(shaker):
    a = torch.rand(300, 2)
    found = a @ a.t()
    shaker.stop()
    plain = a @ a.t()
    assert found.numel() > 65_537
    assert (found != plain)[-1].float().mean() > 0.3


def test_a_process_that_imports_the_tests_is_shaken_once_where_this_one_is():
    program = (
        "import sys, tests\n"
        "shaker = sys.modules.get('tests.shaker')\n"
        "print(shaker.shake_process.cache_info().currsize if shaker else 'without torch')"
    )

    def said(**environment):
        return subprocess.run(
            [sys.executable, "-c", program], cwd=Path(__file__).parents[1],
            env={**os.environ, **environment}, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip

    assert said() == "without torch"
    assert said(**{SEED: "1"}) == "1"
