"""The samples table: row, id and metadata columns, as Parquet; pyarrow lives here."""

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens.errors import DataError, ManifestError, TorchLensWarning

if TYPE_CHECKING:
    import pandas as pd

_ROW = "sample"
_ID = "id"
# Beyond values of several kinds: integers over 64 bits, text that is not Unicode.
_UNSTORABLE = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    UnicodeEncodeError,
)


def encode_part(
    start: int, ids: Sequence[str], metadata: Mapping[str, Sequence[Any]]
) -> bytes:
    """Return one block's part of the table as a Parquet file.

    Raises:
        DataError: If a column's values have no common type, or a name is reserved.
    """
    columns: dict[str, Any] = {
        _ROW: pa.array(range(start, start + len(ids)), pa.int64()),
        _ID: pa.array(ids, pa.string()),
    }
    for name, values in metadata.items():
        if name in columns:
            raise DataError(
                f"A metadata column is called {name!r}, a name the samples table uses "
                "itself. Rename the column."
            )
        columns[name] = _column(name, values)
    return _to_parquet(pa.table(columns))


def decode_ids(data: bytes, where: str) -> list[str]:
    """Return the ids in a part or table.

    Raises:
        ManifestError: If it is no such file.
    """
    return [str(value) for value in _read(data, where, [_ID])[_ID].to_pylist()]


def join_parts(parts: Sequence[bytes], where: str) -> bytes:
    """Return the whole table from its parts in order, as a Parquet file."""
    tables = [_read(part, f"{where}, part {i}") for i, part in enumerate(parts)]
    return _to_parquet(_concatenated(tables))


def to_frame(parts: Sequence[bytes], where: str) -> "pd.DataFrame":
    """Return the rows of a table, or of several parts in order, as a data frame."""
    tables = [_read(part, where) for part in parts]
    frame: pd.DataFrame = _concatenated(tables).to_pandas()
    return frame


def column_names(data: bytes, where: str) -> list[str]:
    """Return the names of the metadata columns of a table."""
    names = _read(data, where).column_names
    return [str(name) for name in names if name not in (_ROW, _ID)]


def _column(name: str, values: Sequence[Any]) -> Any:
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        return pa.array(items, from_pandas=True)
    except _UNSTORABLE as error:
        raise DataError(
            f"The metadata column {name!r} cannot be stored: its values have no common "
            f"type ({error}). Give it numbers, text, booleans or dates, one kind."
        ) from error


def _concatenated(tables: Sequence[Any]) -> Any:
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    # One block's values were numbers and another's text: keep all of them, as text.
    kinds: dict[str, set[Any]] = {}
    for field in (field for table in tables for field in table.schema):
        kinds.setdefault(field.name, set()).add(field.type)
    mixed = [name for name, types in kinds.items() if len(types) > 1]
    warnings.warn(
        f"The metadata columns {mixed} hold different kinds of values in different "
        "blocks; they are stored as text.",
        TorchLensWarning,
        stacklevel=2,
    )
    tables = [_as_text(table, mixed) for table in tables]
    return pa.concat_tables(tables, promote_options="permissive")


def _as_text(table: Any, names: Sequence[str]) -> Any:
    for name in set(names) & set(table.column_names):
        values = [None if v is None else str(v) for v in table[name].to_pylist()]
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array(values, pa.string()))
    return table


def _to_parquet(table: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _read(data: bytes, where: str, columns: list[str] | None = None) -> Any:
    try:
        # Not from a Python file: with one, pyarrow 26 now and then aborts the process
        # at its end, after all is done.
        source = pa.BufferReader(data)
        file = pq.ParquetFile(source, page_checksum_verification=True)
        return file.read(columns=columns, use_threads=False)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise ManifestError(
            f"{where} is no readable samples table ({error}): it is damaged."
        ) from error
