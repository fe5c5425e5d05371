"""What a command said, without the frames and line breaks of panels and tables."""

from __future__ import annotations

import re


def said(output: str) -> str:
    """Return `output` with box characters removed and white space collapsed."""
    return re.sub(r"\s+", " ", re.sub("[\u2500-\u257f]", " ", output))
