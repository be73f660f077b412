"""Checks a snapshot's files in a separate process, as damaged Parquet may crash it or exhaust its memory.

``command.py`` starts this with a snapshot's path, ``index`` to compare files with the row-group index, and the second
engine. It writes a request per line, which is answered by lines of JSON: ``step`` (the next step, and its timeout in
seconds), ``damage``, ``unread`` (a column that the second engine can't read), ``well`` (several files are intact) and
``end``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import PqcacheError, first_line
from pqcache.parquet.decoded_size import DECODED, StoredRowGroup, decoded_size, longest_rows, varies
from pqcache.parquet.schema import joined_type
from pqcache.parquet.statistics import EXTREMES, columns_table, row_group_columns
from pqcache.parquet.validation import read_footer
from pqcache.store.row_group_index import Index, with_columns
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import checksum_matches
from pqcache.system.processes import hide_pandas

MEMORY = 2 << 30  # bytes that a file may take to be decoded, a page or a batch at a time
_BATCH = 16 << 20  # bytes of a column decoded at once
_SLOWEST = 4e6  # bytes a second: what takes longer than this does not end
_MAX_DAMAGE = 20  # reports of damage in one file

Report = Callable[..., None]


class _Enough(Exception):
    """There is too much damage for more reports to help."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    snapshot, words = Snapshot(Path(sys.argv[1])), sys.argv[2:]
    if "fastparquet" not in words:  # which needs it
        hide_pandas()
    index = IndexedFiles(snapshot.index()) if "index" in words else None
    limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        reported = 0

        def report(**answer: Any) -> None:
            nonlocal reported
            answers.write(json.dumps(answer) + "\n")
            reported += "damage" in answer
            if reported >= _MAX_DAMAGE:
                raise _Enough

        try:
            if "files" in request:
                report(step="footers", seconds=request["seconds"])
                if all_intact(snapshot.path, request["files"], index):
                    report(well=True)
            else:
                check_file(snapshot.path, request, index and index.get(request["path"]), report)
        except _Enough:
            pass
        except PqcacheError as error:
            report(damage=str(error))
        except MemoryError:
            report(damage=f"cannot be read in {MEMORY >> 30} GB of memory")
        except Exception as error:  # noqa: BLE001  damage may raise anything
            report(damage=f"cannot be checked ({type(error).__name__}: {first_line(error)[:200]})")
        answers.write('{"end": true}\n')


def limit_memory() -> None:
    """Limit this process to ``MEMORY`` more bytes of address space, if the system can do that."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    except (OSError, ValueError):
        return


def all_intact(root: Path, requests: list[dict[str, Any]], index: IndexedFiles | None) -> bool:
    """Whether all footers agree with manifest and index."""
    alike: list[tuple[pa.Schema, dict[str, list[Any]], list[pa.Table]]] = []
    for request in requests:
        with pq.ParquetFile(root / request["path"]) as file:
            metadata, schema = file.metadata, file.schema_arrow
        if (metadata.num_rows, metadata.num_row_groups) != (request["rows"], request["row_groups"]):
            return False
        indexed = index and index.get(request["path"])
        if indexed is None:
            if index and metadata.num_row_groups:
                return False
            continue
        columns = row_group_columns(metadata, schema)
        columns["file"] = [0] * metadata.num_row_groups
        for known, together, tables in alike:
            if known.equals(schema):
                for name, values in columns.items():
                    together[name] += values
                tables.append(indexed)
                break
        else:
            alike.append((schema, columns, [indexed]))
    return not any(
        any(compare_index(columns_table(together, schema), pa.concat_tables(tables)))
        for schema, together, tables in alike
    )


def check_file(root: Path, request: dict[str, Any], indexed: pa.Table | None, report: Report) -> None:
    """Check a data file against its entry and the index, with ``deep`` page by page."""
    path = root / request["path"]
    seconds = request["seconds"]
    report(step="footer", seconds=seconds)
    try:
        metadata, schema = read_footer(path)
        columns = row_group_columns(metadata, schema)
        columns["file"] = [0] * metadata.num_row_groups
        footer = columns_table(columns, schema)
    except Exception as error:  # noqa: BLE001  as above
        report(damage=f"its footer cannot be read ({first_line(error)[:200]})")
        footer = None
    if footer is not None:
        for what, count in (("rows", metadata.num_rows), ("row_groups", metadata.num_row_groups)):
            if count != request[what]:
                kind = what.replace("_", " ")
                report(damage=f"its footer says {count:,} {kind}, the manifest {request[what]:,}")
        if indexed is not None:
            _report_index(path, request, footer, indexed, report)
    if not request["deep"]:
        return
    size = path.stat().st_size
    report(step="checksum", seconds=seconds + size / _SLOWEST)
    same = not request["checksum"] or checksum_matches(request["checksum"], path)
    if not same:
        report(damage="its checksum is not the one that was recorded")
    if footer is not None:
        decode(path, schema, footer, size, seconds, report)
        if request["engine"] and same:
            compare_engines(path, schema, seconds + size / _SLOWEST, report)


def _report_index(path: Path, request: dict[str, Any], footer: pa.Table, indexed: pa.Table, report: Report) -> None:
    """Compare index and footer; if the file has its recorded checksum, the index is at fault."""
    wrong = list(compare_index(footer, indexed))
    intact = bool(wrong and request["checksum"]) and checksum_matches(request["checksum"], path)
    for damage, group, column in wrong:
        report(damage=damage, row_group=group, column=column, index=intact)


def compare_index(footer: pa.Table, indexed: pa.Table) -> Iterator[tuple[str, int | None, str | None]]:
    """Yield text, row group and column of each difference."""
    if footer.num_rows != indexed.num_rows:
        yield f"the footer has {footer.num_rows:,} row groups, the index {indexed.num_rows:,}", None, None
        return
    known, typed = set(footer.column_names), with_columns(footer, indexed.schema)
    for name in indexed.column_names:
        column_name, colon, what = name.rpartition(":")
        if name == "file" or what in DECODED:
            continue
        column, here, there = column_name if colon else None, typed[name], indexed[name]
        lost = name in known and here.null_count > footer[name].null_count
        if lost and joined_type(footer[name].type, there.type) != there.type:
            yield f"the index has a {there.type} as {what}, the footer a {footer[name].type}", None, column
            continue
        if here.equals(there):
            continue
        for group, (one, other) in enumerate(zip(here, there, strict=True)):
            if one.equals(other) or (what in (*EXTREMES, "nulls") and not (one.is_valid and other.is_valid)):
                continue  # fine if unknown to one of them: versions differ in what they believe of a file
            yield f"the index has {_text(other)} as {what}, the footer {_text(one)}", group, column
            break


def decode(path: Path, schema: pa.Schema, footer: pa.Table, size: int, seconds: float, report: Report) -> None:
    """Decode every page, and compare row counts and statistics with its values."""
    with pq.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True) as file:
        for group in range(footer.num_rows):
            line = {name: footer[name][group] for name in footer.column_names}
            for field in schema:
                stored = min(line[f"{field.name}:bytes"].as_py() or 0, size)
                report(step=[group, field.name], seconds=seconds + stored / _SLOWEST)
                try:
                    each = max(_bytes_of_row(StoredRowGroup(path, file.metadata, schema, group), field, line), 1)
                    wrong = _decode_column(file, group, field, line, max(1, min(65536, int(_BATCH // each))))
                except _Enough:
                    raise
                except MemoryError:
                    wrong = f"cannot be decoded in {MEMORY >> 30} GB of memory"
                except Exception as error:  # noqa: BLE001  as above
                    wrong = f"cannot be decoded ({first_line(error)[:200]})"
                if wrong:
                    report(damage=wrong, row_group=group, column=field.name)


def _bytes_of_row(group: StoredRowGroup, field: pa.Field, line: dict[str, Any]) -> float:
    """Decoded bytes of a row among the longest texts, as texts of a dictionary are stored only once."""
    each = (line[f"{field.name}:uncompressed"].as_py() or 0) / max(1, group.rows)
    if varies(field.type):
        with suppress(Exception):  # damage is found by decoding
            most = decoded_size(group, [field.name]).most
            if most is None or most > MEMORY // 8:
                each = max(each, longest_rows(group, field.name))
    return float(each)


def _decode_column(
    file: pq.ParquetFile, group: int, field: pa.Field, line: dict[str, Any], batch_rows: int
) -> str | None:
    """Describe the damage of a column of a row group; None if there is none."""
    name, rows = field.name, line["rows"].as_py()
    low, high = line.get(f"{name}:min"), line.get(f"{name}:max")
    count = nulls = 0
    for batch in file.iter_batches(batch_rows, [group], [name], use_threads=False):
        column = batch.column(0)
        column.validate()
        count, nulls = count + len(column), nulls + column.null_count
        if low is not None and high is not None and low.is_valid and high.is_valid:
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            try:
                found = pc.min_max(column)
                outside = found["min"].is_valid and (_is_less(found["min"], low) or _is_less(high, found["max"]))
            except pa.ArrowNotImplementedError:  # a type without an order here
                outside = False
            if outside:
                return f"holds values outside of its statistics ({_text(low)} to {_text(high)})"
    if count != rows:
        return f"holds {count:,} rows, its footer says {rows:,}"
    stated = line[f"{name}:nulls"].as_py()
    if stated is not None and stated != nulls:
        return f"holds {nulls:,} nulls, its statistics say {stated:,}"
    return None


def _is_less(one: pa.Scalar, other: pa.Scalar) -> bool:
    return bool(pc.less(one, other if other.type == one.type else other.cast(one.type)).as_py())


def _text(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):  # a time that Python's types cannot hold
        return str(value.value)


class IndexedFiles:
    """The rows of an index by the path of their file, zero-copy.

    They are cut on demand, as a table for each of many files would take too much memory.
    """

    def __init__(self, index: Index) -> None:
        self._table = index.table
        starts = np.searchsorted(index.numbers("file"), np.arange(len(index.paths) + 1)).tolist()
        self._rows = dict(zip(index.paths, pairwise(starts), strict=True))

    def get(self, path: str) -> pa.Table | None:
        start, end = self._rows.get(path, (0, 0))
        return self._table.slice(start, end - start) if path in self._rows else None


_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def compare_engines(path: Path, schema: pa.Schema, seconds: float, report: Callable[..., None]) -> None:
    """Compare every column of every row group, read by pyarrow and by fastparquet, an independent implementation.

    fastparquet lacks some types and encodings. Columns that it can't read are reported, but don't count as damage.
    """
    import fastparquet

    report(step="fastparquet", seconds=seconds)
    try:
        second = fastparquet.ParquetFile(str(path))
        row_groups = [second[i : i + 1] for i in range(len(second.row_groups))]
    except Exception as error:  # noqa: BLE001  whatever it raises says that it cannot read this
        for field in schema:
            report(unread=field.name, why=_why(error))
        return
    with pq.ParquetFile(path) as first:
        for field in schema:
            for group, row_group in enumerate(row_groups):
                report(step=[group, field.name], seconds=seconds)
                column = first.read_row_group(group, [field.name], use_threads=False)[field.name]
                try:
                    series = row_group.to_pandas(columns=[field.name], index=False)[field.name]
                    first_values, second_values = _comparable(column), _as_compared(series, column.type)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001  as above
                    report(unread=field.name, why=_why(error))
                    break
                position = _first_difference(first_values, second_values)
                if position is not None:
                    report(
                        damage=f"fastparquet reads another value in row {position:,} of the row group",
                        row_group=group,
                        column=field.name,
                    )
                    break


def _comparable(column: pa.ChunkedArray) -> list[Any]:
    """pyarrow's values in a common form: numbers as bits, times as nanoseconds, None for null."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_timestamp(kind):
        each = _NANOSECONDS[kind.unit]
        return [None if v is None else v * each for v in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_date32(kind):
        return [None if v is None else v * 86_400_000_000_000 for v in column.cast(pa.int32()).to_pylist()]
    if pa.types.is_fixed_size_binary(kind):
        return [None if v is None else v.rstrip(b"\0") for v in column.to_pylist()]  # numpy has no trailing zeros
    if pa.types.is_decimal(kind):
        return [None if v is None else float(v) for v in column.to_pylist()]
    if pa.types.is_floating(kind):
        return [None if v is None or v != v else v for v in column.to_pylist()]  # pandas' NaN is null as well
    if _is_plain(kind) or _is_plain_list(kind):
        return list(column.to_pylist())
    raise NotImplementedError(f"values of type {kind} are not compared")


def _as_compared(series: Any, kind: pa.DataType) -> list[Any]:
    """fastparquet's values in the same form."""
    if series.dtype.kind == "M":
        values = series.astype("datetime64[ns, UTC]" if series.dt.tz is not None else "datetime64[ns]")
        return [None if null else int(v) for v, null in zip(values.astype("int64"), series.isna(), strict=True)]
    found: list[Any] = []
    for value in series.astype(object):
        if isinstance(value, np.ndarray | list | tuple):
            found.append([_scalar(item) for item in value])
        else:
            found.append(_scalar(value))
    if pa.types.is_fixed_size_binary(kind):
        return [None if v is None else v.rstrip(b"\0") for v in found]
    return found


def _scalar(value: Any) -> Any:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.generic):
        value = value.item()
    return None if value != value else value


def _first_difference(first_values: list[Any], second_values: list[Any]) -> int | None:
    if len(first_values) != len(second_values):
        return min(len(first_values), len(second_values))
    return next(
        (i for i, (one, other) in enumerate(zip(first_values, second_values, strict=True)) if one != other), None
    )


def _is_plain(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in (*tests, pa.types.is_binary, pa.types.is_large_binary))


def _is_plain_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_plain(kind.value_type)


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)[:120]}"


if __name__ == "__main__":
    main()
