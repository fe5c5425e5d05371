"""The card of a trained model: README.md in its folder, with the hub's metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import yaml

from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.metrics import summary_metrics
from rllib_llm.runs.results import short_name

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Settings that name data, in a config and in its `prompts`.
DATA_SETTINGS = ("data", "eval_data", "ptx_data", "ptx_eval_data", "prompts")


def model_card(experiment: Experiment, results: Mapping[str, float], source: str) -> str:
    """The text of README.md.

    Args:
        experiment: what trained it, with the references to earlier stages resolved.
        results: the last result of its trial.
        source: the file that described the run.
    """
    from huggingface_hub import ModelCard, ModelCardData  # a second to import

    config = experiment.config
    base = str(config.get("model", ""))
    data = {name: config[name] for name in DATA_SETTINGS if config.get(name) is not None}
    named = [f"`{name}: {' '.join(str(each).split())[:120]}`" for name, each in data.items()]
    algorithm = short_name(experiment.run)
    hub_data = [path for each in data.values() if (path := _hub_id(each))]
    card = ModelCardData(
        base_model=_hub_id(base) or None, datasets=hub_data or None, library_name="transformers",
        pipeline_tag="text-generation",
        tags=["rllib_llm", "reinforcement-learning", algorithm.lower()],
    )  # fmt: skip
    rows = "\n".join(
        f"| {metric.title.strip()} | `{metric.key}` | {metric.text(results[metric.key])} |"
        for metric in summary_metrics([results])
    )
    text = f"""---
{card.to_yaml()}
---

# {experiment.name}

{experiment.description or f"Trained with {algorithm}."}

- base model: {f"`{base}`" if base else "not named"}
- algorithm: {algorithm}, by [Ray RLlib](https://docs.ray.io/en/latest/rllib/index.html) and
  rllib_llm {version("rllib-llm")}
- data: {", ".join(named) or "see below"}

## Results

The last result of the run.

| | result | value |
|---|---|---|
{rows}

## How it was trained

`rllib train file {source}`; the settings that differ from the defaults:

```yaml
{_plain({"run": experiment.run, "env": experiment.env, "stop": experiment.stop, "config": config})}
```
"""
    return str(ModelCard(text))


def _hub_id(value: Any) -> str:
    path = value
    while isinstance(path, Mapping):  # {data: {path: ...}}
        path = path.get("data", path.get("path"))
    return path if isinstance(path, str) and HUB_ID.fullmatch(path) else ""


def _plain(value: Any) -> str:
    """The YAML of values; what has no YAML, as text."""

    def plain(each: Any) -> Any:
        if isinstance(each, Mapping):
            return {str(key): plain(one) for key, one in each.items() if one not in (None, {})}
        if isinstance(each, list | tuple):
            return [plain(one) for one in each]
        return each if isinstance(each, str | int | float | bool) else str(each)

    return yaml.safe_dump(plain(value), sort_keys=False, width=100).rstrip()
