# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text columns of Parquet files, by way of pyarrow (extra ``parquet``)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mcore_parallel.data._errors import DocumentError

_BATCH_ROWS = 1024


def row_groups(name: str) -> list[int]:
    """Rows of each row group of a file.

    Raises:
        DocumentError: pyarrow is missing, or the file is unreadable or no Parquet.
    """
    with _opened(name) as file:
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def read_column(name: str, column: str, groups: Sequence[int]) -> Iterator[list[bytes | None]]:
    """Texts of a column as UTF-8, some rows at a time, None where a row has none.

    Raises:
        DocumentError: as for `row_groups`; no such column, or it holds no text.
    """
    with _opened(name) as file:
        import pyarrow

        schema = file.schema_arrow
        if column not in schema.names:
            columns = ", ".join(schema.names[:8]) or "none"
            raise DocumentError(f"{name} has no column {column!r} (columns are {columns}); choose the field with --json-key")
        kind = schema.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(kind.equals(text) for text in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())):
            raise DocumentError(f"{name} has {kind} in column {column!r}, expected text; choose the field with --json-key")
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups), columns=[column]):
            # As bytes, since text that is not UTF-8 must be told apart from a damaged file.
            yield batch.column(0).cast(pyarrow.string()).cast(pyarrow.binary()).to_pylist()


def read_rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a file as mappings of columns to plain values, nested ones too.

    Raises:
        DocumentError: as for `row_groups`.
    """
    with _opened(name) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from batch.to_pylist()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DocumentError(
            f"cannot read {name}: pyarrow is missing; pip install 'mcore-parallel[parquet]', or write JSON lines"
        ) from error
    try:
        with parquet.ParquetFile(name) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DocumentError(f"cannot read {name}: {str(error).rstrip('.')}; check its rights, or write it again") from error
