"""A tiny model for each family of templates, and an environment that talks to it."""

from __future__ import annotations

import functools

from rllib_llm.envs.conversation import ConversationEnv, Response
from tests.conversations.scripted import add
from tests.conversations.templates import FAMILIES, family_tokenizer
from tests.tiny_models import llama


def build(family):
    tokenizer = family_tokenizer(family)
    model = llama(
        vocab_size=len(tokenizer), max_position_embeddings=768, hidden_size=32,
        intermediate_size=64, attention_dropout=0.0, pad_token_id=0, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return model, tokenizer


build_chatml, build_llama3, build_qwen3, build_mistral, build_gemma = (
    functools.partial(build, family) for family in FAMILIES
)
PROMPTS = [{"prompt": f"How are you, {name}?"} for name in ("Ann", "Bo", "Cy", "Di")]


class Chatty(ConversationEnv):
    """Answers every turn, now as a user, now as a tool; three turns make a conversation."""

    defaults = {"prompts": PROMPTS, "max_tokens": 700, "shuffle": False}

    def tools(self):
        return [add]

    def respond(self, conversation):
        turn = conversation.num_turns
        result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
        says = [result] if turn % 2 else "And now?"
        return Response(says, reward=0.5, done=turn == 3)

    def score(self, conversation):
        return float(len(conversation.reply.text) % 3)
