"""What this machine's processor has, as Linux names it."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path

# Levels of instructions to which oneDNN can be held and that have no products of bfloat16.
_WITHOUT_BFLOAT16 = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI",
)  # fmt: skip


@functools.cache
def processor_features() -> frozenset[str]:
    """ "amx_bf16", "avx512_bf16", ...; empty where Linux does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())


def multiplies_bfloat16(
    features: Collection[str] | None = None, environ: Mapping[str, str] = os.environ
) -> bool:
    """Whether a processor multiplies bfloat16 itself, faster than float32; others emulate it.

    features: its features; None: this one's. environ: may hold oneDNN to less, as
        `ONEDNN_MAX_CPU_ISA` does.
    """
    if environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    found = processor_features() if features is None else features
    return any(name.startswith(("amx_bf16", "avx512_bf16")) for name in found)
