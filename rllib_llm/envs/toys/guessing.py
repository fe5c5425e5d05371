"""rllib_llm/Guessing-v0: twenty questions of two policies, small. Both have to learn.

The asker says digits until it has found a secret one. The answerer is shown the secret beside each
guess, "7:5", and is to say ">", "<" or "=": where the secret lies. The asker earns 1 for finding
it, less a little for each question; the answerer the share of its answers that were right. An asker
learns little from an answerer that errs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.conversations.chat_format import Message
from rllib_llm.envs import conversation_settings
from rllib_llm.envs.conversation import Response
from rllib_llm.envs.self_play import Game, SelfPlayEnv
from rllib_llm.envs.toys.characters import chat_tokenizer, small_llama

MODEL = "rllib_llm.envs.toys.guessing.build_model"
_ASK = "?"
_HIGHEST = 9


class Guessing(SelfPlayEnv):
    """One digit is to be found in `max_turns` questions."""

    players = ("asker", "answerer")
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": MODEL,
        "max_turns": 4,
        "cost": 0.05,  # of a question
        "eval_fraction": 0.0,
    }

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": _ASK, "secret": secret} for secret in range(1, _HIGHEST + 1)]

    def relay(self, player: int, game: Game) -> Response:
        reply = game.conversation(player).reply
        assert reply is not None, "the player has spoken"
        secret = int(game.task["secret"])
        if player == 0:
            guess = int(reply.content) if reply.content in list("123456789") else None
            game.state["guess"] = guess
            cost = -float(self.settings["cost"])
            if guess is None:  # the answerer has nothing to compare
                return Response(reward=cost, done=True)
            game.state["found"] = guess == secret
            return Response(f"{secret}:{guess}", reward=cost)
        right = sign(secret, game.state["guess"])
        answers = game.state.setdefault("answers", [])
        answers.append(float(reply.content == right))
        return Response(reply.content, done=game.state["found"])

    def scores(self, game: Game) -> Sequence[float | None]:
        answers = game.state.get("answers")
        found = float(game.state.get("found", False))
        return found, sum(answers) / len(answers) if answers else 0.0


DEFAULTS: dict[str, Any] = {**conversation_settings.DEFAULTS, **Guessing.defaults}


def create(env_config: Mapping[str, Any]) -> Guessing:
    """The environment; its settings and their defaults are `DEFAULTS`."""
    return Guessing(env_config)


def sign(secret: int, guess: int) -> str:
    """Where the secret lies."""
    return "=" if secret == guess else ">" if secret > guess else "<"


def sft_rows(num_rows: int = 2000, skill: float = 0.5, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of both players, of whose turns a share of `skill` is as it should be."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for place in range(num_rows):
        secret = draw.randint(1, _HIGHEST)
        game = _game(secret, skill, draw)
        if place % 2:
            rows.append({"messages": game})
            continue
        guess = draw.randint(1, _HIGHEST)
        said = sign(secret, guess) if draw.random() < skill else draw.choice("<>=")
        rows.append({"messages": [_user(f"{secret}:{guess}"), _assistant(said)]})
    return rows


def _game(secret: int, skill: float, draw: random.Random) -> list[Message]:
    """The asker's side of a game with right answers."""
    low, high = 1, _HIGHEST
    messages = [_user(_ASK)]
    for _ in range(4):
        guess = (low + high) // 2 if draw.random() < skill else draw.randint(1, _HIGHEST)
        messages.append(_assistant(str(guess)))
        if guess == secret:
            break
        messages.append(_user(sign(secret, guess)))
        low, high = (max(low, guess + 1), high) if secret > guess else (low, min(high, guess - 1))
    return messages[:-1] if messages[-1]["role"] == "user" else messages


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def build_model(
    seed: int = 0, hidden_size: int = 64, num_layers: int = 2, num_heads: int = 4, max_len: int = 64
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small Llama with random weights, drawn with `seed`, and its tokenizer: a token a sign."""
    tokenizer = chat_tokenizer("123456789<>=:?", ())
    model = small_llama(
        tokenizer, seed, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
        max_len=max_len,
    )  # fmt: skip
    return model, tokenizer
