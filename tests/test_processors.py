"""Tests that compare roundings, run again as on other processors than this one.

oneDNN, MKL and torch choose kernels by what a processor has, once per process: AMX and AVX512-BF16
multiply bfloat16 otherwise than AVX2, products of float32 are cut into other blocks, and sums among
threads. A processor cannot be made better than it is, so the tests themselves run on the best there
is. Roundings of no processor in particular are those of `--shake` (tests/shaker.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {
    "AVX2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    # oneDNN and MKL choose on their own, so one run limits both. Not AVX512_CORE: torch asks the
    # processor whether int8 products saturate, not oneDNN.
    "oneDNN without bfloat16, MKL for any processor": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_CBWR": "COMPATIBLE",
    },
    "oneDNN without AMX, MKL for AVX2": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_CBWR": "AVX2",
    },
    "no vectors in torch": {"ATEN_CPU_CAPABILITY": "default"},
    # Threads that wait let others have their core: here other tests run beside them.
    "two threads": {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # whatever this process has
TESTS = [
    "tests/learners/test_masked_out_tokens.py",
    "tests/learners/test_mixed_precision.py",
    "tests/learners/test_rlhf_learner.py::test_the_first_mini_batch_is_exactly_on_policy",
    "tests/modules/test_lora.py",
    "tests/modules/test_nf4.py",
    "tests/modules/test_quantization.py",
    "tests/modules/test_dense_packing.py",
    "tests/modules/test_logprobs.py",
    "tests/engines/test_decoder.py",
    "tests/engines/test_static_step.py",
    "tests/rollouts/test_synchronous_workers.py",
]


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_roundings_stay_within_their_bounds_on_other_processors(limit):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS],
        cwd=ROOT, env={**os.environ, **THREADS, **LIMITS[limit]}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
