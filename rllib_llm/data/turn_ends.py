"""The tokens that end an assistant's turn, found by what a chat template writes after one.

    <|im_start|>assistant\\nIt is 2.<|im_end|>\\n     a special token ends it
    <|assistant|>It is 2.<|user|>                   what the next turn begins with ends it

A policy stops at them, and supervised fine-tuning teaches it to.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rllib_llm.shared.errors import Problems

Message = Mapping[str, Any]
Render = Callable[..., str]
"""Of messages, and whether with `generation_prompt`: the text; raises Problems."""
MARKER = "qqq"
_MARK = re.compile(r"[<\[][|｜].+[|｜][>\]]")


class TurnEnds(NamedTuple):
    """Tokens that end an assistant's turn: `text` of an old turn without calls, `last` of the
    newest one, `calls` of one with tool calls. One and the same in most templates."""

    text: str
    last: str
    calls: str

    def of(self, turn: Message) -> str:
        """The token that ends a turn when it is the newest."""
        return self.calls if turn.get("tool_calls") else self.last

    def split(self, rendered: str, start: int, turn: Message) -> tuple[str, str]:
        """A conversation up to the end of its last turn, which begins at `start`, and that end, ""
        where none is written."""
        others = (self.last, self.text) if turn.get("tool_calls") else (self.text, self.calls)
        for end in (self.of(turn), *others):
            place = rendered.rfind(end, start)
            if place >= 0:
                return rendered[:place], end
        return rendered.rstrip(), ""

    def behind(self, rendered: str, beginning: str) -> tuple[str, str] | None:
        """The turn's end after `beginning`, and the text after that end."""
        if not rendered.startswith(beginning):
            return None
        rest = rendered[len(beginning) :]
        for end in sorted({*self}, key=len, reverse=True):
            if rest.startswith(end):
                return end, rest[len(end) :]
        return None


def find_turn_ends(
    tokenizer: Any, render: Render, tool: str | None, refused: type[Problems]
) -> TurnEnds:
    """The ends of turns as `render` writes them; `tool`: the name of one that it announces.

    Raises:
        Problems: of the class `refused`: no special token ends a turn.
    """
    user, says = {"role": "user", "content": "x"}, {"role": "assistant", "content": MARKER}
    alone, history = render([user, says]), render([user, says, user])
    tail, old_tail = _behind(alone, MARKER), _behind(history, MARKER)
    special, eos = special_texts(tokenizer), str(tokenizer.eos_token)
    last = _first_end(special, eos, tail.lstrip())
    # Where nothing ends the newest turn, what the next one begins with ends it.
    text = _first_end(special, eos, old_tail.lstrip() if last else old_tail)
    last = last or text
    if text is None or last is None:
        raise refused(
            f"the end of an assistant's turn, {tail[:40]!r},", "begin with a special token",
            "what ends the sampled turn would not be what the chat template writes",
            "Give a template that ends turns with the EOS token",
        )  # fmt: skip
    calls = last
    if tool is not None:
        with contextlib.suppress(Problems):  # the proof says what becomes of calls
            calls = _end_of_calls(special, eos, render, tool) or last
    return TurnEnds(text, last, calls)


def special_texts(tokenizer: Any) -> list[str]:
    """The special tokens of more than one character, the longest first; also those that the
    vocabulary does not call so, such as DeepSeek's <｜User｜>, and that no text has by chance."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {str(token) for token in added if token.special or _MARK.fullmatch(str(token))}
    texts |= {*tokenizer.all_special_tokens}
    return sorted((text for text in texts if len(text) > 1), key=len, reverse=True)


def example_calls(
    name: str, text: str, answer: str, count: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A turn with so many calls of one tool with `text`, followed by the tool's answers."""
    function = {"name": name, "arguments": {"text": text}}
    ids = [f"call0000{i}" for i in range(count)]
    calls = [{"type": "function", "id": i, "function": function} for i in ids]
    results = [{"role": "tool", "name": name, "tool_call_id": i, "content": answer} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}, results


def _end_of_calls(special: list[str], eos: str, render: Render, tool: str) -> str | None:
    calls, results = example_calls(tool, MARKER, "y")
    user = {"role": "user", "content": "x"}
    alone = render([user, calls])
    history = render([user, calls, *results], generation_prompt=True)
    start = alone.rfind(MARKER)
    place = alone.find(eos, start)
    if place >= 0 and history.startswith(alone[:place] + eos):
        return eos
    alone = alone.rstrip()
    ends = [token for token in special if alone.endswith(token)]
    if ends and len(alone) - len(ends[0]) > start:
        return ends[0]
    return _first_end(special, eos, history[len(alone) :]) if history.startswith(alone) else None


def _first_end(special: list[str], eos: str, tail: str) -> str | None:
    """The token that a text begins with which follows a turn: EOS where it is among the special
    tokens that stand there together, else the first of them."""
    run, rest = [], tail
    while found := next((t for t in special if rest.startswith(t)), None):
        run.append(found)
        rest = rest[len(found) :]
    return eos if eos in run else run[0] if run else None


def _behind(text: str, part: str) -> str:
    """The text after the last `part`; "" without one."""
    return text[text.rfind(part) + len(part) :] if part in text else ""
