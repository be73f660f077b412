"""Sources and caches that are damaged or tampered with end in an error of pqcache's own, or it makes no difference."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from deltalake import DeltaTable, write_deltalake

import pqcache
from pqcache.errors import PqcacheError
from tests.forked_commands import run_pqcache

COUNT = 12
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**63, 10**30, 1.5, "", "x", "..", "a\0b", "\ud800", [], {}, [None], {"a": 1}, [[{}]],
)  # fmt: skip
OTHER_FILES = (
    b"",
    b"{}",
    b"null",
    b"\xff\xfe",
    b"<html>log in</html>",
    b"[" * 50_000,
    b"PAR1PAR1",
    b"ARROW1\0\0ARROW1",
)


def rows(first: int) -> pa.Table:
    numbers = range(first, first + 10)
    return pa.table({"id": pa.array(numbers, pa.int64()), "s": [f"s{n}" for n in numbers], "v": [[1.0, 2.0]] * 10})


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Parquet files, a Delta table with a checkpoint, and a cache with a key index."""
    root = tmp_path_factory.mktemp("originals")
    for day in (1, 2):
        (root / f"lake/dt={day}").mkdir(parents=True)
        pq.write_table(rows(day * 10), root / f"lake/dt={day}/a.parquet", row_group_size=5)
        write_deltalake(root / "delta", rows(day * 10), mode="append")
    DeltaTable(root / "delta").create_checkpoint()
    write_deltalake(root / "delta", rows(30), mode="append")
    (root / "caches").mkdir()
    pqcache.sync(root / "lake", root / "caches/cache")
    pqcache.index(root / "caches/cache", keys=["id"])
    return root


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    place, size = chance.randrange(len(data) + 1), chance.choice((1, 4, 40))
    new = bytearray(data)
    if chance.random() < 0.5 and data:
        for _ in range(size):
            new[chance.randrange(len(data))] = chance.choice((0, 255, 127, chance.randrange(256)))
        return bytes(new)
    return chance.choice((
        data[:place],
        data[:place] + data[place + size :],
        data[:place] + chance.randbytes(size) + data[place:],
        data[:place] + b"\xff" * 8 + data[place + 8 :],
        chance.choice(OTHER_FILES),
    ))  # fmt: skip


def changed_json(value: Any, chance: random.Random) -> Any:
    """Return ``value`` with one part of it missing, under another name, or another value."""
    if isinstance(value, dict | list) and value and (chance.random() < 0.8):
        new: Any = dict(value) if isinstance(value, dict) else list(value)
        key = chance.choice(list(new) if isinstance(new, dict) else range(len(new)))
        how = chance.random()
        if how < 0.15:
            del new[key]
        elif how < 0.25 and isinstance(new, dict):
            new[f"{key}x"] = new.pop(key)
        else:
            new[key] = changed_json(new[key], chance)
        return new
    return [value] if chance.random() < 0.2 else chance.choice(ODD)


def changed(path: Path, chance: random.Random) -> bytes:
    """Return other contents of a file: as its format has it, with wrong values, or damaged bytes."""
    data = path.read_bytes()
    if chance.random() < 0.4:
        return changed_bytes(data, chance)
    if path.suffix == ".zst":
        text = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    elif path.suffix == ".json":
        text = data
    elif path.suffix == ".arrow":
        return changed_arrow(data, chance)
    else:
        return changed_bytes(data, chance)
    lines = [json.loads(line) for line in text.splitlines()]
    number = chance.randrange(len(lines))
    lines[number] = changed_json(lines[number], chance)
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return zstandard.ZstdCompressor().compress(text) if path.suffix == ".zst" else text


def changed_arrow(data: bytes, chance: random.Random) -> bytes:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    name = chance.choice(table.column_names)
    place, kind = table.column_names.index(name), table.schema.field(name).type
    value = chance.choice([-1, 2**62])
    table = chance.choice((
        table.drop_columns([name]),
        table.set_column(place, name, pa.nulls(len(table), kind)),
        table.set_column(place, name, pa.array(["x"] * len(table))),
        table.set_column(place, name, pa.array([value] * len(table), pa.int64())),
        table.replace_schema_metadata({"pqcache": json.dumps(changed_json(about(table), chance))}),
        table.slice(1),
        pa.concat_tables([table, table]),
    ))  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def about(table: pa.Table) -> Any:
    return json.loads((table.schema.metadata or {}).get(b"pqcache", b"{}"))


def read(cache: Path) -> None:
    for _ in pqcache.Cache.open(cache).batches(shuffle=False):
        pass


USES: tuple[Callable[[Path], object], ...] = (
    pqcache.sync,
    lambda cache: pqcache.sync(cache, force=True),
    pqcache.inspect,
    pqcache.log,
    pqcache.verify,
    lambda cache: pqcache.verify(cache, repair=True),
    pqcache.snapshots,
    pqcache.gc,
    lambda cache: pqcache.status(cache.parent),
    pqcache.index,
    lambda cache: pqcache.sync(cache, cache.parent / "copy"),
    lambda cache: pqcache.Cache.open(cache).lookup("id", [12]),
    read,
)


def take(source: Path) -> None:
    pqcache.sync(source, source.parent / "new")
    read(source.parent / "new")


def files_of(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and "current" not in path.parts and path.stat().st_size:
            yield path


def with_texts(column: str, table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, pa.array(["x"] * len(table)))


def change_manifest(cache: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = (cache / "current/_pqcache/files.arrow").resolve()
    table = change(pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all())
    path.unlink()
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def test_a_manifest_of_other_columns_or_files(originals: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(originals / "caches/cache", tmp_path / "cache", symlinks=True))
    change_manifest(cache, lambda table: table.slice(1))
    with pytest.raises(pqcache.DamagedError, match="names other files than the row-group index"):
        pqcache.inspect(cache)
    for column in ("rows", "sources"):
        cache = Path(shutil.copytree(originals / "caches/cache", tmp_path / column / "cache", symlinks=True))
        change_manifest(cache, partial(with_texts, column))
        (cache / "history.jsonl.zst").unlink()
        [record] = pqcache.log(cache)
        assert "rows" not in record
        [found] = pqcache.status(tmp_path / column).caches
        assert found.error is not None
        assert "the manifest cannot be read" in found.error
        assert pqcache.sync(cache).published, "it is built again"


def test_a_damaged_line_of_the_history_is_passed_over(originals: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(originals / "caches/cache", tmp_path / "cache", symlinks=True))
    known = pqcache.log(cache)
    with (cache / "history.jsonl.zst").open("ab") as file:
        for line in (
            b'{"time": 1, "comm',
            b'{"time": 1}',
            b"[" * 50_000,
            json.dumps({**known[0], "seconds": "x"}).encode(),
        ):
            file.write(zstandard.ZstdCompressor().compress(line + b"\n"))
    assert pqcache.log(cache) == known
    assert pqcache.status(tmp_path)
    done = run_pqcache("log", cache)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("what", "seed"),
    [
        ("caches/cache", 7),
        *(
            pytest.param(what, seed, marks=pytest.mark.deep)
            for what in ("lake", "delta", "caches/cache")
            for seed in range(8)
        ),
    ],
)
def test_every_error_is_ours(what: str, seed: int, originals: Path, tmp_path: Path) -> None:
    chance = random.Random(f"{what} {seed}")
    for number in range(COUNT):
        root = tmp_path / str(number)
        shutil.copytree(originals, root, symlinks=True)
        file = chance.choice(list(files_of(root / what)))
        new = changed(file, chance)
        file.unlink()
        file.write_bytes(new)
        use = chance.choice(USES) if "cache" in what else take
        said = ""
        try:
            use(root / what)
        except PqcacheError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"{number}: {file.relative_to(root)}, {use}") from error
        assert "\n" not in said
        shutil.rmtree(root)
