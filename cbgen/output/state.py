"""How far an output is safe: the content of state.json."""

from __future__ import annotations

import re
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from cbgen.output.tape import Mark
from cbgen.records import Position, Tally

_PRIME = (1 << 61) - 1
_BASE = 0x1E3779B97F4A7C15
_CHECKED = re.compile(rb'(\{.*),"check":(\d+)\}\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class State:
    """A commit.

    Attributes:
        rows: rows 0..rows-1 are in the output for good.
        base_rows: of these, the ones that are in sealed parts; the rest is on the tape.
        num_bytes, crc, mtime_ns: the committed prefix of the tape, see `Mark`.
        position: where row number `rows` starts in the input.
        digest: of the committed rows' input, see `row_term`.
        good_digest: the same without the rows that are errors: those may be mended and tried again.
        signatures: size and change time of each input at the last commit.
        swap: a new tape waits to take the old one's place.
        closed: the run that wrote this came to its end; nothing of ours lies behind the committed bytes.
    """

    rows: int = 0
    base_rows: int = 0
    num_bytes: int = 0
    crc: int = 0
    mtime_ns: int = 0
    position: Position = Position()
    digest: int = 0
    good_digest: int = 0
    signatures: list[Any] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    swap: bool = False
    closed: bool = False

    @property
    def mark(self) -> Mark:
        """The committed prefix of the tape."""
        return Mark(self.rows - self.base_rows, self.num_bytes, self.crc, self.mtime_ns)

    def to_json(self) -> bytes:
        """What `from_json` reads."""
        return with_check(orjson.dumps(asdict(self)))

    @classmethod
    def from_json(cls, data: bytes) -> State:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` did not write."""
        verify_check(data)
        value = orjson.loads(data)
        value.pop("check", None)
        return cls(**{**value, "position": Position(**value["position"]), "tally": Tally(**value["tally"])})


def with_check(document: bytes) -> bytes:
    """A JSON object with a checksum of itself as its last field: a changed digit may not pass for another state."""
    return b'%b,"check":%d}' % (document[:-1], zlib.crc32(document))


def verify_check(document: bytes) -> None:
    """Raises ValueError when a document is not what `with_check` made, or has lost its checksum."""
    match = _CHECKED.fullmatch(document)
    if match is None or zlib.crc32(match[1] + b"}") != int(match[2]):
        raise ValueError("the checksum is wrong")


def row_term(index: int, checksum: int) -> int:
    """What a row adds to a digest. The sum over rows notices rows that changed, moved or vanished, and one row can be
    taken out of it or put in again.
    """
    return (checksum + 1) * (index + _BASE) % _PRIME


def add_row(digest: int, index: int, checksum: int) -> int:
    """The digest with one row more."""
    return (digest + row_term(index, checksum)) % _PRIME
