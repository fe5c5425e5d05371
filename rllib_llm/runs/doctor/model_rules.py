"""Rules about model folders, read without loading weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllib_llm.modules.model_limits import TruncatedWeightsError, num_elements
from rllib_llm.runs.doctor.finding import Finding
from rllib_llm.runs.doctor.stage import Stage

SAMPLE = "The sum of 12 and 30 is 42.\nIsn't it? (Yes, it is!)"
JUDGES = ("reward_model", "critic_model")


def model_rules(stage: Stage) -> Iterator[Finding]:
    """Findings about every local folder that the stage reads a model from."""
    for setting, folder in stage.models().items():
        config = _read_json(Path(folder) / "config.json")
        yield from _weights(setting, Path(folder))
        if not stage.is_made_before(setting):
            yield from _kind(setting, config, stage)
    if stage.is_rlhf or stage.config.pretrained_model is not None:
        yield from _tokenizer(stage)


def _weights(setting: str, folder: Path) -> Iterator[Finding]:
    files = sorted(folder.glob("*.safetensors"))
    index = _read_json(folder / "model.safetensors.index.json")
    missing = sorted(set(index.get("weight_map", {}).values()) - {file.name for file in files})
    if missing:
        yield Finding(
            "model.shards", "error", f"{setting}={str(folder)!r}",
            f"{', '.join(missing[:3])} is not there",
            "Download or copy the folder again.", rule="hold every file of its index",
        )  # fmt: skip
    adapters = (folder / "adapter_config.json").is_file()
    if not files and not any(folder.glob("*.bin")) and not adapters:
        yield Finding(
            "model.weights", "error", f"{setting}={str(folder)!r}",
            "there is no *.safetensors file",
            "Name the folder that save_pretrained() wrote.", rule="hold weights",
        )  # fmt: skip
    for file in files:
        try:
            num_elements(file)
        except TruncatedWeightsError as error:
            yield Finding.from_error(error, "model").at("")


def _kind(setting: str, config: dict[str, Any], stage: Stage) -> Iterator[Finding]:
    """A policy writes text; a judge gives one number."""
    names = config.get("architectures") or []
    is_classifier = any("SequenceClassification" in name for name in names)
    is_causal = any("CausalLM" in name or "LMHead" in name for name in names)
    if setting in ("model", "reference") and is_classifier and stage.is_rlhf:
        yield Finding(
            "model.kind", "error", f"{setting} is a {names[0]}",
            "a policy is a causal language model, which writes completions",
            "Name the model that was fine-tuned on texts, not the reward model.",
        )  # fmt: skip
    if setting == "reward_model" and is_causal and not is_classifier:
        yield Finding(
            "model.kind", "error", f"{setting} is a {names[0]}",
            "its score would come from a head that is drawn at random",
            "Name what a RewardModel stage made (${name.model}).",
        )  # fmt: skip


def _tokenizer(stage: Stage) -> Iterator[Finding]:
    from rllib_llm.modules.tokenizer import eos_token_ids, load_generation_config
    from rllib_llm.runs.check_data import _is_here

    model = stage.config.pretrained_model
    if not _is_here(model):
        return
    tokenizer = stage.config.load_tokenizer()
    generation = load_generation_config(model)
    ends = eos_token_ids(tokenizer, generation)
    stops = getattr(stage.config, "stop_token_ids", None)
    if stage.is_rlhf and not ends and not stops:
        yield Finding(
            "model.eos", "warning", f"model={str(model)!r} has no EOS token",
            "completions end at max_new_tokens alone",
            "Set eos_token in the tokenizer's folder, or stop_token_ids.",
        )  # fmt: skip
    own = eos_token_ids(generation) if generation is not None else ()
    if own and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in own:
        yield Finding(
            "model.eos_differs", "warning",
            f"EOS of the tokenizer={tokenizer.eos_token_id}, of generation_config.json={list(own)}",
            "texts are taught one end, and sampling stops at both",
            "Make them equal in the model's folder, or set stop_token_ids.",
        )  # fmt: skip
    yield from _round_trip(tokenizer, str(model))


def _round_trip(tokenizer: Any, model: str) -> Iterator[Finding]:
    """Text that becomes other text, where the vocabulary holds every sign of it."""
    ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return  # a vocabulary of few signs, as the toys have
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if back.strip() != SAMPLE:
        yield Finding(
            "model.round_trip", "warning",
            f"{SAMPLE!r} comes back from model={model!r} as {back!r}",
            "rewards read decoded completions",
            "Set clean_up_tokenization_spaces=False in the tokenizer, or look at its decoder.",
        )  # fmt: skip


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
