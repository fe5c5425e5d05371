"""How a reward model with a tokenizer of its own reads a prompt and its completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rllib_llm.data.chats import encode_judged_chat
from rllib_llm.data.encoding import encode_text, keep_end

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
    append_eos: texts end as those of the RewardModel stage do: with an EOS behind completions that
        are finished, without one behind others; chats with the token that ends a finished turn and
        with nothing behind it. Otherwise their ends are the tokenizer's matter, as those of pairs.

    Raises:
        ValueError: a template without {completion}, or "chat" without a chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        max_length: int | None = None,
        append_eos: bool = False,
    ):
        if template is not None and template not in (PAIR, CHAT):
            _check_template(template)
        if template == CHAT and not tokenizer.chat_template:
            raise ValueError(
                f"template={template!r} must be 'pair' or a text with {{prompt}} and "
                "{completion}: the reward model's tokenizer has no chat template. Set "
                "tokenizer.chat_template and save it, or choose another template."
            )
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length
        self.append_eos = append_eos and tokenizer.eos_token_id is not None
        self.num_truncated = 0

    def encode(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions: Sequence[str],
        *,
        messages: Sequence[Any] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> list[list[int]]:
        """Token ids of each prompt with its completion.

        messages: the chat behind each prompt, where `prompts` hold it rendered for another model;
        finished: False where the length limit ended the completion.
        """
        rows = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            chat = messages[i] if messages is not None else prompt
            done = finished is None or finished[i]
            rows.append(self._encode_row(prompt, chat, completion, done))
        return rows

    def _encode_row(self, prompt: Any, chat: Any, completion: str, finished: bool) -> list[int]:
        tokenizer = self.tokenizer
        is_chat = isinstance(chat, Sequence) and not isinstance(chat, str)
        if self.template == CHAT or (self.template is None and is_chat and tokenizer.chat_template):
            turns = list(chat) if is_chat else [{"role": "user", "content": prompt}]
            turns.append({"role": "assistant", "content": completion})
            if self.append_eos:
                return self.shorten(encode_judged_chat(tokenizer, turns, finished=finished))
            encoded: Any = tokenizer.apply_chat_template(turns, return_dict=True)
            return self.shorten(list(encoded["input_ids"]))
        text = prompt if isinstance(prompt, str) else _plain_text(prompt)
        if self.template == PAIR:
            return self._shorten_pair(text, completion)
        # str.replace and not str.format: texts may hold braces.
        template = self.template or DEFAULT_TEMPLATE
        before, after = template.split("{completion}", 1)
        joined = before.replace("{prompt}", text) + completion + after.replace("{prompt}", text)
        if not self.append_eos:
            return self.shorten(list(tokenizer(joined)["input_ids"]))
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

    def _shorten_pair(self, prompt: str, completion: str) -> list[int]:
        ids = self.tokenizer(prompt, completion)["input_ids"]
        if self.max_length is None or len(ids) <= self.max_length:
            return list(ids)
        self.num_truncated += 1
        side, self.tokenizer.truncation_side = self.tokenizer.truncation_side, "left"
        ids = self.tokenizer(
            prompt, completion, truncation="longest_first", max_length=self.max_length
        )["input_ids"]
        self.tokenizer.truncation_side = side
        return list(ids)


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True where both give every text the same ids: equal vocabulary, chat template and probes."""
    return one is other or (
        one.get_vocab() == other.get_vocab()
        and one.eos_token_id == other.eos_token_id
        and (other.chat_template is None or one.chat_template == other.chat_template)
        and all(one(probe)["input_ids"] == other(probe)["input_ids"] for probe in _PROBES)
    )


def _plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages) + "\n\n"


def _check_template(template: str) -> None:
    if template.count("{completion}") != 1:
        raise ValueError(
            f"template={template!r} must be 'chat', 'pair' or a text with {{completion}} once and "
            "{prompt} where the prompt goes: the completion is what is judged. Write e.g. "
            "'Question: {prompt}\\nAnswer: {completion}'."
        )
