"""Frozen models beside the policy: the reference, whose log-probs completions are held against, and
the learned judge, a sequence classifier as a reward function. Each replica loads its own copies."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rllib_llm.data.encoding import (
    apply_template,
    content_text,
    encode_judged_chat,
    encode_text,
    encode_whole,
    keep_end,
    row_settings,
)
from rllib_llm.data.image_prompts import ImagePrompts, without_images
from rllib_llm.data.rows import OF_TEMPLATES
from rllib_llm.envs.judges.reward_functions import Judge
from rllib_llm.modules.frozen import load_quantized
from rllib_llm.modules.images import files_of, image_columns, of_rows
from rllib_llm.modules.logprobs import CompletionOutputs, score_completions
from rllib_llm.modules.model_source import is_multimodal, text_config
from rllib_llm.modules.packing import pack_right, token_batches
from rllib_llm.modules.pretrained import load_causal_lm, load_sequence_classifier, score_head
from rllib_llm.modules.quantization import model_bytes, next_token_drift, score_drift
from rllib_llm.modules.sequence_scores import (
    check_normalization,
    label_index,
    read_score_normalization,
    sequence_scores,
)
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.shared.columns import (
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    pad_right,
    widen,
)
from rllib_llm.shared.dotted import named_model
from rllib_llm.shared.errors import require

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 16_384


_SHARED: contextvars.ContextVar[dict[Any, PreTrainedModel] | None]
_SHARED = contextvars.ContextVar("frozen models", default=None)


@contextlib.contextmanager
def sharing_models() -> Iterator[None]:
    """Environments made within it share those of their frozen models that are alike."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


class _Frozen:
    """A frozen model and its drift.

    model: folder, hub id or dotted path.
    quantization, backend: see `modules/quantization.py`.
    dtype: of the weights that are not quantised, and of the activations.
    products: the library that multiplies float32 on a CPU, "mkl" or "onednn".
    batch_tokens: tokens (padding included) of one forward pass; lower it when memory runs out.
    measure_drift: rows of the first batch on which a quantised model is compared with the
        unquantised one, which is loaded for that moment; 0 = not measured. The result is in
        `metrics()`.

    Raises:
        Problems, ValueError, ImportError: see `load_quantized`.
    """

    _load: ClassVar[Callable[..., PreTrainedModel]]

    def __init__(
        self, model: str | os.PathLike, *, quantization: str = "none", backend: str = "auto",
        device: str | torch.device = "cpu", dtype: str | torch.dtype = "float32",
        products: str = "mkl", batch_tokens: int = DEFAULT_BATCH_TOKENS, measure_drift: int = 0,
    ):  # fmt: skip
        require(isinstance(measure_drift, int) and measure_drift >= 0, "measure_drift",
                measure_drift, "be a whole number of at least 0")  # fmt: skip
        if measure_drift and quantization == "none":
            warnings.warn("measure_drift has no effect with quantization='none'.", stacklevel=3)
        token_batches(torch.ones(1), batch_tokens)
        settings: dict[str, Any] = {
            "quantization": quantization, "backend": backend, "dtype": dtype, "device": device,
            "products": products,
        }  # fmt: skip
        shared, key = _SHARED.get(), (self._load, str(model), *map(str, settings.values()))
        loaded = None if shared is None else shared.get(key)
        self.model = loaded or load_quantized(self._load, model, **settings)
        if shared is not None:
            shared[key] = self.model
        self.drift: dict[str, float] = {}
        self._source, self._device, self._batch_tokens = model, torch.device(device), batch_tokens
        self._drift_rows = measure_drift if quantization != "none" else 0

    def _measure_drift(self, compare: Callable[[PreTrainedModel], dict[str, float]]) -> None:
        """Compares the model with the exact one, once."""
        self._drift_rows = 0
        exact_model = self._load(self._source, dtype="float32", device=self._device)
        self.drift = compare(exact_model)
        logger.info(
            "Drift of %r from its unquantised weights: %s (%.1f of %.1f MB).", str(self._source),
            ", ".join(f"{name} {value:.3g}" for name, value in self.drift.items()),
            model_bytes(self.model) / 1e6, model_bytes(exact_model) / 1e6,
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """The drift once measured, under "drift/<measure>", else {}."""
        return {f"drift/{name}": value for name, value in self.drift.items()}


class FrozenReference(_Frozen):
    """A frozen causal language model; see `_Frozen`. Its drift is "kl" and "top1"."""

    _load = staticmethod(load_causal_lm)

    @torch.no_grad()
    def logprobs(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
        completion_mask: Tensor, temperature: float = 1.0,
        seen: Mapping[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Log-probs [B, T] float32 of the completion tokens, 0 where the mask is False.

        prompt_ids [B, P] left-padded, completion_ids [B, T] right-padded, masks bool; logits are
        divided by `temperature`. The result is on the device of `completion_ids`. `seen`: columns
        of what the prompts show, see `modules/images.py`.
        """
        columns = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        if self._drift_rows:
            self.measure(*(column[: self._drift_rows] for column in columns))
        result = torch.zeros(completion_ids.shape, device=completion_ids.device)
        for rows, scored in self._passes(columns, seen, temperature=temperature):
            result[rows] = scored.logprobs.to(result.device)
        return result

    def _passes(
        self, columns: Sequence[Tensor], seen: Mapping[str, Tensor] | None = None, **options: Any
    ) -> Iterator[tuple[Tensor, CompletionOutputs]]:
        """The numbers of the rows of each forward pass, and what it gave."""
        lengths = columns[1].sum(dim=1) + columns[3].sum(dim=1)
        for rows in token_batches(lengths, self._batch_tokens):
            rows = rows.to(columns[0].device)
            batch = [column[rows].to(self._device) for column in columns]
            shown = of_rows(seen, rows)
            yield rows, score_completions(self.model, *batch, shown=shown, **options)

    def measure(self, *columns: Tensor) -> dict[str, float]:
        """Drift against the unquantised model on such columns as `logprobs` takes, kept in `drift`:
        kl, top1."""
        ids, mask = pack_right(*columns)
        self._measure_drift(lambda exact: next_token_drift(self.model, exact, ids, mask))
        return self.drift


class FrozenTeacher(FrozenReference):
    """A frozen causal language model that says what it would have written."""

    @torch.no_grad()
    def judge(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
        completion_mask: Tensor, *, top_k: int, temperature: float = 1.0,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The columns `teacher_logprobs` [B, T] of the completion tokens, `teacher_top_ids` and
        `teacher_top_logprobs` [B, T, top_k], of what `logprobs` takes; 0 where masked out."""
        given = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        shape, device = completion_ids.shape, completion_ids.device
        found = _teacher_columns(shape, min(top_k, text_config(self.model).vocab_size), device)
        for rows, scored in self._passes(given, temperature=temperature, likeliest=top_k):
            assert scored.likeliest is not None
            for column, values in zip(
                found.values(), (scored.logprobs, *scored.likeliest), strict=True
            ):
                column[rows] = values.to(device)
        return found


def _teacher_columns(
    shape: Sequence[int], top_k: int, device: torch.device | str
) -> dict[str, Tensor]:
    return {
        TEACHER_LOGPROBS: torch.zeros(*shape, device=device),
        TEACHER_TOP_IDS: torch.zeros(*shape, top_k, dtype=torch.int32, device=device),
        TEACHER_TOP_LOGPROBS: torch.zeros(*shape, top_k, device=device),
    }


class ServedTeacher:
    """A teacher behind OpenAI's interface, as vLLM and `rllib serve` have it: a completion of one
    token is asked for, with `prompt_logprobs` of all that stands before it.

    url: up to and including the version; model: its name there; others: of `OpenAIClient`. A server
    gives log-probs at temperature 1.
    """

    def __init__(self, model: str, *, url: str, **client: Any) -> None:
        from rllib_llm.shared.openai_client import OpenAIClient

        self._client, self._model = OpenAIClient(url, **client), model

    def judge(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
        completion_mask: Tensor, *, top_k: int, temperature: float = 1.0,
    ) -> dict[str, Tensor]:  # fmt: skip
        """As `FrozenTeacher.judge`."""
        found = _teacher_columns(completion_ids.shape, top_k, "cpu")
        rows = [each.cpu() for each in (prompt_ids, prompt_mask, completion_ids, completion_mask)]
        asked = []
        for prompt, is_prompt, ids, mask in zip(*rows, strict=True):
            length = int(mask.nonzero().max()) + 1 if bool(mask.any()) else 0
            text = [*prompt[is_prompt].tolist(), *ids[:length].tolist()]
            body = {"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 1.0,
                    "prompt_logprobs": top_k}  # fmt: skip
            asked.append(self._client.submit(
                "completions", body, lambda answer: answer["choices"][0]["prompt_logprobs"]
            ))  # fmt: skip
        for row, answer in enumerate(asked):
            told = answer.result()
            for at in rows[3][row].nonzero().flatten().tolist():
                likely = told[int(rows[1][row].sum()) + at] or {}
                by_id = {int(i): float(each["logprob"]) for i, each in likely.items()}
                token = int(rows[2][row, at])
                ranked = sorted(by_id.items(), key=lambda each: -each[1])[:top_k]
                ranked += [(0, -math.inf)] * (top_k - len(ranked))
                ids, logprobs = zip(*ranked, strict=True)
                found[TEACHER_LOGPROBS][row, at] = by_id[token]
                found[TEACHER_TOP_IDS][row, at] = torch.tensor(ids, dtype=torch.int32)
                found[TEACHER_TOP_LOGPROBS][row, at] = torch.tensor(logprobs)
        return {name: column.to(completion_ids.device) for name, column in found.items()}

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()


class Teachers:
    """One teacher, or several, of which a column of the data names each row's.

    teachers: by name; the name of the only one does not matter without a column. top_k,
    temperature: of `FrozenTeacher.judge`.
    """

    def __init__(
        self, teachers: Mapping[str, FrozenTeacher | ServedTeacher], column: str | None = None, *,
        top_k: int, temperature: float,
    ) -> None:  # fmt: skip
        self._teachers, self._column = teachers, column
        self._settings: dict[str, Any] = {"top_k": top_k, "temperature": temperature}

    def judge(self, rows: Sequence[Mapping[str, Any]], *given: Tensor) -> dict[str, Tensor]:
        """As `FrozenTeacher.judge`, of as many `rows` of the data and what else that takes.

        Raises:
            Problems: a row whose column names no teacher.
        """
        if self._column is None:
            (teacher,) = self._teachers.values()
            return teacher.judge(*given, **self._settings)
        names = [str(row.get(self._column)) for row in rows]
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(names):
            require(name in self._teachers, self._column, name, f"be one of {[*self._teachers]}",
                    "this column names the row's teacher",
                    "Add it to teacher.models")  # fmt: skip
            own = torch.tensor([place for place, each in enumerate(names) if each == name])
            own = own.to(given[0].device)
            told = self._teachers[name].judge(*(each[own] for each in given), **self._settings)
            for key, column in told.items():
                shape = (len(names), *column.shape[1:])
                found.setdefault(key, column.new_zeros(shape))[own] = column
        return found


PAIR, CHAT = "pair", "chat"
DEFAULT_TEMPLATE = "{prompt}{completion}"
# Letters, digits, punctuation, spaces and non-ASCII text, on which tokenizers part ways.
_PROBES = (
    "The quick brown fox, 1234567890.",
    " Leading space\n\nand newlines\ttabs ",
    "don't STOP: naïve café – 東京 🙂",
)


class RewardTextEncoder:
    """Token ids of prompt and completion as the reward model's tokenizer makes them.

    template: None: "{prompt}{completion}", or the chat template where messages are given and the
        tokenizer has one. Otherwise "chat" (a prompt that is plain text becomes the user's turn),
        "pair" (the tokenizer's own joining of two texts, as encoders are trained), or a text with
        {prompt} and {completion}.
    max_length: tokens; longer texts lose their beginning, and `num_truncated` counts them.
    append_eos: texts end as those of the RewardModel stage do: with an EOS after completions that
        are finished, without one after others; chats with the token that ends a finished turn and
        with nothing after it. Otherwise their ends are the tokenizer's matter, as those of pairs.

    Raises:
        Problems: a template without {completion}, or "chat" without a chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str | None = None,
        max_length: int | None = None, append_eos: bool = False,
    ):  # fmt: skip
        require(template in (None, PAIR, CHAT) or str(template).count("{completion}") == 1,
                "template", template,
                "be 'chat', 'pair' or a text with {completion} once, and {prompt}")  # fmt: skip
        require(template != CHAT or tokenizer.chat_template, "template", template,
                "be 'pair' or a text",
                "the reward model's tokenizer has no chat template")  # fmt: skip
        self.tokenizer, self.template, self.max_length = tokenizer, template, max_length
        self.append_eos = append_eos and tokenizer.eos_token_id is not None
        self.num_truncated = 0

    def encode(
        self, prompts: Sequence[str | list[dict[str, Any]]], completions: Sequence[str], *,
        messages: Sequence[Any] | None = None, finished: Sequence[bool] | None = None,
        **columns: Sequence[Any],
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of each prompt with its completion.

        messages: the chat of each prompt, where `prompts` hold it rendered for another model;
        finished: False where the length limit ended the completion; columns: of the data set, see
        `row_settings`.
        """
        chats = prompts if messages is None else messages
        ends = [True] * len(completions) if finished is None else finished
        own = ({name: columns[name][i] for name in columns} for i in range(len(completions)))
        settings = map(row_settings, own)
        rows = zip(prompts, chats, completions, ends, settings, strict=True)
        return [self._encode_row(*row) for row in rows]

    def _encode_row(
        self, prompt: Any, chat: Any, completion: str, finished: bool, settings: dict[str, Any]
    ) -> list[int]:
        tokenizer = self.tokenizer
        is_chat = isinstance(chat, Sequence) and not isinstance(chat, str)
        if self.template == CHAT or (self.template is None and is_chat and tokenizer.chat_template):
            turns = without_images(chat) if is_chat else [{"role": "user", "content": prompt}]
            turns.append({"role": "assistant", "content": completion})
            if self.append_eos:
                return self.shorten(encode_judged_chat(
                    tokenizer, turns, finished=finished, **settings
                ))  # fmt: skip
            encoded = apply_template(tokenizer, turns, return_dict=True, **settings)
            return self.shorten(list(encoded["input_ids"]))
        text = prompt
        if not isinstance(prompt, str):
            text = "".join(f"{content_text(message)}\n\n" for message in prompt)
        if self.template == PAIR:
            ids = encode_whole(tokenizer, text, completion)
            if self.max_length is None or len(ids) <= self.max_length:
                return ids
            self.num_truncated += 1
            side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
            how = {"truncation": "longest_first", "max_length": self.max_length}
            ids = encode_whole(tokenizer, text, completion, **how)
            tokenizer.truncation_side = side
            return ids
        # str.replace and not str.format: texts may hold braces.
        template = self.template or DEFAULT_TEMPLATE
        before, after = template.split("{completion}", 1)
        joined = before.replace("{prompt}", text) + completion + after.replace("{prompt}", text)
        if not self.append_eos:
            return self.shorten(encode_whole(tokenizer, joined))
        ids = encode_text(tokenizer, joined)
        if finished and (not ids or ids[-1] != tokenizer.eos_token_id):
            ids.append(tokenizer.eos_token_id)
        return self.shorten(ids)

    def shorten(self, ids: list[int]) -> list[int]:
        """The last `max_length` ids; a BOS or CLS token at the start is kept."""
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        self.num_truncated += 1
        starts = (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id)
        return keep_end(ids, self.max_length, starts)


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True where both give every text the same ids: equal vocabulary, chat template and probes."""
    return one is other or (
        one.get_vocab() == other.get_vocab()
        and one.eos_token_id == other.eos_token_id
        and (other.chat_template is None or one.chat_template == other.chat_template)
        and all(one(probe)["input_ids"] == other(probe)["input_ids"] for probe in _PROBES)
    )


class RewardModelScorer(_Frozen, Judge):
    """Scores of completions by a sequence classifier.

    Where the reward model has the policy's tokenizer it reads the token ids exactly as they were
    sampled (prompt, then all tokens of the completion mask, so EOS where the completion has one),
    and `wants_tokens` is True. Otherwise, or with a `template`, it reads texts, encoded by its own
    tokenizer (`RewardTextEncoder`). Where prompts show images it reads texts, too: one that sees
    reads their images by its own processor, as in its training, others the words.

    model, frozen: see `_Frozen`; the drift is "rank_corr" and "max_abs".
    tokenizer: the policy's; None always reads texts.
    max_length: tokens of prompt and completion that are read, the last ones; None takes the reward
        model's own limit.
    normalize: (mean, std) with which scores become (score - mean) / std; None reads what the
        RewardModel stage stored in the model's config, False leaves scores as they are.
    label: of a classifier with several outputs, the one whose log-odds are the score.
    template: see `RewardTextEncoder`.
    append_eos: put EOS after finished completions when texts are read; None does so for models
        that the RewardModel stage trained, whose texts end with EOS.

    Raises:
        Problems, ValueError, ImportError: a model or setting that cannot be used.
    """

    name = "reward_model"
    _load = staticmethod(load_sequence_classifier)

    def __init__(
        self, model: str | os.PathLike, *, tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None, normalize: Sequence[float] | bool | None = None,
        label: int | str | None = None, template: str | None = None, append_eos: bool | None = None,
        **frozen: Any,
    ):  # fmt: skip
        super().__init__(model, **frozen)
        own_tokenizer = load_tokenizer(model)
        if score_head(self.model).out_features > 1:
            label_index(self.model.config, label)
        self.wants_tokens = (
            tokenizer is not None and template is None and same_tokenizer(tokenizer, own_tokenizer)
        )
        stored = read_score_normalization(self.model.config)
        self.normalization = _normalization(normalize, stored)
        self.max_length = _max_length(max_length, self.model.config, own_tokenizer)
        self._warned_truncated = False
        self._encoder = RewardTextEncoder(
            own_tokenizer, template=template, max_length=self.max_length,
            append_eos=stored is not None if append_eos is None else append_eos,
        )  # fmt: skip
        self._image_prompts: ImagePrompts | None = None
        # Chat models end their turns with tokens other than EOS; all of them are special ones.
        self._policy_ends = set() if tokenizer is None else set(tokenizer.all_special_ids)
        self._label = label

    def __call__(
        self, *tokens: Tensor, prompts: Sequence[Any] = (), completions: Sequence[str] = (),
        completion_ids: Sequence[Sequence[int]] | None = None,
        messages: Sequence[Any] | None = None, image_files: Sequence[str] = (), **columns: Any,
    ) -> Tensor:  # fmt: skip
        """Scores [B] float32: of four tensors (see `score_tokens`), else of texts."""
        if tokens:
            return self.score_tokens(*tokens)
        finished = None
        if completion_ids is not None and self._policy_ends:
            finished = [len(ids) > 0 and ids[-1] in self._policy_ends for ids in completion_ids]
        of = {name: columns[name] for name in OF_TEMPLATES if name in columns}
        return self.score_texts(
            prompts, completions, messages=messages, finished=finished, image_files=image_files,
            **of,
        )  # fmt: skip

    def score_tokens(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        """Scores [B] float32 of token ids, on their device.

        prompt_ids [B, P] left-padded, completion_ids [B, T] right-padded, masks bool.
        """
        ids, mask = pack_right(prompt_ids, prompt_mask, completion_ids, completion_mask)
        if ids.shape[1] > self.max_length:
            rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
            ids, mask = self._padded([self._encoder.shorten(row) for row in rows])
        return self._normalized_scores(ids, mask)

    def score_texts(
        self, prompts: Sequence[Any], completions: Sequence[str], *,
        image_files: Sequence[str] = (), **of: Any,
    ) -> Tensor:  # fmt: skip
        """Scores [B] float32 of texts, see `RewardTextEncoder.encode`; `image_files`: what each
        prompt shows, see `images.files_text`."""
        if not any(image_files) or not is_multimodal(self.model):
            rows = self._encoder.encode(prompts, completions, **of)
            return self._normalized_scores(*self._padded(rows))
        read = []
        for i, files in enumerate(image_files):
            own = {name: values[i : i + 1] for name, values in of.items() if values is not None}
            given = prompts[i : i + 1], completions[i : i + 1]
            read.append(self._seen(files, *given, **own) if files
                        else (*self._encoder.encode(*given, **own), {}))  # fmt: skip
        rows, seen = zip(*read, strict=True)
        return self._normalized_scores(*self._padded(rows), image_columns(seen))

    def _seen(
        self, files: str, prompts: Sequence[Any], completions: Sequence[str], *,
        messages: Sequence[Any] | None = None, finished: Sequence[bool] = (True,), **_: Any,
    ) -> tuple[list[int], dict[str, Tensor]]:  # fmt: skip
        """Token ids of a prompt with images and its completion, and what is seen of them, as the
        RewardModel stage reads them."""
        tokenizer, template = self._encoder.tokenizer, self._encoder.template
        require(template in (None, CHAT), "template", template, "be left out or 'chat' here",
                "prompts show images")  # fmt: skip
        if self._image_prompts is None:
            self._image_prompts = ImagePrompts(str(self._source), tokenizer)
        (prompt,), (said,) = messages or prompts, completions
        if template == CHAT and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        answer = said if isinstance(prompt, str) else [{"role": "assistant", "content": said}]
        row = {"prompt": prompt, "completion": answer, "images": files_of(files)}
        ids, is_answer, seen = self._image_prompts.example(row, key=files)
        ends = set() if finished[0] else {*tokenizer.all_special_ids}
        while is_answer.pop() and ids[-1] in ends:
            ids = ids[:-1]
        self._encoder.num_truncated += len(ids) > self.max_length
        return ids[: self.max_length], seen

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask [N, L], L at least 1."""
        ids, mask = (widen(part, max(1, part.shape[1])) for part in pad_right(rows, 0))
        return ids.to(self._device), mask.to(self._device)

    def metrics(self) -> dict[str, float]:
        """See `_Frozen`, and "num_truncated" texts so far."""
        return {**super().metrics(), "num_truncated": float(self._encoder.num_truncated)}

    @torch.no_grad()
    def _normalized_scores(
        self, ids: Tensor, mask: Tensor, seen: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        if (count := self._encoder.num_truncated) and not self._warned_truncated:
            self._warned_truncated = True
            warnings.warn(
                f"{count} texts are longer than the reward model's max_length={self.max_length} "
                "and lose their beginning; later ones are only counted.", stacklevel=3,
            )  # fmt: skip
        scores = self._run(self.model, ids, mask, seen)
        if count := self._drift_rows:
            few = (ids[:count], mask[:count], seen)
            self._measure_drift(lambda exact: score_drift(scores[:count], self._run(exact, *few)))
        mean, std = self.normalization
        return (scores - mean) / std

    def _run(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, seen: Mapping[str, Tensor] | None
    ) -> Tensor:
        scores = torch.zeros(len(ids), device=ids.device)
        lengths = mask.sum(dim=1)
        for rows in token_batches(lengths, self._batch_tokens):
            rows = rows.to(ids.device)
            longest = int(lengths[rows[0]])
            batch = (tensor[rows, :longest].to(self._device) for tensor in (ids, mask))
            scored = sequence_scores(
                model, *batch, label=self._label, shown=of_rows(seen, rows)
            )
            scores[rows] = scored.to(scores.device)
        return scores


def _normalization(
    given: Sequence[float] | bool | None, stored: tuple[float, float] | None
) -> tuple[float, float]:
    if given is False:
        return 0.0, 1.0
    require(given is not True or stored is not None, "normalize", given, "be (mean, std) or false",
            "the model's config has no mean and standard deviation")  # fmt: skip
    if given is None or given is True:
        return stored or (0.0, 1.0)
    require(
        not (isinstance(given, (str, float, int)) or len(given) != 2), "normalize", given,
        "be (mean, std), true, false or null",
    )  # fmt: skip
    mean, std = given
    check_normalization(mean, std)
    return float(mean), float(std)


def _max_length(given: int | None, config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    positions = getattr(text_config(config), "max_position_embeddings", None)
    longest = int(tokenizer.model_max_length)
    limit = min(positions or longest, longest)
    if given is None:
        return limit
    require(1 <= given <= limit, "max_length", given, f"be at least 1 and at most {limit}",
            "the reward model reads no more tokens")  # fmt: skip
    return given


COMBINATIONS = ("mean", "min", "mean_minus_std")
DISAGREEMENT = "reward_disagreement"


class RewardModelEnsemble(Judge):
    """One score from several reward models, lower where they disagree, as is chosen.

    What a policy gains from the faults of one model is not gained from all of them (Coste et al.
    2023, "Reward model ensembles help mitigate overoptimization", section 3.2: mean, worst case,
    uncertainty weighted; they subtract the variance, here it is the standard deviation). The
    metric `reward_disagreement` is the standard deviation over the models.

    Args:
        models: of each the arguments of `RewardModelScorer`, or just its model. Their scores must
            be on one scale, as those are that the RewardModel stage normalised.
        combine: "mean", "min" or "mean_minus_std".
        std_coeff: of "mean_minus_std".
        shared: arguments of all of them.

    Raises:
        Problems: fewer than two models, another combination, a coefficient below 0.
    """

    name = "reward_model"

    def __init__(
        self, models: Sequence[Any], *, combine: str = "mean", std_coeff: float = 1.0, **shared: Any
    ) -> None:
        for holds, key, value, rule in (
            (len(models) >= 2, "models", models, "be two or more"),
            (combine in COMBINATIONS, "combine", combine, f"be one of {COMBINATIONS}"),
            (std_coeff >= 0, "std_coeff", std_coeff, "be at least 0"),
        ):
            require(holds, f"reward_model.{key}", value, rule, "", "")
        self._combine, self._std_coeff = combine, std_coeff
        self.scorers = [RewardModelScorer(**{**shared, **named_model(m)}) for m in models]
        self.wants_tokens = all(scorer.wants_tokens for scorer in self.scorers)

    def __call__(
        self, *tokens: Tensor, image_files: Sequence[str] = (), **texts: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] float32 and their disagreement, of what `RewardModelScorer` takes."""
        texts |= {"image_files": image_files}
        scores = torch.stack([scorer(*tokens, **texts) for scorer in self.scorers])
        disagreement = {DISAGREEMENT: scores.std(dim=0, correction=0)}
        return combined(scores, self._combine, self._std_coeff), disagreement

    def metrics(self) -> dict[str, float]:
        """Those of each model, under its number."""
        found = [(i, scorer.metrics().items()) for i, scorer in enumerate(self.scorers)]
        return {f"{i}/{name}": value for i, metrics in found for name, value in metrics}


def combined(scores: Tensor, combine: str, std_coeff: float = 1.0) -> Tensor:
    """[B] float32 of scores [models, B]: their mean, least, or mean - std_coeff * std (ddof 0)."""
    if combine == "min":
        return scores.min(dim=0).values
    mean = scores.mean(dim=0)
    if combine == "mean":
        return mean
    return mean - std_coeff * scores.std(dim=0, correction=0)
