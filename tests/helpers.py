"""Small stand-ins that tests share: a byte-level tokenizer, and rows and positions with few words. No torch."""

from typing import Any

import jinja2

from cbgen.records import Position, Row

BOS = 1
EOS = 2
FIRST_BYTE = 3
BYTE_VOCAB_SIZE = 256 + FIRST_BYTE
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """UTF-8 byte b is token id b + 3. Looks like a transformers tokenizer to the code under test.

    Args:
        bos: whether plain text gets a BOS in front; a text that begins with `<s>` brings its own.
        chat_template: jinja text, or None for a tokenizer without one.
        fails_on: a text that contains this raises.
    """

    eos_token_id = EOS
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, *, bos: bool = False, chat_template: str | None = CHATML, fails_on: str | None = None) -> None:
        self.bos_token_id = BOS if bos else None
        self.chat_template = chat_template
        self.fails_on = fails_on
        self.num_calls = 0

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        self.num_calls += 1
        return {"input_ids": [self._encode(item, add_special_tokens) for item in text]}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.fails_on is not None and self.fails_on in text:
            raise RuntimeError(f"cannot encode {self.fails_on}\nand a second line")
        special = [BOS] if add_special_tokens and self.bos_token_id is not None else []
        if self.bos_token_id is not None and text.startswith("<s>"):
            special, text = [*special, BOS], text.removeprefix("<s>")
        return special + byte_ids(text)

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, chat_template: str | None = None, tokenize: bool, **kwargs: Any
    ) -> str:
        assert tokenize is False

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        template = jinja2.Environment().from_string(chat_template or self.chat_template or "")
        bos_token = "<s>" if self.bos_token_id is not None else ""
        return template.render(messages=conversation, bos_token=bos_token, raise_exception=raise_exception, **kwargs)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        special = {BOS: b"<s>", EOS: b"</s>"}
        pieces = (bytes([i - FIRST_BYTE]) if i >= FIRST_BYTE else special.get(i, b"") for i in token_ids)
        kept = (p for p, i in zip(pieces, token_ids, strict=True) if i >= FIRST_BYTE or not skip_special_tokens)
        return b"".join(kept).decode("utf-8", errors="replace")


class PieceTokenizer:
    """Token id i is `pieces[i]`, bytes that may end in half a character. `strips` drops one leading space of the whole
    text, as sentencepiece does.
    """

    def __init__(self, pieces: list[bytes], *, strips: bool = False) -> None:
        self.pieces = pieces
        self.strips = strips

    def decode(self, token_ids: list[int], **_: Any) -> str:
        text = b"".join(self.pieces[i] for i in token_ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips else text


def byte_ids(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def make_row(index: int = 0, *, checksum: int = 0, **columns: Any) -> Row:
    """Row `index` of a file of ten-byte lines."""
    following = Position(0, 10 * (index + 1), index + 1)
    return Row(index, f"in.jsonl line {index + 1}", columns, checksum or 1000 + index, following)
