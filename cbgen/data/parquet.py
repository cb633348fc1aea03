"""Parquet to rows, in bounded memory whatever the size of row groups and cells.

Enters: a source of kind `parquet` and a row to start from. Leaves: (row number, columns) pairs in order; a row whose
text is not UTF-8 comes as the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data import files
from cbgen.data.arrow_values import Columns, batch_rows
from cbgen.data.sources import Source, open_random_access

_MAX_ROWS = 256
_BATCH_BYTES = 8 << 20
_DICTIONARY_BYTES = 128 << 20
_COALESCED_BYTES = 64 << 20
_LOCAL_BUFFER_BYTES = 1 << 20
_ALL_BUFFERS_BYTES = 64 << 20  # one per column


@dataclass(slots=True)
class _Run:
    """Row groups that are read in one go."""

    groups: list[int]
    num_bytes: int
    batch_rows: int
    num_rows: int = 0


def read_parquet(source: Source, num_skipped: int) -> Iterator[tuple[int, Columns | UnicodeDecodeError]]:
    """Rows after the first `num_skipped`, each with its number, from 1.

    Raises:
        OSError: it cannot be read.
        pyarrow.ArrowException: it is damaged.
    """
    with ExitStack() as stack:
        # Arrow keeps what it fetched ahead for as long as the file is open, so a remote file is opened in both ways.
        plain = _open(stack, source, pre_buffer=False)
        fetching = _open(stack, source, pre_buffer=True) if source.is_remote else plain
        number, groups = _skip_row_groups(plain.metadata, num_skipped)
        expected = number
        # Arrow cannot join dictionaries of several row groups inside of lists and structs.
        together = 1 if any(has_inner_dictionary(column.type) for column in plain.schema_arrow) else len(groups)
        for run in _runs(plain.metadata, groups, together):
            file = fetching if run.num_bytes <= _COALESCED_BYTES else plain
            for batch in file.iter_batches(run.batch_rows, row_groups=run.groups):
                for columns in batch_rows(batch):
                    number += 1
                    if number > num_skipped:
                        yield number, columns
            expected += run.num_rows
            if number != expected:
                raise OSError(
                    f"its row groups hold {number:,} rows where its footer counts {expected:,}; it is damaged"
                )


def _open(stack: ExitStack, source: Source, *, pre_buffer: bool) -> Any:
    file = stack.enter_context(open_random_access(source))
    metadata = pq.read_metadata(file)
    most = files.READ_BYTES if source.is_remote else _LOCAL_BUFFER_BYTES
    size = 0 if pre_buffer else min(most, max(1 << 16, _ALL_BUFFERS_BYTES // max(1, metadata.num_columns)))
    return pq.ParquetFile(file, metadata=metadata, pre_buffer=pre_buffer, buffer_size=size)


def _skip_row_groups(metadata: Any, num_rows: int) -> tuple[int, list[int]]:
    """Rows before the row group that holds row `num_rows`, and the groups from there on."""
    before = 0
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).num_rows
        if before + size > num_rows:
            return before, list(range(group, metadata.num_row_groups))
        before += size
    return before, []


def _runs(metadata: Any, groups: list[int], most: int) -> Iterator[_Run]:
    """Neighbouring row groups together, up to a size and at `most` so many; one that is larger alone."""
    run = _Run([], 0, _MAX_ROWS)
    for group in groups:
        info = metadata.row_group(group)
        if not info.num_rows:
            continue
        chunks = [info.column(number) for number in range(metadata.num_columns)]
        num_bytes = sum(chunk.total_compressed_size for chunk in chunks)
        if len(run.groups) == most or (run.groups and run.num_bytes + num_bytes > _COALESCED_BYTES):
            yield run
            run = _Run([], 0, _MAX_ROWS)
        run.groups.append(group)
        run.num_rows += info.num_rows
        run.num_bytes += num_bytes
        run.batch_rows = min(run.batch_rows, _fitting_rows(info, chunks))
    if run.groups:
        yield run


def has_inner_dictionary(kind: pa.DataType) -> bool:
    """Whether a dictionary lies inside of a list, struct or map."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_dictionary(item) or has_inner_dictionary(item) for item in inner)


def _fitting_rows(info: Any, chunks: list[Any]) -> int:
    """Rows of a group that are sure to fit into memory at once, if its rows are about alike."""
    per_row = max(1, info.total_byte_size // info.num_rows)
    # Every row may point to the largest entry of a dictionary.
    largest = max(map(_dictionary_bytes, chunks), default=0)
    return int(max(1, min(_MAX_ROWS, _BATCH_BYTES // per_row, _DICTIONARY_BYTES // max(1, largest))))


def _dictionary_bytes(chunk: Any) -> int:
    """About the size of a chunk's dictionary, rather too much: only its compressed size is known."""
    if not chunk.has_dictionary_page:
        return 0
    compressed = int(chunk.data_page_offset - chunk.dictionary_page_offset)
    ratio = chunk.total_uncompressed_size / max(1, chunk.total_compressed_size)
    return min(int(chunk.total_uncompressed_size), int(4 * compressed * ratio))
