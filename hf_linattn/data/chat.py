"""Conversations as tokens: the tokenizer's chat template, and which tokens are the assistant's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import DataError

ROLE = "assistant"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""What a template raises itself, and what its expressions do on messages of another form."""


class ChatTokens:
    """Tokens of conversations, the assistant's as they are and all others as ~token.

    Where the template marks what the assistant generates (`{% generation %}`), its marks decide. Otherwise
    the conversation is written up to each turn of the assistant with the prompt for it, and up to its end:
    what lies between is the assistant's, the end of the turn included. A template that writes earlier turns
    anew once others follow (it leaves their thoughts out) gives a conversation of its own for each turn.

    Args:
        tokenizer: with a chat template.

    Raises:
        DataError: it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                f"the tokenizer {name} has no chat template, and rows of messages need one: give the "
                "tokenizer of a chat model with --tokenizer, or text with --text-column"
            ) from error
        self._tokenizer = tokenizer
        # the marks are found through the characters of each token, which slow tokenizers do not know
        self._marked = bool(tokenizer.is_fast and _GENERATION.search(template))

    def __call__(self, messages: Any, name: str) -> list[NDArray[np.int32]]:
        """Encode a conversation.

        Args:
            messages: {role, content} each.
            name: of the row, for messages.

        Returns:
            Token ids [tokens], one array or several.

        Raises:
            DataError: it is no conversation, the assistant says nothing in it, or the template fails.
        """
        if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get("role") for m in messages):
            raise DataError(f"{name} holds no messages: a list of {{role, content}} is expected")
        turns = [number for number, message in enumerate(messages) if message["role"] == ROLE]
        if not turns:
            raise DataError(
                f"{name} has no message of the {ROLE}, whose tokens are learned: leave such rows out"
            )
        if self._marked:
            return [self._by_marks(messages, name)]
        whole = self._write(messages, name)
        spans = [self._span(messages, turn, whole, name) for turn in turns]
        if None not in spans:
            return [self._encode(whole, [span for span in spans if span is not None])]
        parts = []
        for turn in turns:
            whole = self._write(messages[: turn + 1], name)
            span = self._span(messages[: turn + 1], turn, whole, name)
            if span is None:
                raise DataError(
                    f"{name}: which tokens are the {ROLE}'s cannot be told, as the chat template writes "
                    "the messages before anew: mark them in it with {% generation %}"
                )
            parts.append(self._encode(whole, [span]))
        return parts

    def _by_marks(self, messages: list[dict[str, Any]], name: str) -> NDArray[np.int32]:
        with _explained(name):
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
        mask = np.asarray(encoded["assistant_masks"], dtype=bool)
        if not mask.any():
            raise DataError(f"{name}: the chat template marks no token as the {ROLE}'s")
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        return np.where(mask, ids, ~ids)

    def _write(self, messages: list[dict[str, Any]], name: str, *, prompt: bool = False) -> str:
        with _explained(name):
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return str(text)

    def _span(
        self, messages: list[dict[str, Any]], turn: int, whole: str, name: str
    ) -> tuple[int, int] | None:
        """Find the characters of a turn in the whole text; None where it does not begin as written so far."""
        before = self._write(messages[:turn], name) if turn else ""
        prompt = self._write(messages[:turn], name, prompt=True) if turn else ""
        until = self._write(messages[: turn + 1], name)
        if not (whole.startswith(before) and whole.startswith(until)):
            return None
        # a prompt may begin what the assistant says (<think>), and a finished turn may not
        return _shared(prompt, whole), len(until)

    def _encode(self, text: str, spans: list[tuple[int, int]]) -> NDArray[np.int32]:
        ids = self._ids(text)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            mask[_shared(ids, self._ids(text[:start])) : _shared(ids, self._ids(text[:end]))] = True
        return np.where(mask, ids, ~ids)

    def _ids(self, text: str) -> NDArray[np.int32]:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)


def _shared(one: Sequence[Any] | NDArray[np.int32], other: Sequence[Any] | NDArray[np.int32]) -> int:
    """Count the characters or tokens that two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except _TEMPLATE_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name}: the tokenizer's chat template fails: {reason}") from error
