"""CONTRIBUTING's engine, for processes that import the tests and nothing beside them."""

from __future__ import annotations

from pathlib import Path

from tests.docs.code_blocks import blocks_of

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
(_block,) = [block for block in blocks_of(PAGE) if block.title == "echo_engine.py"]
exec(compile(_block.code, str(PAGE), "exec"))
