"""Footers that end the process in pyarrow: each is refused, named, before pyarrow is asked about it."""

from __future__ import annotations

import base64
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError
from pqcache.parquet import footer, validation
from pqcache.parquet import thrift as t
from pqcache.parquet.validation import check_footer, footer_in
from tests.forked_commands import run_pqcache
from tests.scripts import run_script

TABLE = pa.table(
    {
        "i": pa.array(range(100)),
        "s": [f"s{n}" for n in range(100)],
        "l": [[n] * (n % 3) for n in range(100)],
        "v": pa.array([[1.0] * 300] * 100, pa.list_(pa.float32())),
        "d": [Decimal(n) / 4 for n in range(100)],
        "m": pa.array([[("k", n)] for n in range(100)], pa.map_(pa.string(), pa.int64())),
        "b": pa.array([n % 2 == 0 for n in range(100)]),
    }
)


def written(table: pa.Table = TABLE, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"row_group_size": 50, **options})
    return sink.getvalue()


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def changed(data: bytes, change: Callable[[t.Struct], object], column: int = 0) -> bytes:
    """Return a file with ``change`` made to the chunk of a column in its last row group."""
    fields = t.decode(footer_of(data), "x")
    chunk = fields[4][1].values[-1][1][1].values[column]
    change(chunk)
    return data[: -8 - len(footer_of(data))] + footer.footer_and_magic(fields)


def of_meta(change: Callable[[t.Struct], object]) -> Callable[[t.Struct], object]:
    return lambda chunk: change(chunk[3][1])


def sizes(number: int, value: tuple[int, Any]) -> Callable[[t.Struct], object]:
    def change(meta: t.Struct) -> None:
        meta[16] = (t.STRUCT, dict(sorted({**meta[16][1], number: value}.items())))

    return of_meta(change)


def levels(count: int) -> tuple[int, t.Items]:
    return t.LIST, t.Items(t.I64, [50] * count)


DAMAGE: dict[str, tuple[Callable[[t.Struct], object], int, str]] = {
    "definition levels": (sizes(3, levels(3)), 0, "histogram"),
    "repetition levels": (sizes(2, levels(4)), 2, "histogram"),
    "byte arrays": (sizes(1, (t.I64, 7)), 0, "byte arrays"),
    "another type": (of_meta(lambda meta: meta.update({1: (t.I32, 1)})), 0, "type 1"),
    "a type that is none": (of_meta(lambda meta: meta.update({1: (t.I32, 99)})), 0, "type 99"),
    "a codec that is none": (of_meta(lambda meta: meta.update({4: (t.I32, 77)})), 1, "codec"),
    "a short minimum": (of_meta(lambda meta: meta[12][1].update({6: (t.BINARY, b"abc")})), 0, "minimum"),
    "an empty maximum": (of_meta(lambda meta: meta[12][1].update({5: (t.BINARY, b"")})), 6, "minimum"),
    "a short decimal": (of_meta(lambda meta: meta[12][1].update({5: (t.BINARY, b"a")})), 4, "minimum"),
}


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python where it may be ended."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_kind_is_refused(damage: str) -> None:
    change, column, said = DAMAGE[damage]
    check_footer(footer_of(written()), "well.parquet", None)
    with pytest.raises(ParquetError, match=rf"^bad\.parquet: .*{said}"):
        check_footer(footer_of(changed(written(), change, column)), "bad.parquet", None)


def test_each_of_them_ends_the_process_in_pyarrow(tmp_path: Path) -> None:
    """Else the check is no longer needed."""
    code = """
import os, sys
import pyarrow.parquet as pq
for path in sys.argv[1:]:
    if not (child := os.fork()):
        os.close(2)
        metadata = pq.ParquetFile(path).metadata
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(1).column(number)
            chunk.compression, chunk.statistics
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""
    paths = []
    for number, (change, column, _) in enumerate(DAMAGE.values()):
        paths.append(tmp_path / f"{number}.parquet")
        paths[-1].write_bytes(changed(written(), change, column))
    ended = run(code, *paths).stdout.split()
    assert dict(zip(DAMAGE, map(int, ended), strict=True)) == dict.fromkeys(DAMAGE, 6)


WELL = {
    "plain": written(),
    "page index": written(write_page_index=True, compression="zstd"),
    "no statistics": written(write_statistics=False, use_dictionary=False),
    "old": written(version="1.0", data_page_version="2.0"),
    "one row group of many": written(row_group_size=3),
    "sorted": written(sorting_columns=[pq.SortingColumn(0)]),
    "bloom": written(bloom_filter_options={"i": {"ndv": 10}}),
    "int96": written(pa.table({"t": pa.array([1, 2], pa.timestamp("ns"))}), use_deprecated_int96_timestamps=True),
    "no rows": written(TABLE.slice(0, 0)),
    "no columns": written(pa.table({})),
    "wide": written(pa.table({f"c{n}": [n, None] for n in range(300)})),
    "nulls": written(
        pa.table({"a": pa.nulls(9), "b": pa.nulls(9, pa.int8()), "c": pa.nulls(9, pa.list_(pa.string()))})
    ),
    "required": written(TABLE.select(["i"]).cast(pa.schema([pa.field("i", pa.int64(), nullable=False)]))),
    "long strings": written(pa.table({"s": ["x" * 5000, "y" * 70]})),
    "fixed": written(pa.table({"f": pa.array([b"x" * 200] * 3, pa.binary(200)), "h": pa.array([1] * 3, pa.float16())})),
}


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_passes(name: str) -> None:
    for _ in range(2):
        check_footer(footer_of(WELL[name]), name, len(WELL[name]))


def test_what_passed_before_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(7)
    refused = 0
    for name in ("plain", "page index", "no statistics"):
        data = footer_of(WELL[name])
        for _ in range(700):
            at = random.randrange(len(data))
            flipped = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            said = []
            for before in ([], [data]):
                monkeypatch.setattr(validation, "_recent", [])
                for well in before:
                    check_footer(well, "x", None)
                try:
                    check_footer(flipped, "x", None)
                    said.append("")
                except ParquetError as error:
                    said.append(str(error))
            assert said[0] == said[1]
            refused += bool(said[0])
    assert refused > 300


def test_no_flipped_bit_ends_a_process(tmp_path: Path) -> None:
    """A few hundred flips, of which some dozen would end it without the check."""
    code = """
import random, sys
from pathlib import Path
import pyarrow as pa
from pqcache.errors import PqcacheError
from pqcache.parquet.statistics import row_group_columns
from pqcache.parquet.validation import footer_in
random.seed(3)
data = Path(sys.argv[1]).read_bytes()
length = int.from_bytes(data[-8:-4], "little")
for _ in range(3000):
    at = len(data) - 8 - random.randrange(1, length)
    flipped = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    try:
        row_group_columns(*footer_in(flipped, "x", size=len(data)))
    except (PqcacheError, LookupError, ValueError):
        pass
print("alive")
"""
    (tmp_path / "a.parquet").write_bytes(written())
    ended = run(code, tmp_path / "a.parquet")
    assert (ended.returncode, ended.stdout.strip()) == (0, "alive"), ended.stderr[-300:]


def encrypted(path: Path) -> None:
    """Write a file one of whose columns is encrypted, while its footer is not."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc,name-defined]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"k": ["i"]}, plaintext_footer=True)
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for day in ("1", "2"):
        (tmp_path / "shop" / f"dt={day}").mkdir(parents=True)
        (tmp_path / "shop" / f"dt={day}" / "a.parquet").write_bytes(written())
    return tmp_path / "shop"


HISTOGRAM = changed(written(), sizes(3, levels(3)))


@pytest.mark.parametrize(
    "options", [[], ["--row-group-size", "20000"], ["--columns", "i,s"], ["--where", "i > 5"]], ids=str
)
def test_sync_refuses_it_and_the_cache_is_intact(source: Path, tmp_path: Path, options: list[str]) -> None:
    cache = tmp_path / "cache"
    assert run_pqcache("sync", source, cache, *options).returncode == 0
    before = pqcache.Cache(cache).snapshot().id
    (source / "dt=2" / "b.parquet").write_bytes(HISTOGRAM)
    ended = run_pqcache("sync", source, cache)
    assert ended.returncode == 1
    assert "dt=2/b.parquet: the Parquet footer is damaged (a histogram of 3 levels where" in ended.stderr
    assert pqcache.Cache(cache).snapshot().id == before
    assert pqcache.verify(cache, deep=True).ok
    (source / "dt=2" / "b.parquet").write_bytes(written())
    assert run_pqcache("sync", source, cache).returncode == 0


def test_sync_refuses_encrypted_columns(source: Path, tmp_path: Path) -> None:
    encrypted(source / "dt=2" / "b.parquet")
    ended = run_pqcache("sync", source, tmp_path / "cache")
    assert ended.returncode == 1
    assert "dt=2/b.parquet: columns are encrypted, which cannot be read; decrypt it first" in ended.stderr


def test_inspect_and_repartition_name_it(source: Path, tmp_path: Path) -> None:
    (source / "dt=2" / "b.parquet").write_bytes(HISTOGRAM)
    for arguments in (
        ("inspect", source),
        ("inspect", f"file://{source}"),
        ("repartition", source, tmp_path / "out", "--row-group-size", "20000"),
    ):
        ended = run_pqcache(*arguments)
        assert ended.returncode == 1, arguments
        assert "dt=2/b.parquet: the Parquet footer is damaged" in ended.stderr, arguments


def in_cache(source: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return a cache one file of which has been damaged since, keeping its size, and that file's path."""
    pqcache.sync(str(source), tmp_path / "cache")
    snapshot = pqcache.Cache(tmp_path / "cache").snapshot()
    path = snapshot.path / "dt=2" / "a.parquet"
    data = path.read_bytes()
    at = len(data) - 8 - len(footer_of(data))
    codec = b"\x19\x38\x01v\x04list\x07element\x15\x02"  # the path of v, and snappy
    found = data.index(codec, at)
    path.chmod(0o644)
    path.write_bytes(data[: found + len(codec) - 1] + b"\x54" + data[found + len(codec) :])
    return tmp_path / "cache", os.fspath(path)


def test_verify_names_it(source: Path, tmp_path: Path) -> None:
    cache, _ = in_cache(source, tmp_path)
    (item,) = pqcache.verify(cache).damage
    assert item.path == "dt=2/a.parquet"
    assert "unknown codec" in item.message


@pytest.mark.parametrize("what", ["cache", "directory"])
def test_the_loader_names_it(source: Path, tmp_path: Path, what: str) -> None:
    cache, damaged = in_cache(source, tmp_path)
    if what == "directory":
        cache = Path(damaged).parent
    code = """
import sys
from pqcache.torch import ParquetDataset
try:
    for batch in ParquetDataset(sys.argv[1], columns=["i", "v"], batch_size=10):
        pass
except Exception as error:
    print(type(error).__name__, error)
"""
    (tmp_path / "loader.py").write_text(code)
    ended = run_script(tmp_path / "loader.py", str(cache), cwd=tmp_path, env=os.environ)
    assert ended.returncode == 0, ended.stderr[-300:]
    assert ended.stdout.startswith(f"ParquetError {damaged}: the Parquet footer is damaged")


def test_schemas_are_distinguished_by_their_metadata_and_units() -> None:
    times = pa.table({"t": pa.array([1], pa.timestamp("ns"))})
    one, other = (written(times.replace_schema_metadata({"k": value})) for value in "ab")
    plain = written(times, use_deprecated_int96_timestamps=True, store_schema=False)
    for _ in range(2):
        assert (footer_in(one, "x", size=None)[1].metadata or {})[b"k"] == b"a"
        assert (footer_in(other, "x", size=None)[1].metadata or {})[b"k"] == b"b"
        for unit in ("ns", "us"):
            assert footer_in(plain, "x", unit, size=None)[1].types == [pa.timestamp(unit)]


def test_a_footer_too_long_is_refused_unread() -> None:
    asked = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return bytes(length - 8) + (300 << 20).to_bytes(4, "little") + b"PAR1"

    with pytest.raises(ParquetError, match=r"^a\.parquet: .*a footer of 314,572,800 bytes"):
        footer.read_tail(read, 600 << 20, "a.parquet")
    assert sum(asked) < 1 << 20
