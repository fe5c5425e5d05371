"""How a conversation becomes tokens: the first prompt, the suffix of each further turn, replies.

A chat template is a program that renders whole conversations. What the environment says is the
part that rendering it adds at the end:

    G        = render(before, generation prompt)            what the assistant answered
    rendered = render(before + its turn + new, generation prompt)
    suffix   = rendered behind G + what it said             where that is how it begins,
             = rendered behind the end of its turn          where the turn is written otherwise, but
                                                            nothing before its end has changed,
             = none                                         where the template drops or changes what
                                                            was said: a path of its own begins

Of a family that the package `renderers` knows the suffix is the renderer's, where it has one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rllib_llm.chat_text import render_chat
from rllib_llm.conversations.families import AUTO, bridged, family_renderer
from rllib_llm.conversations.tool_calls import SYNTAXES, ParsedReply, parse_reply, syntax_of

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
HISTORIES = ("fork", "keep")
_THOUGHTS = "<think>"
_CLEANED_ROLES = ("user", "tool")


class ChatFormatError(ValueError):
    """A template that cannot write a conversation of several turns, or these messages."""


@dataclass(frozen=True)
class Suffix:
    """Ids to append behind a turn, and how they were found: see the module's docstring.

    "exact": the template writes the turn as it was said. "rewritten": it writes it a little
    otherwise (trims it, say), and nothing else changes. "kept": it changes or drops what was said,
    which stays all the same. "fork": it does, and a path of its own begins; there are no ids.
    "bridged": the family's renderer wrote it, whatever the template does with old turns.
    """

    how: Literal["exact", "rewritten", "kept", "fork", "bridged"]
    token_ids: list[int]


class ChatFormat:
    """Tokens of conversations, as a tokenizer's chat template writes them.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas of the tools that the template is to announce.
        syntax: of tool calls, one of `tool_calls.SYNTAXES`; None: what the template writes.
        history: what becomes of a turn where the template drops or changes earlier ones (thoughts,
            as a rule): "fork" begins a new row with what the template writes, "keep" goes on behind
            what was sampled.
        stop_token_ids: end a turn; None: what the template ends a turn with, and EOS.
        template_settings: further variables of the template, such as enable_thinking.
        renderer: of the package `renderers`: "auto" takes what is known of the tokenizer's hub id,
            a name such as "qwen3" that family's, None none.

    Raises:
        ChatFormatError: no template, an unknown setting, or a template that ends a turn with no
            token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        syntax: str | None = None,
        history: str = "fork",
        stop_token_ids: Sequence[int] | None = None,
        template_settings: Mapping[str, Any] | None = None,
        renderer: str | None = AUTO,
    ) -> None:
        if not tokenizer.chat_template:
            raise ChatFormatError(
                "chat_template=None must be a template: the tokenizer has none, and a conversation "
                "is rendered by it. Set chat_template (a file, or the template itself), or take an "
                "instruction-tuned model."
            )
        if history not in HISTORIES or (syntax is not None and syntax not in SYNTAXES):
            raise ChatFormatError(
                f"history={history!r}, tool_syntax={syntax!r} must be of {HISTORIES} and "
                f"{SYNTAXES}: they say how old turns and tool calls are written. Correct them."
            )
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools]
        self.tool_names = frozenset(tool["function"]["name"] for tool in self.tools)
        self.syntax = syntax or syntax_of(str(tokenizer.chat_template))
        self.history = history
        self._settings = dict(template_settings or {})
        self.turn_end, self._turn_end_id = self._find_turn_end()
        ends = stop_token_ids or (self._turn_end_id, *_eos(tokenizer))
        self.stop_token_ids = tuple(dict.fromkeys(ends))
        self.renderer, self.renderer_note = family_renderer(tokenizer, renderer, self._settings)

    # --- text --------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The conversation as the template writes it.

        Raises:
            ChatFormatError: the template refuses it.
        """
        return render_chat(
            self.tokenizer, messages, tools=self.tools, generation_prompt=generation_prompt,
            refused=ChatFormatError, **self._settings,
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, whose special tokens are already in it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def cleaned(self, message: Message) -> dict[str, Any]:
        """The message, its content as text. Texts of special tokens in what a user or a tool says
        are broken up, so that nobody ends a turn or opens one by quoting a token."""
        cleaned = dict(message)
        content = cleaned.get("content")
        if content is not None and not isinstance(content, (str, list)):
            content = json.dumps(content, ensure_ascii=False, default=str)
        if isinstance(content, str) and cleaned.get("role") in _CLEANED_ROLES:
            for token in self._special_texts:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        cleaned["content"] = content
        return cleaned

    @functools.cached_property
    def _special_texts(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in added if token.special} | {
            *self.tokenizer.all_special_tokens
        }
        return sorted((text for text in texts if len(text) > 1), key=len, reverse=True)

    # --- tokens ------------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole conversation that the assistant is to answer."""
        return self.encode(self.render(messages, generation_prompt=True))

    def suffix(
        self,
        before: Sequence[Message],
        reply: ParsedReply,
        new: Sequence[Message],
        *,
        finished: bool,
    ) -> Suffix:
        """What to append behind a sampled turn, or that a path of its own begins.

        Args:
            before: messages that the turn answered.
            reply: the turn.
            new: messages that answer it.
            finished: whether it ends as the template ends a turn; else that end comes first.

        Raises:
            ChatFormatError: the template refuses the messages, or forgets the turn.
        """
        asked = self.render(before, generation_prompt=True)
        turn = reply.as_message()
        rendered = self.render([*before, turn, *new], generation_prompt=True)
        said = asked + reply.text + self.turn_end
        if rendered.startswith(said):
            return Suffix("exact", self._behind_turn(rendered[len(said) :], finished))
        until_turn = self.render([*before, turn])
        closed = self._upto_end(until_turn, until_turn.count(self.turn_end))
        kept = rendered.startswith(closed) and rendered.startswith(asked)
        if kept and reply.reasoning in closed[len(asked) :]:
            return Suffix("rewritten", self._behind_turn(rendered[len(closed) :], finished))
        if self.history == "fork":
            return Suffix("fork", [])
        return Suffix("kept", self._behind_turns(rendered, until_turn, finished))

    def written_behind(
        self,
        before: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        *,
        finished: bool,
    ) -> list[int]:
        """Ids that the template writes behind a turn, whatever it makes of the turn itself; see
        `suffix`."""
        rendered = self.render([*before, turn, *new], generation_prompt=True)
        return self._behind_turns(rendered, self.render([*before, turn]), finished)

    def _behind_turns(self, rendered: str, until_turn: str, finished: bool) -> list[int]:
        """Ids behind as many ends of turns as `until_turn` has."""
        told = self._upto_end(rendered, until_turn.count(self.turn_end))
        return self._behind_turn(rendered[len(told) :], finished)

    def bridge(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], new: Sequence[Message]
    ) -> Suffix | None:
        """What the family's renderer appends behind a sampled turn; None without one, or where it
        leaves it to the template."""
        if self.renderer is None:
            return None
        ids = bridged(self.renderer, prompt_ids, sampled_ids, new, self.tools)
        return None if ids is None else Suffix("bridged", ids)

    def drop_renderer(self, why: str) -> None:
        """Leaves all to the template from now on."""
        self.renderer, self.renderer_note = None, why

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether a sampled turn ends as the template ends one; a turn that was cut off or ended by
        another stop token is ended by the environment."""
        return bool(token_ids) and token_ids[-1] == self._turn_end_id

    def _upto_end(self, text: str, count: int) -> str:
        """The text up to the end of its `count`-th turn."""
        parts = text.split(self.turn_end, count)
        if len(parts) <= count or not count:
            raise ChatFormatError(
                f"a turn must end with {self.turn_end!r} wherever it stands: the chat template "
                f"wrote {text.count(self.turn_end)} such ends in place of {max(count, 1)}. Give a "
                "template that renders turns alike."
            )
        return text[: len(text) - len(parts[-1])]

    def _behind_turn(self, text: str, finished: bool) -> list[int]:
        """Ids of text that follows the end of a turn, and of that end, where it was not sampled."""
        # Behind the token that is there: some tokenizers begin every text with a space.
        anchor = self.encode(self.turn_end)
        ids = self.encode(self.turn_end + text)
        if ids[: len(anchor)] != anchor:
            raise ChatFormatError(
                f"turn_end={self.turn_end!r} must keep its tokens whatever follows: with "
                f"{text[:40]!r} behind it they differ. Make it a special token of the tokenizer."
            )
        return ids[len(anchor) :] if finished else ids

    def _find_turn_end(self) -> tuple[str, int]:
        """What ends an assistant's turn: the text of a token, and its id."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "qqq"}]
        rendered = self.render(turns)
        tail = rendered[rendered.rfind("qqq") + 3 :] if "qqq" in rendered else ""
        found = [token for token in self._special_texts if tail.lstrip().startswith(token)]
        if not found:
            raise ChatFormatError(
                f"the end of an assistant's turn, {tail[:40]!r}, must begin with a special token: "
                "what ends the sampled turn would not be what the chat template writes, and the "
                "next turn would be read after another text. Give a template that ends turns with "
                "the EOS token."
            )
        return found[0], self.encode(found[0])[-1]

    # --- replies -----------------------------------------------------------------------------

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        finish: str = "stop",
        first_call: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> ParsedReply:
        """A sampled turn, read. `prompt_ids`: what it answers, whose end may open its thoughts."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        asked = str(self.tokenizer.decode(list(prompt_ids)[-16:])) if prompt_ids else ""
        return parse_reply(
            text, syntax=self.syntax, finish=finish, first_call=first_call,
            tools=self.tool_names if self.tools else None,
            opens_thoughts=asked.rstrip().endswith(_THOUGHTS),
        )  # fmt: skip


def _eos(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
