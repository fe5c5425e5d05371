"""rllib_llm/Calculator-v0: sums that want a calculator, the smallest task with a tool.

"347*2958=" is beyond what a small model can do in its head. It may call the calculator, read the
result and say it. Everything is generated: `build_model` makes the model and a tokenizer whose
chat template knows tools, `sft_rows` conversations to start it with, few of which use the tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.data.order import permutation
from rllib_llm.envs import conversation_settings
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.rlhf import EnvConfigError
from rllib_llm.envs.tools.calculator import calculator
from rllib_llm.envs.tools.toolbox import FunctionTool

MODEL = "rllib_llm.envs.toys.calculator.build_model"
_END = "<|end|>"
_SPECIAL = ("<pad>", _END, "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_PIECES = ("<tool_call>", "</tool_call>", '{"name": "', "calculator", '", "arguments": ',
           '{"expression": "', '"}}', "Error: ")  # fmt: skip
_CHARACTERS = "0123456789+-*=. "
_TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_STREAM = 41  # key of the problems' random numbers


class Calculator(ConversationEnv):
    """A sum, a calculator, and 1 where the last words are the right number."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "model": MODEL,
        "eval_fraction": 0.05,
        "max_turns": 3,
        "digits": (3, 4),  # of each number, least and most
        "operations": "+-*",
        "num_problems": 20_000,
    }

    def tools(self) -> Sequence[Any]:
        return [calculator]

    def rows(self) -> Sequence[Mapping[str, Any]]:
        settings = self.settings
        return problems(settings["num_problems"], settings["digits"], settings["operations"])

    def score(self, conversation: Conversation) -> float:
        assert conversation.reply is not None, "somebody has spoken"
        return float(conversation.reply.content.strip() == conversation.task["answer"])


DEFAULTS: dict[str, Any] = {**conversation_settings.DEFAULTS, **Calculator.defaults}


def create(env_config: Mapping[str, Any]) -> Calculator:
    """The environment; its settings and their defaults are `DEFAULTS`."""
    return Calculator(env_config)


def problems(
    num_problems: int = 20_000, digits: Sequence[int] = (3, 4), operations: str = "+-*"
) -> list[dict[str, str]]:
    """Rows {"prompt": "347*2958=", "answer": "1026426"}, each a function of its index alone."""
    least, most = 10 ** (digits[0] - 1), 10 ** digits[1]
    if not 0 < least < most or set(operations) - set("+-*") or not operations:
        raise EnvConfigError(
            f"digits={digits!r}, operations={operations!r} must be (least, most) and of '+-*': "
            "they say how hard the sums are. Take (3, 4) and '+-*'."
        )
    generator = torch.Generator().manual_seed(_STREAM)
    numbers = torch.randint(least, most, (num_problems, 2), generator=generator).tolist()
    signs = torch.randint(len(operations), (num_problems,), generator=generator).tolist()
    rows = []
    for (first, second), place in zip(numbers, signs, strict=True):
        expression = f"{first}{operations[place]}{second}"
        rows.append({"prompt": f"{expression}=", "answer": calculator(expression)})
    return rows


def sft_rows(
    num_rows: int = 20_000,
    call_share: float = 0.15,
    digits: Sequence[int] = (3, 4),
    operations: str = "+-*",
) -> list[dict[str, Any]]:
    """Conversations {"messages", "tools"}, of which `call_share` use the calculator; the others
    give the number at once, which a small model cannot learn to do."""
    order = permutation(num_rows, _STREAM, 1).tolist()
    schema = FunctionTool(calculator).schema
    rows = []
    for place, row in zip(order, problems(num_rows, digits, operations), strict=True):
        asked: dict[str, Any] = {"role": "user", "content": row["prompt"]}
        said: dict[str, Any] = {"role": "assistant", "content": row["answer"]}
        messages = [asked, said]
        if place < call_share * num_rows:
            expression = row["prompt"].removesuffix("=")
            called = {"name": "calculator", "arguments": {"expression": expression}}
            call = {"type": "function", "id": "call00000", "function": called}
            messages = [
                asked,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "calculator", "tool_call_id": "call00000",
                 "content": row["answer"]},
                said,
            ]  # fmt: skip
        rows.append({"messages": messages, "tools": [schema]})
    return rows


def build_model(
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_len: int = 128,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small Llama with random weights, drawn with `seed`, and its tokenizer."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_heads, max_position_embeddings=max_len, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config).eval(), tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character and for each piece that a call is made of."""
    entries = [*_SPECIAL, *_PIECES, *_CHARACTERS]
    vocabulary = {token: i for i, token in enumerate(entries)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = "|".join(re.escape(piece) for piece in _PIECES)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pieces}|."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=_END, unk_token="<unk>",
        additional_special_tokens=list(_SPECIAL[3:]), chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
