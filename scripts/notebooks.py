"""Writes the cells of the notebooks into docs/guides/notebooks.md.

    python scripts/notebooks.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "notebooks.md"
NOTEBOOKS = [
    ROOT / "notebooks" / f"{name}.ipynb"
    for name in ("first_grpo", "preferences_ppo_ptx", "search_with_tune")
]
HEAD = """# Notebooks

Three notebooks of the folder `notebooks`; the tests run them from the first cell to the last.
To open them:

```console
pip install jupyterlab matplotlib
jupyter lab notebooks/first_grpo.ipynb
```
"""


def page() -> str:
    """The page: headings one level deeper, code that the page's own tests do not run again."""
    parts = [HEAD]
    for file in NOTEBOOKS:
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                parts.append(f"```python notest\n{text}\n```\n")
            else:
                text = f"#{text}" if text.startswith("# ") else text
                text = text.replace("../docs/guides/", "").replace("../docs/", "../")
                parts.append(f"{text}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
