"""Token ids of texts, and which of them lie in a part of the text; chats as the text that their
template writes.

A prompt and its completion are tokenised as one text. Tokenised by itself a completion would begin
with the space that SentencePiece puts in front of every text: "2+2=" and "4" would make "2+2= 4".

A chat template is a program, and only running it tells what it writes. So the text of an
assistant's turn is found by rendering the conversation up to it, with the generation prompt, and
again with it: where one is not the beginning of the other nothing is known, and that is an error.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from jinja2.exceptions import TemplateError

from rllib_llm.data.rows import Rows
from rllib_llm.data.turn_ends import MARKER, Render, TurnEnds, find_turn_ends, special_texts
from rllib_llm.shared.chat_templates import check_variables
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.messages import blamed_on

# A template is a program: beside its own complaints it raises what Python raises.
_TEMPLATES_RAISE = (
    TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError
)  # fmt: skip


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False,
    **settings: Any,
) -> str:  # fmt: skip
    """The messages as the tokenizer's chat template writes them. `generation_prompt`: whether what
    begins the assistant's turn stands at the end; `settings`: see `apply_template`, which also says
    what is raised."""
    settings.update(tokenize=False, add_generation_prompt=generation_prompt)
    return str(apply_template(tokenizer, messages, **settings))


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None,
    refused: type[Problems] = Problems, sees: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """The result of `tokenizer.apply_chat_template`.

    Args:
        tools: JSON schemas that the template is to announce, or the JSON of their list, as data
            sets hold them.
        refused: the class of the error.
        settings: further arguments, and variables of the template.

    Raises:
        Problems: of the class `refused`: no template, or one that refuses the messages.
    """
    require(tokenizer.chat_template, "messages", ..., "become text",
            "the tokenizer has no chat template", "Set chat_template, take an instruction-tuned "
            "model, or write the rows as text", refused)  # fmt: skip
    taken = [
        dict(message) if sees else _as_read(tokenizer, message, refused) for message in messages
    ]
    for message in taken:
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    try:
        listed = json.loads(tools or "[]") if isinstance(tools, str) else list(tools or ())
        return tokenizer.apply_chat_template(taken, tools=listed or None, **settings)
    except _TEMPLATES_RAISE as error:
        roles = [message.get("role") for message in messages]
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise refused(
            f"messages with the roles {roles}", "be what the chat template takes",
            f"it refuses them ({kind}{error})", "Correct them, or set chat_template to another",
        ) from error  # fmt: skip


def row_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's settings of how its chat is rendered: its `tools`, and its `chat_template_kwargs`,
    variables of the template or their JSON, as TRL's data sets hold them."""
    given = row.get("chat_template_kwargs") or {}
    with blamed_on("chat_template_kwargs", given, "be variables of the chat template", remedy=""):
        variables = dict(json.loads(given) if isinstance(given, str) else given)
    check_variables("chat_template_kwargs", variables)
    return {"tools": row.get("tools"), **variables}


def content_text(message: Mapping[str, Any]) -> str:
    """The words of a message, also where it is a list of parts, as OpenAI writes it; raises
    Problems where one is an image or a sound."""
    return "".join(_texts(message, Problems))


def _texts(message: Mapping[str, Any], refused: type[Problems]) -> list[str]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return [] if content is None else [str(content)]
    parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
    for part in parts:
        if part.get("type", "text") != "text" or "text" not in part:
            raise refused(
                f"a part of a message of the role {message.get('role')!r}", "be of the type 'text'",
                "a language model reads nothing else", "Drop the row", str(part)[:60],
            )  # fmt: skip
    return [part["text"] or "" for part in parts]


def _as_read(tokenizer: Any, message: Mapping[str, Any], refused: type[Problems]) -> dict[str, Any]:
    """A copy of the message with its content as the template reads it: text, or a list of parts."""
    content = message.get("content")
    if isinstance(content, Mapping) and message.get("role") != "tool":  # whose answer it may be
        content = [content]
    if not isinstance(content, (str, list, tuple)):
        return dict(message)
    message = {**message, "content": content}
    known = weakref.ref(tokenizer), str(tokenizer.chat_template)
    kinds = _kinds_read(*known, str(message.get("role")))
    texts = _texts(message, refused)
    if "text" in kinds and (isinstance(content, str) or "parts" not in kinds):
        return {**message, "content": "".join(texts)}
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


@functools.lru_cache(64)
def _kinds_read(known: weakref.ref[Any], template: str, role: str) -> tuple[str, ...]:
    """The kinds of content a tokenizer's template reads in a message of this role: "text", "parts"
    or both. `template` makes the cache's entries of two templates differ; the reference keeps no
    tokenizer alive."""
    word, tokenizer = "qqq", known()
    assert tokenizer is not None, "its caller holds it"
    before = {"system": (), "user": ()}.get(role, ({"role": "user", "content": "x"},))
    after = ({"role": "user", "content": "x"},) if role == "system" else ()

    def written(content: Any) -> str:
        chat = [*before, {"role": role, "content": content}, *after]
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False))
        except _TEMPLATES_RAISE:
            return ""

    text, parts = written(word), written([{"type": "text", "text": word}])
    if word in text:
        return ("text", "parts") if parts == text else ("text",)
    return ("parts",) if word in parts and repr(word) not in parts else ("text",)


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates take them: OpenAI writes them as
    JSON text."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (KeyError, TypeError, ValueError, RecursionError):  # also an object already
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


Span = tuple[int, int]  # of characters, the end excluded


def check_text(text: Any) -> None:
    """Raises Problems where it is no text that UTF-8 can write."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        reason = error if isinstance(text, str) else f"it is {type(text).__name__}"
        name, remedy = f"the text {str(text)[:60]!r}", "Correct the row, or drop it"
        raise Problems(name, "be text that UTF-8 can write", reason, remedy) from error


def broken_up(value: Any, special: Sequence[str] = ()) -> Any:
    """The value, no text in it one of `special`, or with half of a character (a lone surrogate)."""
    if isinstance(value, str):
        value = value.encode(errors="replace").decode()
        for token in special:
            value = value.replace(token, f"{token[0]} {token[1:]}")
        return value
    if isinstance(value, Mapping):
        return {broken_up(key, special): broken_up(part, special) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [broken_up(part, special) for part in value]
    return value


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that begins a sequence: one BOS where the tokenizer adds one, never an EOS."""
    return encode_spans(tokenizer, text, [], add_special_tokens=True)[0]


def encode_ended(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Ids of `prompt + completion` with one EOS at the end, and how many belong to the prompt.

    A token that holds characters of both is the completion's: the model has to write it.
    """
    check_text(prompt)
    check_text(completion)
    text = prompt + completion
    span = (len(prompt), len(text))
    ids, targets = encode_spans(tokenizer, text, [span], add_special_tokens=True)
    border = targets.index(True) if any(targets) else len(ids)
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return ids, min(border, len(ids) - 1)


def encode_spans(
    tokenizer: Any, text: str, spans: Sequence[Span], *, add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """Ids of `text`, without an EOS or second BOS that the tokenizer adds, and whether each one
    ends in a span.

    Tokenizers without offsets (those not made with the `tokenizers` library) tell where a span
    begins by the tokens that the text has in common with its beginning alone.
    """
    check_text(text)
    if tokenizer.is_fast and spans:
        settings = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": True}
        encoded = tokenizer(text, **settings)
        ids = list(encoded["input_ids"])
        # Some special tokens take in the white space around them, such as Phi-3's <|end|>.
        strips = {i for i, t in tokenizer.added_tokens_decoder.items() if t.lstrip or t.rstrip}
        ends = [
            begin + len(text[begin:end].rstrip()) if token in strips else end
            for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        stay = _as_one_text(tokenizer, text, ids) if add_special_tokens else slice(None)
        return ids[stay], [any(start < end <= stop for start, stop in spans) for end in ends[stay]]

    def encode(part: str) -> list[int]:
        ids = list(tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"])
        return ids[_as_one_text(tokenizer, part, ids)] if add_special_tokens else ids

    ids = encode(text)
    inside = [False] * len(ids)
    for start, stop in spans:
        first, last = (common_prefix_len(encode(text[:edge]), ids) for edge in (start, stop))
        inside[first:last] = [True] * (last - first)
    return ids, inside


def common_prefix_len(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many ids, or characters, both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def keep_end(ids: list[int], max_length: int, starts: Collection[int | None]) -> list[int]:
    """The last `max_length` ids; a first one that is among `starts` (BOS, CLS) is kept, since
    models read all else after it."""
    if len(ids) <= max_length:
        return ids
    if ids[0] in starts and max_length > 1:
        return [ids[0], *ids[len(ids) - max_length + 1 :]]
    return ids[len(ids) - max_length :]


def _as_one_text(tokenizer: Any, text: str, ids: list[int]) -> slice:
    """Which of the ids of a text stay: not an added EOS, nor an added BOS before the text's own."""
    eos, has_two = tokenizer.eos_token_id, has_own_start(tokenizer, text, ids)
    has_end = eos is not None and ids[-1:] == [eos] and not text.endswith(tokenizer.eos_token)
    return slice(int(has_two), len(ids) - has_end)


def has_own_start(tokenizer: Any, text: str, ids: Sequence[int]) -> bool:
    """Whether the first of a text's ids is an added BOS or CLS before the text's own, of which one
    is to stay; warns then."""
    for token in filter(None, (tokenizer.bos_token, tokenizer.cls_token)):
        if text.startswith(token) and [*ids[:2]] == tokenizer.convert_tokens_to_ids([token] * 2):
            warnings.warn(f"A text begins with {token}, and the tokenizer adds one: one is kept.",
                          stacklevel=2)  # fmt: skip
            return True
    return False


def encode_whole(tokenizer: Any, text: str, other: str | None = None, **how: Any) -> list[int]:
    """Ids of a text, or of two, between what the tokenizer puts around them: one BOS or CLS."""
    ids = list(tokenizer(text, other, **how)["input_ids"])
    return ids[has_own_start(tokenizer, text, ids) :]


def vocabulary_hash(tokenizer: Any) -> str:
    """A hash of the tokenizer's vocabulary: where it is the same, ids mean the same tokens."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    text = "\n".join(f"{number} {token}" for token, number in pairs)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


Messages = list[dict[str, Any]]

_HALF_MARK = re.compile(r"(?:[<\[][^<>\[\]]*)?\Z")  # at the end of a text
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPLIT_IT = (
    "Make each assistant turn a row ({prompt: the messages before it, completion: [it]}), or set "
    "chat_template to one that renders turns alike wherever they stand"
)


def as_turns(prompt: Any, answer: Any) -> tuple[Messages, int]:
    """The conversation of a prompt and what answers it, and how many of its turns are the prompt.

    Either is text or a list of messages; a text is the user's turn or the assistant's. An answer
    may repeat the prompt in front, as many preference data sets do.

    Raises:
        Problems: an answer that begins with another turn than the assistant's and does not hold
            the prompt.
    """
    turns = list(answer) if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    for part in (turns, prompt if isinstance(prompt, list) else ()):
        check_messages(part)
    if prompt is None:
        return turns, num_before_answer(turns)
    before = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if [_plain(turn) for turn in turns[: len(before)]] == [_plain(turn) for turn in before]:
        return turns, len(before)
    if turns and turns[0]["role"] == "assistant":
        return before + turns, len(before)
    if isinstance(prompt, str) and _plain(before[0]) in [_plain(turn) for turn in turns[:-1]]:
        return turns, num_before_answer(turns)  # a system message, then the prompt
    first = f"they begin with {turns[0]['role']!r}" if turns else "there are none"
    raise Problems("prompt", "be followed or repeated by the messages that answer it", first,
                   "Let the answer begin with the assistant's turn", str(prompt)[:60])  # fmt: skip


def check_messages(messages: Iterable[Any]) -> None:
    """Raises Problems where they are no list, or one is no message with a role."""
    written = "Write [{role: user, content: ...}, ...], and calls as [{function: {name: ...}}]"
    require(isinstance(messages, Iterable), "messages", messages, "be a list", "", written)
    for message in messages:
        if not is_message(message):
            name = f"the message {str(message)[:60]!r}"
            raise Problems(name, "have 'role' and 'content'", "", written)


def is_message(given: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is a message: it names its role, and what calls it makes are objects."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        return False
    calls = given.get("tool_calls") or ()
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    return is_list and all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)
        for call in calls
    )


def _plain(turn: Mapping[str, Any]) -> tuple[str, str]:
    """Role and words; images among its parts are passed over."""
    content = turn.get("content")
    if isinstance(content, list | tuple):
        content = [p for p in content if not isinstance(p, Mapping) or p.get("type") != "image"]
    return str(turn.get("role")), content_text({**turn, "content": content}).strip()


def num_before_answer(turns: Sequence[Any]) -> int:
    """Turns before the last run of the assistant's."""
    said = (isinstance(turn, Mapping) and turn.get("role") == "assistant" for turn in turns[::-1])
    return len(turns) - sum(itertools.takewhile(bool, said))


def encode_chat(
    tokenizer: Any, messages: Messages, num_prompt_turns: int = 0, **settings: Any
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and a mask of the assistant's: from turn `num_prompt_turns` on,
    its text and its end-of-turn token, which are the tokens that a rollout samples, also where the
    template leaves the last turn open; without such a token, the template's text after the turn,
    or EOS where there is none.

    A template's own `{% generation %}` marks are believed. An older turn that the template changes
    is only read, with a warning.

    Raises:
        Problems: no assistant turn, or a template that does not show where the last one is.
    """
    check_messages(messages)
    messages = list(messages)
    roles = [message["role"] for message in messages]
    own = [i for i, role in enumerate(roles) if i >= num_prompt_turns and role == "assistant"]
    require(own, f"messages with the roles {roles}", ..., "have a turn of 'assistant' to learn "
            "from", "none follows the prompt", "Drop the row, or rename its roles")  # fmt: skip
    if _MARK.search(str(tokenizer.chat_template or "")):
        return _encode_marked(tokenizer, messages, own[0], settings)
    render: Any = functools.partial(render_chat, tokenizer, **settings)
    text, ends = render(messages), _turn_ends(render, tokenizer, messages)
    *older, newest = (_span(render, messages, turn, text, ends) for turn in own)
    if newest is None or (newest[1] <= newest[0] and content_text(messages[own[-1]]).strip()):
        raise _not_shown(render, messages, own[-1], text)
    spans = [span for span in older if span]
    if len(spans) < len(older):
        warnings.warn("The chat template changes turns that are not the newest: such a turn is "
                      f"not learnt from. {_SPLIT_IT}.", stacklevel=2)  # fmt: skip
    start, stop = newest
    end = ends.of(messages[own[-1]]) or (tokenizer.eos_token or "" if stop <= start else "")
    if own[-1] == len(messages) - 1 and not text[:stop].endswith((*filter(None, ends),)):
        text = text[: max(start, stop)] + end  # the template leaves the newest turn open
        stop = len(text)
    return encode_spans(tokenizer, text, [*spans, (start, stop)], add_special_tokens=False)


def encode_judged_chat(
    tokenizer: Any, messages: Sequence[Any], *, finished: bool = True, **settings: Any
) -> list[int]:
    """Ids of a conversation up to the token that ends its last turn, as reward models of ours read
    it: a sampled completion has nothing after that token, and without it when not `finished`."""
    text = render_chat(tokenizer, messages, **settings)
    trimmed = text.rstrip()
    for end in special_texts(tokenizer):
        if trimmed.endswith(end):
            text = trimmed if finished else trimmed.removesuffix(end)
            break
    check_text(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def turn_start(render: Render, before: Sequence[Mapping[str, Any]], rendered: str) -> int | None:
    """Where the assistant's turn that follows `before` begins in a rendered conversation; None
    where the template does not show it."""
    asked, unasked = render(before, generation_prompt=True), render(before)
    common = common_prefix_len(asked, rendered)
    if common == len(asked):
        return common
    last = content_text(before[-1]).strip() if before else ""
    # Some templates write a generation prompt after every conversation.
    begun = len(unasked) if asked != unasked else asked.rfind(last) + len(last)
    if common >= begun:  # whole marks: <think> and <tool_call> begin alike
        return len(_HALF_MARK.sub("", rendered[:common]))
    # Others change the turns before an answer: what they write before any answer begins it.
    prompt = asked[common_prefix_len(asked, unasked) :]
    plain = render([*before, {"role": "assistant", "content": MARKER}])
    start = plain.rfind(prompt) + len(prompt)
    return start if prompt and prompt in plain and rendered.startswith(plain[:start]) else None


def _span(render: Render, messages: Messages, turn: int, text: str, ends: TurnEnds) -> Span | None:
    """Characters of `text`, the whole conversation rendered, that the assistant samples: what the
    template writes after the turn's end (usually a line break) is not the assistant's. None where
    the text does not show them."""
    start, upto = turn_start(render, messages[:turn], text), render(messages[: turn + 1])
    if start is None:
        return None
    shown, written = ends.split(upto, start, messages[turn])
    if end_and_rest := ends.behind(text, shown):
        return start, len(shown + end_and_rest[0])
    if not written and text.startswith(upto):
        return start, len(shown)
    # Some templates write a newest turn in another way, e.g. with its thoughts.
    content = content_text(messages[turn]).strip()
    place = text.find(content, start)
    if place < 0 or text[start:place].strip():
        return None
    stops = ((text.find(end, place + len(content)), len(end)) for end in ends)
    return start, sum(min((stop for stop in stops if stop[0] >= 0), default=(start, 0)))


def end_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokens that end a completion: EOS, padding, the ends of the template's turns."""
    ids = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    if tokenizer.chat_template:
        ends = _turn_ends(functools.partial(render_chat, tokenizer), tokenizer)
        ids |= {*tokenizer.convert_tokens_to_ids([*filter(None, ends)])}
    return ids


def _turn_ends(render: Render, tokenizer: Any, messages: Sequence[Any] = ()) -> TurnEnds:
    """The ends of turns that the chat template writes; empty where no special token ends one."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    names = (call.get("function", call).get("name") for call in calls)
    try:
        return find_turn_ends(tokenizer, render, next(names, None), refused=Problems)
    except Problems:
        return TurnEnds("", "", "")


def _not_shown(render: Render, messages: Messages, turn: int, text: str) -> Problems:
    part = render(messages[:turn], generation_prompt=True)
    same = common_prefix_len(part, text)
    return Problems(
        f"messages[{turn}]", "be rendered by the chat template as it is before an answer",
        f"there it writes {part[same : same + 40]!r} where the whole conversation has "
        f"{text[same : same + 40]!r}, so that the assistant's tokens are not known", _SPLIT_IT,
    )  # fmt: skip


def _encode_marked(
    tokenizer: Any, messages: Messages, first_turn: int, settings: Mapping[str, Any]
) -> tuple[list[int], list[bool]]:
    encoded = apply_template(
        tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True, **settings
    )
    ids, marked = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    if any(message["role"] == "assistant" for message in messages[:first_turn]):
        render: Any = functools.partial(render_chat, tokenizer, **settings)
        text = render(messages)
        start = turn_start(render, messages[:first_turn], text)
        if start is None:
            raise _not_shown(render, messages, first_turn, text)
        span = (start, len(text))
        _, later = encode_spans(tokenizer, text, [span], add_special_tokens=False)
        marked = [one and other for one, other in zip(marked, later, strict=True)]
    require(any(marked), "messages", ..., "have tokens that the chat template marks with "
            "{% generation %}", "it marks none", "Put the marks around the assistant's turns, or "
            "remove them all")  # fmt: skip
    return ids, marked


_REASONING = "reasoning_content"
_ASK: dict[str, Any] = {"role": "user", "content": "x"}
_SAY: dict[str, Any] = {"role": "assistant", "content": "y", _REASONING: "qqq"}


class Part(NamedTuple):
    """A training row of a conversation: its first `end` messages, of which the assistant's turns
    from message `start` on are learnt from."""

    row: int
    start: int
    end: int


def parts_of_rows(rows: Rows, tokenizer: Any) -> list[Part] | None:
    """The training rows of conversations with thoughts; None if rows are used as they are.

    Many templates write the thoughts of the newest turn alone:

        said in turn 1:   [ask 1] <think> a </think> answer 1
        said in turn 2:   [ask 1] answer 1 [ask 2] <think> b </think> answer 2

    What turn 1 says is learnt from where it stands as it was said, in a separate row. In the
    second row it is only read; a target there would teach the model not to think.
    """
    if "messages" not in rows.columns or _REASONING not in str(tokenizer.chat_template):
        return None
    # Whether the template writes the thoughts of the newest turn, and not those of old ones.
    older: Sequence[Mapping[str, Any]] = [_ASK, _SAY, _ASK, {**_SAY, _REASONING: ""}]
    thoughts = str(_SAY[_REASONING])
    is_shown = thoughts in render_chat(tokenizer, [_ASK, _SAY])
    if not is_shown or thoughts in render_chat(tokenizer, older):
        return None
    parts = []
    for place, row in enumerate(rows):
        try:
            borders = borders_of_parts(tokenizer, list(row["messages"] or ()), row_settings(row))
        except Problems as error:
            raise error.within(f"row {place} of {rows.description}") from error
        parts += [Part(place, *each) for each in borders]
    return parts


def borders_of_parts(
    tokenizer: Any, messages: Messages, settings: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """(start, end) of each training row of a conversation, see `Part`; of no messages one."""
    check_messages(messages)
    parts: list[tuple[int, int]] = []
    rendered = functools.cache(lambda end: render_chat(tokenizer, messages[:end], **settings))
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            end = _shown_until(rendered, messages, turn)  # the longest that shows it
            if not parts or end != parts[-1][1]:
                parts.append((turn, end))
    return parts or [(0, len(messages))]


def _shown_until(rendered: Callable[[int], str], messages: Messages, turn: int) -> int:
    """The longest prefix of messages whose rendering still shows a turn's thoughts; all messages
    for a turn without. `rendered`: so many messages as the template writes them."""
    thoughts = str(messages[turn].get(_REASONING) or "").strip()
    if not thoughts:
        return len(messages)
    before, newest = rendered(turn), rendered(turn + 1)
    start = newest.rfind(thoughts)
    if start >= (len(before) if newest.startswith(before) else 0):
        shown = newest[: start + len(thoughts)]
        ends = range(len(messages), turn, -1)
        return next(end for end in ends if rendered(end).startswith(shown))
    raise Problems(
        f"messages[{turn}]", "have its thoughts written by the chat template where it is the "
        "newest turn", f"{thoughts[:40]!r} would never be learnt",
        f"Give a template that writes {_REASONING}, or put the thoughts into the content",
    )  # fmt: skip
