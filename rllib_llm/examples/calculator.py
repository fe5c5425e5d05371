"""rllib_llm/Calculator-v0: sums that want a calculator, the smallest task with a tool.

"347*2958=" is too hard for a small model alone. It may call the calculator, read the result and
repeat it. Everything is generated: `build_model` makes the model and a tokenizer whose
chat template knows tools, `sft_rows` conversations to start it with, few of which use the tool.
"""

from __future__ import annotations

import ast
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.settings import declared
from rllib_llm.envs.tools import FunctionTool
from rllib_llm.examples.characters import (
    SftTurn,
    chat_tokenizer,
    says_answer,
    sft_conversations,
    small_llama,
)
from rllib_llm.shared.errors import require
from rllib_llm.shared.setting import Settings, setting

MODEL = "rllib_llm.examples.calculator.build_model"
_PIECES = ("calculator", '{"expression": "')
_CHARACTERS = "0123456789+-*=. "
_STREAM = 41  # key of the problems' random numbers


class CalculatorSums(Settings):
    """How hard the sums are."""

    digits: tuple[int, int] = setting((3, 4), "the least and the most digits of a number")
    operations: str = setting("+-*", "any of '+', '-' and '*', as one text")
    num_problems: int = setting(20_000, "the size of the data set", least=1)


class Calculator(ConversationEnv):
    """A sum, a calculator, and 1 where the last words are the right number."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "model": MODEL,
        "eval_fraction": 0.05,
        "max_turns": 3,
        **declared(CalculatorSums),
    }

    def tools(self) -> Sequence[Any]:
        return [calculator]

    def rows(self) -> Sequence[Mapping[str, Any]]:
        settings = self.settings
        return problems(settings["num_problems"], settings["digits"], settings["operations"])

    def score(self, conversation: Conversation) -> float:
        return says_answer(conversation)


def problems(
    num_problems: int = 20_000, digits: Sequence[int] = (3, 4), operations: str = "+-*"
) -> list[dict[str, str]]:
    """Rows {"prompt": "347*2958=", "answer": "1026426"}, each a function of its index alone."""
    least, most = 10 ** (digits[0] - 1), 10 ** digits[1]
    require(1 <= digits[0] <= digits[1], "digits", digits, "be (least, most)", "", "")
    is_known = operations and set(operations) <= set("+-*")
    require(is_known, "operations", operations, "be of '+-*', as one text", "", "")
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
    turns = (
        SftTurn(prompt, {"expression": prompt.removesuffix("=")}, answer, answer)
        for prompt, answer in map(
            itemgetter("prompt", "answer"), problems(num_rows, digits, operations)
        )
    )
    schema = FunctionTool(calculator).schema
    return sft_conversations(turns, num_rows, call_share, schema, _STREAM)


def build_model(
    seed: int = 0, max_len: int = 128, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small Llama with random weights, and its tokenizer; size: see `small_llama`."""
    return small_llama(build_tokenizer(), seed, max_len=max_len, **size)


def build_reader(
    seed: int = 0, max_len: int = 128, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """As `build_model`, with a tokenizer that knows letters: for other tasks beside the sums."""
    return small_llama(build_tokenizer(string.ascii_letters), seed, max_len=max_len, **size)


def build_tokenizer(more_characters: str = "") -> PreTrainedTokenizerFast:
    """One token for each character and for each piece that a call is made of."""
    return chat_tokenizer(_CHARACTERS + more_characters, _PIECES)


_BINARY: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_LENGTH = 200  # characters
_MAX_POWER = 64
_MAX_DIGITS = 400


def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and brackets.

    Args:
        expression: the expression, such as "3 * (4 + 5)".
    """
    require(len(expression) <= _MAX_LENGTH, "the expression", ...,
            f"have at most {_MAX_LENGTH} characters")  # fmt: skip
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        is_small = not isinstance(node.op, ast.Pow) or abs(right) <= _MAX_POWER
        require(is_small, "powers", ..., f"be at most {_MAX_POWER}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def _bounded(value: float) -> float:
    """The value; huge ones would take minutes to write."""
    require(not isinstance(value, complex), "the result", ..., "be a real number")
    is_short = not isinstance(value, int) or value.bit_length() <= _MAX_DIGITS * 3
    require(is_short, "numbers", ..., f"have at most {_MAX_DIGITS} digits")
    return value
