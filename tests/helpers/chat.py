"""Conversations and chat templates, small enough to write down which characters are the assistant's."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>"
    "{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}{{ '\\n' }}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(thought){% endif %}"
    "{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>(th{% endif %}"
)
"""Writes the thought of the last turn alone, as Qwen3's does; the prompt begins one."""

BROKEN = "{{ raise_exception('roles must alternate') }}"

TWO_TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes", "tool_calls": None},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def byte_tokenizer(**special):
    """One token per byte, 0-255 in the order of the byte-level alphabet; special tokens behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def learned(tokenizer, ids):
    """The text of a block, and its characters with a dot in the place of each that is not learned."""
    text = tokenizer.decode([~i if i < 0 else i for i in ids.tolist()])
    return text, "".join("." if i < 0 else c for i, c in zip(ids.tolist(), text, strict=True))
