"""Files that as a whole are not rows: told by their first bytes, in one sentence with the way out."""

from __future__ import annotations

from cbgen.data.lines import BYTE_ORDER_MARK, loads
from cbgen.errors import InputError

SNIFF_BYTES = 1 << 16
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def check_head(shown: str, head: bytes, is_whole_file: bool) -> None:
    """Refuse text that is not one JSON object per line.

    Args:
        shown: the file in messages.
        head: its first bytes.
        is_whole_file: there are no more.

    Raises:
        InputError: it is something else.
    """
    if head.startswith(_UTF16) or head[:400].count(0) > len(head[:400]) // 4:
        raise InputError(f"{shown} is UTF-16 text; convert it to UTF-8, for example with `iconv -f UTF-16 -t UTF-8`")
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"[") and _is_json_array(text, is_whole_file):
        raise InputError(
            f"{shown} is one JSON array, not one object per line; convert it with `jq -c '.[]' {shown} > prompts.jsonl`"
        )


def is_plain_row(head: bytes) -> bool:
    """Whether the first line is a JSON object."""
    first = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]
    try:
        return isinstance(loads(first), dict)
    except ValueError:
        return False


def _is_json_array(text: bytes, is_whole_file: bool) -> bool:
    """Whether text that starts with `[` is one array, rather than lines of which the first is (wrongly) a list."""
    first, _, rest = text.partition(b"\n")
    try:
        value = loads(first.strip())
    except ValueError:
        return True
    return is_whole_file and not rest.strip() and any(isinstance(item, dict) for item in value)
