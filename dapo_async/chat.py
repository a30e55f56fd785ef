"""Data text to token ids, such that no text of a data set can forge a turn.

A chat template joins its own markers (`<|im_start|>` …) and the data's text into one string. If
the data spells a marker, plain tokenisation of that string would read it as a real one. Here the
spelling is cut in two before rendering and the pieces are tokenised apart, so it stays text; rows
without a marker are tokenised exactly as `apply_chat_template(tokenize=True)` would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What is used of a Hugging Face fast tokenizer."""

    chat_template: Any
    unk_token_id: Any
    eos_token_id: Any

    @property
    def added_tokens_decoder(self) -> Any: ...

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


Message = Mapping[str, str]
"""`{"role": …, "content": …}`"""


class RenderError(Exception):
    """This prompt can't be rendered; the message says why."""


class Renderer:
    """Renders and tokenises prompts. Nothing is ever truncated or padded."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        """Raises RenderError: `chat` without a chat template, or a template that fails."""
        self._tokenizer = tokenizer
        self._markers = _markers(tokenizer)
        if chat:
            if not tokenizer.chat_template:
                raise RenderError("the tokenizer has no chat template")
            # A template may also write tokens that its tokenizer doesn't call special.
            skeleton = self._apply([{"role": "user", "content": "a"}])
            for marker, token_id in _markers(tokenizer, every=True).items():
                if marker in skeleton:
                    self._markers[marker] = token_id
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._ids = set(self._markers.values()) - {tokenizer.unk_token_id}

    def text(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Plain text, with the tokenizer's own first token (BOS) if it has one.

        Returns the text and its ids. Raises RenderError if a special token got in all the same.
        """
        ids = self._encode_plain(text)
        self._check(ids, self._count(self._encode_plain("")))
        return text, tuple(ids)

    def chat(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """A conversation through the chat template, ready for the assistant's answer.

        Returns the rendered text and its ids. Raises RenderError: the template refuses the
        messages, or a marker in a message can't be told from the template's own.
        """
        contents = "".join(message["content"] for message in messages)
        if not self._pattern.search(contents):
            text = self._apply(messages)
            ids = self._encode(text, add_special_tokens=False)
            self._check(ids, len(self._pattern.findall(text)))
            return text, tuple(ids)
        cut = _unused_character(contents + "".join(self._markers))
        safe = [{**message, "content": self._cut(message["content"], cut)} for message in messages]
        pieces = self._apply(safe).split(cut)
        encoded = [self._encode(piece, add_special_tokens=False) for piece in pieces]
        ids = list(chain.from_iterable(encoded))
        self._check(ids, sum(len(self._pattern.findall(piece)) for piece in pieces))
        return "".join(pieces), tuple(ids)

    def _cut(self, text: str, cut: str) -> str:
        """Put `cut` after the first character of every marker, until none is whole."""
        while found := self._pattern.search(text):
            if len(found[0]) < 2:
                raise RenderError(f"the text contains the special token {found[0]!r}")
            at = found.start() + 1
            text = text[:at] + cut + text[at:]
        return text

    def _apply(self, messages: Sequence[Message]) -> str:
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001
            # A template is a program of its own and may raise anything, jinja2 errors mostly.
            raise RenderError(f"the chat template refuses it: {error}") from None
        return str(rendered)

    def _encode(self, text: str, **kwargs: Any) -> list[int]:
        found: Any = self._tokenizer(text, truncation=False, padding=False, verbose=False, **kwargs)
        return [int(token_id) for token_id in found["input_ids"]]

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._encode(text, add_special_tokens=True, split_special_tokens=True)
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            return ids[:-1]  # some tokenizers append EOS: a prompt that is over can't be answered
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token_id in self._ids for token_id in ids)

    def _check(self, ids: Sequence[int], allowed: int) -> None:
        """Fail closed: a normalising tokenizer might still read a marker out of the data."""
        if self._count(ids) > allowed:
            raise RenderError("its text would be tokenised as a special token")


def _markers(tokenizer: Tokenizer, every: bool = False) -> dict[str, int]:
    """Added tokens by spelling: the special ones, or `every` one that is not only white space."""
    return {
        str(token.content): int(token_id)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.content and (token.special or (every and token.content.strip()))
    }


def _unused_character(text: str) -> str:
    """A private-use character that `text` doesn't contain."""
    used = set(text)
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
