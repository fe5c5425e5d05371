"""How a conversation becomes tokens: the first prompt, the suffix of each further turn, replies.

A chat template is a program that renders whole conversations. What the environment says is the
part that rendering it adds at the end:

    G        = render(before, generation prompt)            what the assistant answered
    rendered = render(before + its turn + new, generation prompt)
    suffix   = rendered after G + what it said             where that is how it begins,
             = rendered after the end of its turn          where the turn is written otherwise, but
                                                            nothing before its end has changed,
             = none                                         where the template drops or changes what
                                                            was said: a path of its own begins

Of a family that the package `renderers` knows the suffix is the renderer's, where it has one.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rllib_llm.conversations.tool_calls import (
    SYNTAXES,
    THINK,
    THINK_DEFAULT,
    ParsedReply,
    parse_reply,
    syntax_of,
)
from rllib_llm.data.encoding import broken_up, render_chat, turn_start
from rllib_llm.data.turn_ends import MARKER, example_calls, find_turn_ends, special_texts
from rllib_llm.shared.chat_templates import check_variables
from rllib_llm.shared.errors import Problems, require

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
HISTORIES = ("fork", "keep")
AUTO = "auto"


class ChatFormatError(Problems):
    """A template that cannot write a conversation of several turns, or these messages."""


@dataclass(frozen=True)
class Suffix:
    """Ids to append after a turn, and how they were found: see the module's docstring.

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
            as a rule): "fork" begins a new row with what the template writes, "keep" appends to
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
        self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = (), syntax: str | None = None,
        history: str = "fork", stop_token_ids: Sequence[int] | None = None,
        template_settings: Mapping[str, Any] | None = None, renderer: str | None = AUTO,
    ) -> None:  # fmt: skip
        remedy = "Set chat_template (a file, or a text), or take an instruction-tuned model"
        for holds, name, value, rule, instead in (
            (tokenizer.chat_template, "chat_template", None, "be a template", remedy),
            (history in HISTORIES, "history", history, f"be one of {HISTORIES}", ""),
            (syntax in (*SYNTAXES, None), "tool_syntax", syntax, f"be one of {SYNTAXES}", ""),
        ):
            require(holds, name, value, rule, "", instead, ChatFormatError)
        self.tokenizer, self._special_texts = tokenizer, special_texts(tokenizer)
        # Servers describe their tools: like all that others say, without special tokens.
        self.tools = [broken_up(tool, self._special_texts) for tool in tools]
        self.tool_names = frozenset(tool["function"]["name"] for tool in self.tools)
        self.syntax = syntax or syntax_of(str(tokenizer.chat_template))
        # Without tools an answer in JSON is an answer, unless `syntax` says how calls are written.
        self._reads_calls = bool(self.tools) or syntax is not None
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self.history = history
        self._settings = dict(template_settings or {})
        check_variables("template_settings", self._settings, ChatFormatError)
        # For examples the name that is hardest to read.
        self.example_tool = min(
            self.tool_names, key=lambda name: (name.isidentifier(), name), default=None
        )
        self.ends = find_turn_ends(
            tokenizer, self.render, self.example_tool, refused=ChatFormatError
        )
        self.turn_end = self.ends.last
        ids = [self._id_of(end) for end in (self.ends.last, self.ends.calls)]
        ids += [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        ends = stop_token_ids or ids
        self.stop_token_ids = tuple(dict.fromkeys(ends))
        self.renderer, self.renderer_note = family_renderer(tokenizer, renderer, self._settings)

    # --- text --------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], *, generation_prompt: bool = False, sees: bool = False
    ) -> str:
        """The conversation as the template writes it. `sees`: contents are parts, among them
        images.

        Raises:
            ChatFormatError: the template refuses it.
        """
        return render_chat(
            self.tokenizer, messages, tools=self.tools, generation_prompt=generation_prompt,
            refused=ChatFormatError, sees=sees, **self._settings,
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, which already contains its special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def cleaned(self, message: Message) -> dict[str, Any]:
        """The message with its content as valid UTF-8 text. Special tokens quoted in any message
        but the system's, in calls and names too, are broken up, so that no quote can end or begin a
        turn."""
        cleaned = dict(message)
        content = cleaned.get("content")
        if content is not None and not isinstance(content, (str, list)):
            content = json.dumps(content, ensure_ascii=False, default=str)
        cleaned["content"] = content
        special = [] if cleaned.get("role") == "system" else self._special_texts
        return {
            name: value if name == "role" else broken_up(value, special)
            for name, value in cleaned.items()
        }

    # --- tokens ------------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole conversation that the assistant is to answer."""
        return self.encode(self.render(messages, generation_prompt=True))

    def suffix(
        self, before: Sequence[Message], reply: ParsedReply, new: Sequence[Message], *,
        last_id: int | None,
    ) -> Suffix:  # fmt: skip
        """The tokens to append after a sampled turn, or that a new path must begin.

        Args:
            before, new: messages that the turn answered, and that answer it.
            last_id: the turn's last token. Where that is not what the template ends the turn with,
                the end comes first.

        Raises:
            ChatFormatError: the template refuses the messages, or forgets the turn.
        """
        asked = self.render(before, generation_prompt=True)
        turn = reply.as_message()
        rendered = self.render([*before, turn, *new], generation_prompt=True)
        behind = self.ends.behind(rendered, asked + reply.text)
        if behind is not None:
            return Suffix("exact", self._behind_turn(*behind, last_id))
        said, _ = self.ends.split(self.render([*before, turn]), len(asked), turn)
        behind = self.ends.behind(rendered, said) if rendered.startswith(asked) else None
        if behind is not None and reply.reasoning in said[len(asked) :]:
            return Suffix("rewritten", self._behind_turn(*behind, last_id))
        if self.history == "fork":
            return Suffix("fork", [])
        return Suffix("kept", self.written_behind(before, turn, new, last_id=last_id))

    def said(self, before: Sequence[Message], turn: Message) -> str | None:
        """A turn as the policy samples it: what the template writes of it after the generation
        prompt, to the end of the turn. None if the template does not show where the turn begins.

        Where the generation prompt opens thoughts, or writes that there are none, and the
        template leaves them out of this turn, they are closed first.
        """
        asked = self.render(before, generation_prompt=True)
        rendered = self.render([*before, turn])
        start = turn_start(self.render, before, rendered)
        if start is None:
            return None
        written, end = self.ends.split(rendered, start, turn)
        said = written[start:] + (end or self.ends.of(turn))
        closes = thoughts_end(asked) if start < len(asked) else ""
        return f"{closes}\n\n{said}" if closes not in said else said

    def written_behind(
        self, before: Sequence[Message], turn: Message, new: Sequence[Message], *,
        last_id: int | None,
    ) -> list[int]:  # fmt: skip
        """Ids that the template writes after a turn, whatever it makes of the turn itself; see
        `suffix`."""
        rendered = self.render([*before, turn, *new], generation_prompt=True)
        end = self.ends.calls if turn.get("tool_calls") else self.ends.text
        if not turn.get("tool_calls"):  # a turn that no template changes shows where it ends
            plain = {"role": "assistant", "content": MARKER}
            shown = self.render([*before, plain, *new], generation_prompt=True)
            behind = self.ends.behind(shown, shown[: shown.rfind(MARKER) + len(MARKER)])
            if MARKER in shown and behind is not None and rendered.endswith("".join(behind)):
                return self._behind_turn(*behind, last_id)
        ended, here = (self.render(said).count(end) for said in (before, [*before, turn]))
        # What begins the next turn may be what ends this one.
        count = here + (here == ended)
        parts = rendered.split(end, count)
        reason = f"the chat template wrote {len(parts) - 1} such ends in place of {count}"
        require(len(parts) > count, "a turn", ..., f"end with {end!r} wherever it stands", reason,
                kind=ChatFormatError)  # fmt: skip
        return self._behind_turn(end, parts[-1], last_id)

    def bridge(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], new: Sequence[Message]
    ) -> Suffix | None:
        """The tokens that the family's renderer appends after a sampled turn, up to the next
        generation prompt. None without a renderer, where it defers to the template, or where it
        would change the sampled tokens."""
        if self.renderer is None:
            return None
        held = [*prompt_ids, *sampled_ids]
        found = self.renderer.bridge_to_next_turn(
            list(prompt_ids), list(sampled_ids), [dict(message) for message in new],
            tools=[tool["function"] for tool in self.tools] or None,
        )  # fmt: skip
        if found is None or list(found.token_ids[: len(held)]) != held:
            return None
        return Suffix("bridged", [int(token) for token in found.token_ids[len(held) :]])

    def drop_renderer(self, why: str) -> None:
        """Leaves all to the template from now on."""
        self.renderer, self.renderer_note = None, why

    def _behind_turn(self, end: str, text: str, last_id: int | None) -> list[int]:
        """Ids of text that follows the end of a turn, and of that end, where it was not sampled."""
        # Behind the token that is there: some tokenizers begin every text with a space.
        anchor = self.encode(end)
        ids = self.encode(end + text)
        require(ids[: len(anchor)] == anchor, "turn_end", end,
                f"keep its tokens whatever follows, also {text[:40]!r}", "",
                "Make it a special token", ChatFormatError)  # fmt: skip
        closed = {anchor[-1]}
        if end == self.ends.text:  # the newest turn may be closed by another token than old ones
            closed.add(self._id_of(self.ends.last))
        return ids[len(anchor) :] if last_id in closed else ids

    def as_closed(self, token_ids: Sequence[int]) -> list[int]:
        """Ids where what ends the newest turn is what ends an old one."""
        last, text = self._id_of(self.ends.last), self._id_of(self.ends.text)
        return [text if token == last else token for token in token_ids]

    def _id_of(self, token: str) -> int:
        return self.encode(token)[-1]

    @functools.cached_property
    def max_calls(self) -> int | None:
        """Most calls of a turn that the template can write; None: any number."""
        if self.example_tool is None:
            return None
        user, written = {"role": "user", "content": "x"}, [0]
        try:
            for count in (1, 2):
                calls, results = example_calls(self.example_tool, MARKER, "y", count)
                written.append(self.render([user, calls, *results]).count(MARKER))
        except ChatFormatError:
            return 1 if count == 2 else None
        return 1 if written[1] and written[1] == written[2] else None

    # --- replies -----------------------------------------------------------------------------

    def parse(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), **how: Any
    ) -> ParsedReply:
        """Parses a sampled turn. `prompt_ids`: its prompt, which may open the thoughts; `how`: see
        `read`."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        how_decoded = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text = str(self.tokenizer.decode(ids, **how_decoded))
        return self.read(text, thoughts_end=self.thoughts_end(prompt_ids), **how)

    def thoughts_end(self, prompt_ids: Sequence[int]) -> str:
        """See `thoughts_end`."""
        return thoughts_end(str(self.tokenizer.decode(list(prompt_ids)[-16:])))

    def read(self, text: str, *, syntax: str | None = None, **how: Any) -> ParsedReply:
        """The text of a turn, without its end, taken apart. `syntax`: of tool calls, if not the
        template's; `how`: `finish`, `first_call` and `thoughts_end` of `parse_reply`."""
        return parse_reply(
            text, syntax=syntax or self.syntax, tools=self._schemas if self.tools else None,
            max_calls=self.max_calls, reads_calls=self._reads_calls or syntax is not None, **how,
        )  # fmt: skip


def thoughts_end(asked: str) -> str:
    """The mark that ends the thoughts that a generation prompt opens; "" where it opens none."""
    marks, asked = (THINK_DEFAULT, *THINK.values()), asked.rstrip()
    return next((end for start, end in marks if asked.endswith(start)), "")


def family_renderer(
    tokenizer: Any, family: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """The renderer of a model family and its name; (None, why not) where there is none. `family`:
    None, a name such as "qwen3", or "auto", which knows it by the hub id of the tokenizer.

    Raises:
        ImportError: a family is named, and renderers is not installed.
        Problems: renderers does not know the family.
    """
    if family is None:
        return None, "none is wanted"
    name = str(tokenizer.name_or_path)
    if family == AUTO and (name.count("/") != 1 or name.startswith("/")):
        return None, f"{name!r} is no hub id"  # looking it up would import much, and find nothing
    if importlib.util.find_spec("renderers") is None:
        if family == AUTO:
            return None, "the package renderers is not installed"
        raise ImportError(f"renderer={family!r} needs: pip install 'rllib-llm[renderers]'.")
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(name) if family == AUTO else family
    if known is None:
        return None, f"renderers knows no family of {name!r}"
    try:
        config = config_from_name(known)
        return create_renderer(tokenizer, config, chat_template_kwargs=settings or None), known
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        if family == AUTO:
            return None, f"{known} does not suit the tokenizer: {error}"
        rule = f"suit the tokenizer and template_settings={dict(settings)!r}"
        raise Problems("renderer", rule, error, value=family) from error
