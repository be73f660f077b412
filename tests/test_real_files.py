"""Files as other writers leave them: every command gives the rows that pyarrow and DuckDB read, or one line.

The real files are those that PQCACHE_PARQUET_FILES names. Beside them are some that are made here.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.cli import run
from pqcache.errors import ParquetError, PqcacheError
from pqcache.parquet.misread import check_read_right
from pqcache.torch import ParquetDataset
from tests.real_files import CORPUS, MADE

REAL = sorted(path.name for path in CORPUS.iterdir()) if CORPUS.is_dir() else []
LARGE = ("large_string_map.brotli.parquet",)  # of 4 KB, and 2 GB in memory
DAMAGED = ("invalid_utf8.parquet",)  # its minimum is not that of its values, which verify says
Rows = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[*MADE, *(pytest.param(name, marks=[pytest.mark.deep] if name in LARGE else []) for name in REAL)],
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of one file, or one that is a table."""
    root = tmp_path_factory.mktemp("real") / request.param
    if request.param in MADE:
        root.mkdir()
        MADE[request.param](root / "a.parquet")
    elif (CORPUS / request.param).is_dir():
        shutil.copytree(CORPUS / request.param, root)
    else:
        root.mkdir()
        shutil.copy(CORPUS / request.param, root)
    return root


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.parquet") if "_pqcache" not in path.parts)


def by_pyarrow(root: Path) -> Rows | None:
    """Return the rows of a directory, or None where pyarrow reads none or others than the files hold."""
    found: Rows = []
    for path in files_of(root):
        try:
            with pq.ParquetFile(path) as file:
                check_read_right(path, file.metadata, file.schema_arrow)
                in_path = dict(part.split("=") for part in path.relative_to(root).parts if "=" in part)
                rows = rows_of(file.read())
                if len(rows) != file.metadata.num_rows:
                    return None
                found += [{**row, **in_path} for row in rows]
        except (pa.ArrowException, OSError, ValueError, ParquetError):
            return None
    return found


def rows_of(table: pa.Table | pa.RecordBatch) -> Rows:
    columns = [[_value(scalar) for scalar in column] for column in table.columns]
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(scalar: pa.Scalar) -> Any:
    """Return a value also where Python's types cannot hold it: text that is no UTF-8, times of far years."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(item) for name, item in scalar.items()}
        if isinstance(scalar, pa.ListScalar):
            return [_value(item) for item in scalar.values]
        return scalar.as_buffer().to_pybytes() if isinstance(scalar, pa.StringScalar) else scalar.value


def by_duckdb(root: Path) -> list[Any] | None:
    names = [str(path) for path in files_of(root)]
    try:
        with duckdb.connect() as connection:
            connection.execute("set timezone = 'UTC'")
            found = connection.execute("select * from read_parquet($1, union_by_name = true)", [names]).fetchall()
        return [tuple(map(repr, row)) for row in found]
    except duckdb.Error:
        return None


def plain(value: Any) -> Any:
    """Return a value of pyarrow or torch as what compares: times and decimals as text, NaN as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value if isinstance(value, int | float | str | bytes | None) else str(value)


def same(found: Rows, expected: Rows) -> bool:
    def rows(some: Rows) -> list[Any]:
        return sorted((sorted((key, repr(plain(value))) for key, value in row.items()) for row in some), key=repr)

    return rows(found) == rows(expected)


def length_of(batch: Any) -> int:
    """Return the rows of a batch, in which structs are dicts."""
    return length_of(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)


def check_sync(source: Path, tmp_path: Path) -> None:
    pqcache.sync(str(source), tmp_path / "cache")
    for path in files_of(source):
        copy = tmp_path / "cache" / "current" / path.relative_to(source)
        assert copy.read_bytes() == path.read_bytes()


def check_verify(source: Path, tmp_path: Path) -> None:
    pqcache.sync(str(source), tmp_path / "cache")
    report = pqcache.verify(tmp_path / "cache", deep=True)
    assert not report.damage or by_pyarrow(source) is None or source.name in DAMAGED, report.damage


def check_repartition(source: Path, tmp_path: Path) -> None:
    pqcache.repartition(source, tmp_path / "target", row_group_size="64KB", compression="zstd")
    for judge in (by_pyarrow, by_duckdb):
        expected = judge(source)
        assert expected is None or judge(tmp_path / "target") == expected
    assert by_pyarrow(tmp_path / "target") is not None or by_pyarrow(source) is None


def check_batches(source: Path, tmp_path: Path) -> None:
    pqcache.sync(str(source), tmp_path / "cache")
    batches = pqcache.Cache.open(tmp_path / "cache").batches(batch_size=500)
    found = [row for batch in batches for row in rows_of(batch)]
    expected = by_pyarrow(source)
    assert expected is not None
    assert same(found, expected)


def check_loader(source: Path, tmp_path: Path) -> None:
    dataset = ParquetDataset(source, batch_size=500, shuffle=False, nulls="mask")
    batches = list(dataset)
    expected = by_pyarrow(source)
    assert expected is not None
    assert sum(map(length_of, batches)) == len(expected)
    for name in expected[0] if expected else ():
        values = [row[name] for row in expected]
        if all(isinstance(value, bool | int | float) for value in values):  # what tensors hold as it is
            assert plain([item for batch in batches for item in batch[name].tolist()]) == plain(values)


def check_inspect(source: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--sample", "3", "--json"], ["--schema"]):
        printed = io.StringIO()
        with redirect_stderr(printed), redirect_stdout(io.StringIO()):
            code = run(["inspect", str(source), *arguments])
        if code:
            assert "report this bug" not in printed.getvalue()
            raise PqcacheError(printed.getvalue().strip())


STEPS: Mapping[str, Callable[[Path, Path], None]] = {
    "sync": check_sync,
    "verify": check_verify,
    "repartition": check_repartition,
    "batches": check_batches,
    "loader": check_loader,
    "inspect": check_inspect,
}


@pytest.mark.parametrize("step", STEPS)
def test_rows_or_one_line(step: str, source: Path, tmp_path: Path) -> None:
    if step != "sync" and source.name in LARGE:
        pytest.skip(f"NOT CHECKED: decoding {source.name} takes 4 GB, and comparing its rows 9 GB")
    refusal = _refusal(step, source, tmp_path)
    assert "\n" not in refusal
    named = [*(path.name for path in files_of(source)), "column '", "its files have no columns"]
    named.append("a row group takes")  # too much for memory=, of the dataset
    assert not refusal or any(name in refusal for name in named), f"names no file: {refusal}"


def _refusal(step: str, source: Path, tmp_path: Path) -> str:
    try:
        STEPS[step](source, tmp_path)
    except PqcacheError as error:
        return str(error)
    return ""
