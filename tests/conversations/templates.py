"""Chat templates after five families, and tokenizers for them, made here and small.

What they have in common with the originals is what matters to a conversation: how turns begin and
end, what is trimmed, where tools stand, and what becomes of old turns.
"""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny_models import llama

_HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOLS = "{% if tools %}Tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n{% endif %}"

CHATML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _HERMES_CALLS
    + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    + _TOOLS
    + "<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Thoughts stand in turns behind the last question only; tool results are the user's, together.
QWEN3 = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role in ('user', 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content.lstrip('\\n') }}" + _HERMES_CALLS + "<|im_end|>\n"
    "{% else %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n<tool_response>' }}\n{{ m.content }}\n</tool_response>"  # \n behind %} is dropped
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# System message and tools stand before the user's last turn.
MISTRAL = (
    "<s>{% set ns = namespace(last=-1, system='') %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
    "[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids of calls have nine characters') }}{% endif %}{% endfor %}"
    "[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if tools %}<start_of_turn>user\n" + _TOOLS + "<end_of_turn>\n{% endif %}"
    "{% for m in messages %}"
    "<start_of_turn>{{ {'assistant': 'model', 'tool': 'user'}.get(m.role, m.role) }}\n"
    "{{ m.content | trim }}" + _HERMES_CALLS + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_SPECIALS = {
    "chatml": ["<|im_start|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "qwen3": ["<|im_start|>"],
    "mistral": ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gemma": ["<bos>", "<start_of_turn>"],
}  # fmt: skip
_ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>", "mistral": "</s>",
         "gemma": "<end_of_turn>"}  # fmt: skip
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA,
}  # fmt: skip
FAMILIES = list(TEMPLATES)
TEXT = [
    "the sum of two numbers is what the tool says it is, and the tool is quick",
    '{"name": "add", "arguments": {"text": "12 + 34"}} <tool_call> </tool_call> <think> </think>',
    "user assistant system tool model good day, what is one and one? 0123456789",
]


@functools.lru_cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, the family's special tokens and template. Mistral's puts a space in
    front of every text, as SentencePiece does; the others work on bytes."""
    specials = ["<pad>", "<unk>", _ENDS[family], *_SPECIALS[family]]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if family == "mistral":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
        letters = [chr(i) for i in range(33, 127)] + ["\n", "\u2581"]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token=_ENDS[family],
        additional_special_tokens=_SPECIALS[family], chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_chat_llama() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A tiny chat model with random weights, whose template knows tools."""
    tokenizer = family_tokenizer("chatml")
    model = llama(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                  max_position_embeddings=1024, bos_token_id=None, pad_token_id=0,
                  eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    return model, tokenizer


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds the numbers of a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "the sum"}},
            "required": ["text"],
        },
    },
}
