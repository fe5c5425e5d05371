"""The stage that samples texts from a model: pretraining text, and openings to use as prompts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.tune import PlacementGroupFactory, Trainable

from rllib_llm.checkpoints.folder import check, write_manifest
from rllib_llm.config.sampling import GENERATE, GENERATE_MODEL, GENERATE_SEED
from rllib_llm.config.sections import SectionMethod, wrong
from rllib_llm.config.tabled_config import TabledConfig
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.envs.actions import decode_completions
from rllib_llm.shared.errors import Problem, require
from rllib_llm.shared.setting import Section

TRAIN_FILE, EVAL_FILE = "train.jsonl", "eval.jsonl"


class GenerateConfig(TabledConfig):
    """Settings for sampling texts without training or an environment."""

    sections: tuple[Section, ...] = (GENERATE_MODEL, GENERATE)
    rllib_sections: tuple[Section, ...] = (GENERATE_SEED,)

    why_a_model = "it writes the texts"

    language_model = SectionMethod()
    sampling = SectionMethod()

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or Generate)
        self.max_new_tokens = 128
        self.seed = 0

    def text_rules(self) -> Iterator[Problem]:
        """Texts can be sampled, and split."""
        self.given_model()
        if not 0 <= self.eval_fraction < 1:
            yield wrong(self, "eval_fraction", "at least 0 and below 1",
                        "it is the share of held-out texts", "Use 0.1")  # fmt: skip
        if self.opening_tokens is not None and not 0 < self.opening_tokens < self.max_new_tokens:
            yield wrong(self, "opening_tokens",
                        f"above 0 and below max_new_tokens={self.max_new_tokens}",
                        "an opening is the first part of a text",
                        "Lower it, or set null for no prompts")  # fmt: skip
        SamplingParams.of(self)  # checks the rest

    rules = (text_rules,)


class Generate(Trainable):
    """Tune Trainable: samples `batch_size` texts per iteration, each from the BOS token alone.

    A checkpoint holds train.jsonl and, with `eval_fraction`, eval.jsonl: rows {"text"} and, with
    `opening_tokens`, {"prompt", "text"}. Text number i is a function of model, seed and i.
    Results: episode (texts so far), train/output_length (tokens), throughput/tokens_per_s.
    """

    @classmethod
    def get_default_config(cls) -> GenerateConfig:
        return GenerateConfig(algo_class=cls)

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        num_gpus = cls.as_config(config).num_gpus
        return PlacementGroupFactory([{"CPU": 1} | ({"GPU": num_gpus} if num_gpus else {})])

    @classmethod
    def as_config(cls, settings: Mapping[str, Any] | GenerateConfig) -> GenerateConfig:
        """The config that Tune hands on as a mapping."""
        if isinstance(settings, GenerateConfig):
            return settings
        return cls.get_default_config().update_from_dict(dict(settings))

    def setup(self, config: Any) -> None:
        from rllib_llm.modules.pretrained import load_causal_lm
        from rllib_llm.modules.tokenizer import (
            eos_token_ids,
            load_generation_config,
            load_tokenizer,
        )

        self.settings = self.as_config(config)
        self.settings.validate()
        model = self.settings.given_model()
        self.tokenizer = load_tokenizer(model)
        require(
            self.tokenizer.bos_token_id is not None, "model", model, "have a BOS token",
            "texts are sampled from it alone", "Set tokenizer.bos_token and save it again",
        )  # fmt: skip
        device = "cuda" if self.settings.num_gpus else "cpu"
        self.model = load_causal_lm(model, dtype=self.settings.dtype, device=device)
        ends = eos_token_ids(self.tokenizer, self.model, load_generation_config(model))
        self._params = SamplingParams.of(self.settings, self.tokenizer.pad_token_id, ends)
        self._rows: list[dict[str, str]] = []

    def step(self) -> dict[str, Any]:
        from rllib_llm.engines.engine import generate

        start = time.perf_counter()
        first, count = len(self._rows), self.settings.batch_size
        bos = torch.full((count, 1), self.tokenizer.bos_token_id)
        rows = range(first, first + count)
        noise = uniform_noise(self.settings.seed, rows, self.settings.max_new_tokens)
        mask = torch.ones_like(bos, dtype=torch.bool)
        sampled = generate(self.model, bos, mask, self._params, noise=noise)
        for ids, mask in zip(sampled.completion_ids, sampled.completion_mask, strict=True):
            self._rows.append(self._row(ids[mask].tolist()))
        num_tokens = int(sampled.completion_mask.sum())
        return {
            "episode": len(self._rows),
            "train": {"output_length": num_tokens / count},
            "throughput": {"tokens_per_s": num_tokens / (time.perf_counter() - start)},
        }

    def _row(self, ids: list[int]) -> dict[str, str]:
        def decode(ids: list[int]) -> str:
            return decode_completions(self.tokenizer, [self.tokenizer.bos_token_id], [ids])[0]

        text, num = decode(ids), self.settings.opening_tokens
        return {"text": text} | (
            {} if num is None else {"prompt": opening(text, decode(ids[:num]))}
        )

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        files: dict[str, list[dict[str, str]]] = {TRAIN_FILE: [], EVAL_FILE: []}
        for row in self._rows:
            held_out = is_held_out(row.get("prompt", row["text"]), self.settings.eval_fraction)
            files[EVAL_FILE if held_out else TRAIN_FILE].append(row)
        for name, rows in files.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (Path(checkpoint_dir) / name).write_text("".join(lines), encoding="utf-8")
        # The order in which they were sampled, to be continued.
        state = {"rows": self._rows}
        (Path(checkpoint_dir) / "state.json").write_text(json.dumps(state), encoding="utf-8")
        write_manifest(Path(checkpoint_dir), {"algorithm": "Generate"})

    def load_checkpoint(self, checkpoint: str) -> None:
        check(checkpoint)
        state = json.loads((Path(checkpoint) / "state.json").read_text(encoding="utf-8"))
        self._rows = state["rows"]


def opening(text: str, beginning: str) -> str:
    """`beginning`, the first tokens of `text` decoded, less a last word that it cuts in two."""
    while not text.startswith(beginning):  # half a character at the end
        beginning = beginning[:-1]
    rest = text[len(beginning) :]
    if not rest or rest[0].isspace() or not beginning or beginning[-1].isspace():
        return beginning.rstrip()
    words = beginning.rsplit(None, 1)
    return words[0] if len(words) == 2 else beginning


def is_held_out(text: str, fraction: float) -> bool:
    """Whether `text` belongs to the held-out `fraction`: a function of the text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
