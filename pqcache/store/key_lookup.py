"""Look up rows by key in key indexes: sorted files that are mapped into memory and searched by bisection.

    _pqcache/keys/user_id/
      index.arrow      the rows of the snapshot in each run
      checksums.json   those of index.arrow and of the runs
      0a1b2c3d.npy     a run: the keys of up to two million rows, sorted

Each run is sorted on its own, so building takes memory for a few runs and no merging, and a lookup searches every run
that may have the keys. The next snapshot links runs if it still has their rows, and makes new ones for new rows only.
``docs/cache-format.md`` describes the format.

A key is a 64-bit number. Integers, dates, times and booleans are numbers themselves, so they never collide. Strings,
binary and decimals become two independent hashes, 106 bits of which are kept: two different keys look equal with a
probability of one in 2 ** 106.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import MALFORMED, CacheError, DamagedError, UsageError, first_line
from pqcache.filters.expression import Operand, number_against_text, operand_of
from pqcache.parquet.arrow import is_text
from pqcache.parquet.schema import cast_exactly
from pqcache.store.partition_paths import with_hints
from pqcache.store.row_group_index import Index
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import checksum_matches, checksum_of, fsync_path, open_regular, read_regular

Codes = npt.NDArray[np.uint64]
_SIGN = np.uint64(1 << 63)
_BLOCK = 1 << 14  # values hashed at once: the intermediate arrays fit the processor's cache
_WORD = np.dtype("<u8")
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # the first n bytes of a word
FORMAT = 1
KEYS = "_pqcache/keys"
BITS = 21
ROWS = 1 << BITS  # of a run: its row numbers take these bits of a word, and its keys the rest
_INDEX = "index.arrow"
CHECKSUMS = "checksums.json"
_HEADER = 128  # bytes of a .npy file before its numbers, at most
SPANS = pa.schema(
    [
        ("run", pa.int32()),
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("group", pa.int64()),
        ("first", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Keys:
    """Keys as numbers: ``first``, and ``second`` if they are hashed; keys that aren't ``valid`` are null."""

    first: Codes
    second: Codes | None
    valid: npt.NDArray[np.bool_] | None

    def __len__(self) -> int:
        return len(self.first)


def key_type(column: str, kind: pa.DataType) -> pa.DataType:
    """The type that values are cast to, shared by types with the same values.

    Raises UsageError for types that can't be looked up.
    """
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return kind
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_decimal256(kind):
        return pa.decimal256(76, kind.scale)
    if pa.types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if pa.types.is_boolean(kind) or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)):
        return pa.date32() if pa.types.is_date(kind) else kind
    why = "rounded numbers cannot be keys" if pa.types.is_floating(kind) else "values of this type cannot be keys"
    raise UsageError(
        f"--key {column}", f"is {kind}, and {why}", "choose integers, strings, binary, decimals, dates or times"
    )


def is_hashed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_decimal(kind))


def keys_of(values: pa.Array, kind: pa.DataType) -> Keys:
    values = cast_exactly(values, kind)
    valid = None if not values.null_count else values.is_valid().to_numpy(zero_copy_only=False)
    if is_hashed(kind):
        return Keys(*_hashed(values, kind), valid)
    if pa.types.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    width, start = values.type.bit_width // 8, values.offset
    numbers = np.frombuffer(values.buffers()[1], f"{'u' if pa.types.is_uint64(kind) else 'i'}{width}", -1)
    numbers = numbers[start : start + len(values)]
    if pa.types.is_uint64(kind):
        return Keys(numbers, None, valid)
    return Keys(numbers.astype(np.int64).view(np.uint64) ^ _SIGN, None, valid)  # ascending as the values are


def keys_to_find(column: str, values: Any, kind: pa.DataType, operand: Operand | None = None) -> Keys:
    """The distinct keys to look up, given a value, or a list, numpy or Arrow array of values.

    Raises UsageError for nulls, and for values of a type that the column can't have; ``operand`` is the column, if
    known.
    """
    array = _as_array(column, values, kind)
    if array.null_count:
        raise UsageError(f"lookup of {column}", "None cannot be a key, as no index has nulls", "leave it out")
    if not len(array):
        return Keys(np.zeros(0, np.uint64), np.zeros(0, np.uint64) if is_hashed(kind) else None, None)
    if not _alike(array.type, kind):
        if is_text(kind) and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            sought = operand or Operand(column, (), kind)
            raise number_against_text(str(array[0]), sought, "lookup('{name}', '{value}')").within(
                f"lookup of {column}"
            )
        raise UsageError(f"lookup of {column}", f"its keys are {_named(kind)}, and these values are {array.type}")
    try:
        found = keys_of(array, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise UsageError(f"lookup of {column}", f"not all values fit {_named(kind)}: {first_line(error)}") from error
    _, once = np.unique(found.first, return_index=True)
    return Keys(found.first[once], None if found.second is None else found.second[once], None)


def _as_array(column: str, values: Any, kind: pa.DataType) -> pa.Array:
    """Values as one Arrow array without dictionaries."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        values = list(values) if hasattr(values, "__iter__") and not isinstance(values, str | bytes) else [values]
    if isinstance(values, list) and values and all(isinstance(value, np.datetime64) for value in values):
        values = np.array(values)  # Arrow takes days of numpy's in an array only
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    try:
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
        except OverflowError:  # beyond int64, which Arrow takes integers for
            array = pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"lookup of {column}", f"the values are not of one type: {first_line(error)}") from error
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _alike(value: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of the two types can be equal."""
    if pa.types.is_timestamp(kind):
        return bool(pa.types.is_timestamp(value)) and (value.tz is None) == (kind.tz is None)
    try:
        value = key_type("", value)
    except UsageError:
        return False
    if pa.types.is_decimal(kind):
        return bool(pa.types.is_decimal(value) or pa.types.is_integer(value))
    for same in (pa.types.is_integer, pa.types.is_time, pa.types.is_duration):
        if same(kind):
            return bool(same(value))
    return bool(value == kind)


def _named(kind: pa.DataType) -> str:
    return str(kind).removeprefix("large_")


def scramble(codes: Codes, seed: int = 0) -> Codes:
    """Map numbers one-to-one, by the last step of Austin Appleby's MurmurHash3."""
    h: Codes = codes ^ np.uint64(seed)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def _hashed(values: pa.Array, kind: pa.DataType) -> tuple[Codes, Codes]:
    """Two hashes of each value's bytes; arbitrary ones for nulls."""
    count = len(values)
    if pa.types.is_decimal(kind):
        width = kind.bit_width // 8
        data = np.frombuffer(values.buffers()[1], np.uint8)[values.offset * width :]
        ends = np.arange(count + 1, dtype=np.int64) * width
    else:
        ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + count + 1]
        buffer = values.buffers()[2]
        data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    first, second = np.empty(count, np.uint64), np.empty(count, np.uint64)
    for low in range(0, count, _BLOCK):
        part = slice(low, min(low + _BLOCK, count))
        starts, lengths = ends[part], np.diff(ends[low : part.stop + 1])
        h1 = lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        h2 = h1 ^ np.uint64(0xD1B54A32D192ED03)
        for active, word in _words(data, starts, lengths):
            h1[active] = _step(h1[active] ^ word, 0x9FB21C651E98DF25, 32)
            h2[active] = _step(h2[active] + word, 0xA0761D6478BD642F, 29)
        first[part], second[part] = scramble(h1), scramble(h2, 0x589965CC75374CC3)
    return first, second


def _step(h: Codes, factor: int, shift: int) -> Codes:
    h *= np.uint64(factor)
    h ^= h >> np.uint64(shift)
    h *= np.uint64(factor)
    return h


def _words(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[Any, Codes]]:
    """Yield words of eight bytes, zero-padded, and the values they belong to."""
    if not len(starts):
        return
    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
    padded = np.zeros(end - begin + 8, np.uint8)
    padded[:-8] = data[begin:end]
    every = np.ndarray(end - begin + 1, _WORD, padded, 0, (1,))  # a word at each byte
    at, left = starts - begin, lengths
    active: Any = slice(None)
    while len(at):
        least, most = int(left.min()), int(left.max())
        if most <= 0:
            return
        if least <= 0:
            more = np.flatnonzero(left > 0)
            active = more if isinstance(active, slice) else active[more]
            at, left = at[more], left[more]
        word = every[at]
        if least < 8:
            word &= _MASKS[np.minimum(left, 8)]
        yield active, word
        at, left = at + 8, left - 8


Ints = npt.NDArray[np.int64]


def ranges_of(begins: Ints, counts: Ints) -> Ints:
    """Concatenate ranges of ``counts[i]`` numbers from ``begins[i]``."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Rows of a snapshot by row group and position.

    ``groups``    int64, row groups by their row in the index, ascending, each once
    ``offsets``   int64, one more than ``groups``: ``groups[i]`` has ``rows[offsets[i]:offsets[i + 1]]``
    ``rows``      int64, positions in their row group, counted from 0, ascending, each once
    ``snapshot``  the snapshot's ``Snapshot.id``; empty if unknown

    `SelectedRows.of` makes one from pairs in any order. Raises UsageError for arrays that don't fit together.
    """

    groups: Ints
    offsets: Ints
    rows: Ints
    snapshot: str = ""

    def __post_init__(self) -> None:
        for name in ("groups", "offsets", "rows"):
            found = np.asarray(getattr(self, name))
            if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
                raise UsageError("SelectedRows", f"{name} is not a one-dimensional array of integers")
            object.__setattr__(self, name, found.astype(np.int64, copy=False))
        if len(self.offsets) != len(self.groups) + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.rows):
            raise UsageError("SelectedRows", "offsets has one item more than groups, from 0 to the number of rows")
        if np.any(self.counts < 0) or np.any(np.diff(self.groups) <= 0) or np.any(self.groups[:1] < 0):
            raise UsageError("SelectedRows", "groups must be ascending, each once, and their offsets ascending too")
        first = np.zeros(len(self.rows), np.bool_)
        first[self.offsets[:-1][self.counts > 0]] = True
        if np.any(self.rows < 0) or np.any(np.diff(self.rows)[~first[1:]] <= 0):
            raise UsageError("SelectedRows", "the rows of a row group must be ascending, each once")

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of(groups: npt.ArrayLike, rows: npt.ArrayLike, snapshot: str = "") -> SelectedRows:
        """Select the rows of pairs (row group, position) in any order; repeated pairs count once."""
        arrays = [np.asarray(groups), np.asarray(rows)]
        if any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in arrays):
            raise UsageError("SelectedRows.of", "groups and rows must be one-dimensional, of integers")
        if len(arrays[0]) != len(arrays[1]):
            raise UsageError("SelectedRows.of", f"{len(arrays[0])} groups and {len(arrays[1])} rows make no pairs")
        if any(len(part) and part.max() > np.iinfo(np.int64).max for part in arrays):
            raise UsageError("SelectedRows.of", "groups and rows must be numbers below 2**63")
        pairs = np.unique(np.stack([part.astype(np.int64) for part in arrays]), axis=1)
        found, counts = np.unique(pairs[0], return_counts=True)
        return SelectedRows(found, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), pairs[1], snapshot)

    @property
    def counts(self) -> Ints:
        """The number of rows in each of ``groups``."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """A text that identifies these rows."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.groups, self.offsets, self.rows):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def positions(self, group: int) -> Ints:
        """Positions of rows in one row group; empty unless it is among ``groups``."""
        at = int(np.searchsorted(self.groups, group))
        if at == len(self.groups) or self.groups[at] != group:
            return np.zeros(0, np.int64)
        return self.rows[self.offsets[at] : self.offsets[at + 1]]

    def check(self, rows: Ints) -> None:
        """Raise UsageError if row groups of ``rows`` rows lack some of these rows."""
        if len(self.groups) and self.groups[-1] >= len(rows):
            raise UsageError("rows", f"there is no row group {self.groups[-1]}, the dataset has {len(rows):,}")
        last = self.rows[self.offsets[1:][self.counts > 0] - 1]
        beyond = last >= rows[self.groups[self.counts > 0]]
        if np.any(beyond):
            group = int(self.groups[self.counts > 0][beyond][0])
            raise UsageError("rows", f"row group {group} has {rows[group]:,} rows, and no row {last[beyond][0]:,}")


@dataclass(frozen=True, kw_only=True)
class KeyRun:
    """A file with the sorted keys of ``rows`` rows, ``keys`` of which aren't null.

    Keys lie between ``low`` and ``high`` (as numbers), which are None for hashed keys. ``wide`` runs have a second word
    for each key, which doesn't fit into the first one beside the row number.
    """

    file: str
    rows: int
    keys: int
    wide: bool
    low: int | None = None
    high: int | None = None

    @property
    def size(self) -> int:
        return 8 * self.keys * (2 if self.wide else 1)


@dataclass(frozen=True)
class KeyIndex:
    """A key index of a snapshot; ``field`` is the column, with the type that its keys are compared in.

    ``spans`` has a row for each span of rows, consecutive both in a run and in a row group: the ``run``, the ``start``
    of its ``length`` rows in the run, the row ``group`` in the snapshot's index (-1 if that is gone), and the ``first``
    row in it.
    """

    directory: Path
    field: pa.Field
    runs: tuple[KeyRun, ...]
    spans: pa.Table

    def numbers(self, name: str) -> Ints:
        return np.asarray(self.spans[name].to_numpy(), np.int64)

    @property
    def rows(self) -> int:
        """The number of rows of the snapshot that were examined."""
        return int(self.numbers("length")[self.numbers("group") >= 0].sum())

    @property
    def size(self) -> int:
        return sum(run.size for run in self.runs)


def directory_of(snapshot: Path, column: str) -> Path:
    """The directory of a column's index; raises UsageError if the name doesn't suit a directory."""
    name = quote(column, safe="").replace(".", "%2E")
    if not name or len(name) > 255:
        raise UsageError(f"--key {column}", f"the name is {('too long' if name else 'empty')} for a key index")
    return snapshot / KEYS / name


def columns_indexed(snapshot: Path) -> list[str]:
    """Names of the columns with a key index, intact or not."""
    try:
        return sorted(unquote(name) for name in os.listdir(snapshot / KEYS))
    except FileNotFoundError:
        return []


def lookup(snapshot: Snapshot, column: str, values: Any) -> SelectedRows:
    directory = directory_of(snapshot.path, column)
    if directory.is_dir():
        index = read_key_index(directory)
        return _selected(*find(index, keys_to_find(column, values, index.field.type)), snapshot.id)
    index_of_groups = snapshot.index()
    if column in index_of_groups.partitions.column_names:
        return _selected(*_in_partitions(index_of_groups, column, values), snapshot.id)
    field_of(index_of_groups, column)
    raise CacheError(column, f"{snapshot.id} has no key index of it", f"run '{command_for(directory)}'")


def field_of(index: Index, column: str) -> pa.Field:
    """A column, or ``a.b`` inside a struct, in its key type; raises UsageError if it is missing."""
    if column in index.partitions.column_names:
        raise UsageError(f"--key {column}", "is a partition column, which Cache.lookup finds without a key index")
    if column in index.path_values.column_names:
        raise UsageError(
            column, "is in the paths of some files and inside others: such a column has no key index", "use filters="
        )
    schema, outer = index.data_schema, column
    if column not in schema.names and "." in column:
        outer = column.partition(".")[0]
    if outer not in schema.names:
        names = ", ".join(index.schema.names)
        raise UsageError(column, "there is no such column", f"choose one of {names}")
    kind = schema.field(outer).type
    for name in column.split(".")[1:] if outer != column else ():
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            raise UsageError(column, f"there is no {name!r} in it, it is {kind}")
        kind = kind.field(name).type
    return pa.field(column, key_type(column, kind))


def _selected(groups: Ints, rows: Ints, snapshot: str) -> SelectedRows:
    found, starts = np.unique(groups, return_index=True)
    return SelectedRows(found, np.append(starts, len(rows)).astype(np.int64), rows, snapshot)


def find(index: KeyIndex, keys: Keys) -> tuple[Ints, Ints]:
    """The row groups and rows with one of ``keys``, in order."""
    of_run = np.searchsorted(index.numbers("run"), np.arange(len(index.runs) + 1))
    starts, groups, firsts = index.numbers("start"), index.numbers("group"), index.numbers("first")
    found_groups, found_rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, run in enumerate(index.runs):
        low, high = of_run[number], of_run[number + 1]
        at = _search(index.directory, run, keys)
        if not len(at):
            continue
        if at.max() >= run.rows:
            raise _damaged(index.directory / run.file)
        span = np.searchsorted(starts[low:high], at, side="right") - 1 + low
        here = groups[span] >= 0
        span = span[here]
        found_groups.append(groups[span])
        found_rows.append(firsts[span] + at[here] - starts[span])
    group, row = np.concatenate(found_groups), np.concatenate(found_rows)
    order = np.lexsort((row, group))
    return group[order], row[order]


def _search(directory: Path, run: KeyRun, keys: Keys) -> Ints:
    """The rows of a run with ``keys``, in the order of the latter."""
    first, second = keys.first, keys.second
    least = np.uint64(run.low or 0)
    if run.low is not None and run.high is not None:
        first = first[np.searchsorted(first, least) : np.searchsorted(first, np.uint64(run.high), "right")]
    if not len(first) or not run.keys:
        return np.zeros(0, np.int64)
    words = _words_of(directory, run)
    mask = np.uint64(ROWS - 1)
    if not run.wide:
        first = (first - least) << np.uint64(BITS)
    elif second is None:
        first, second = scramble(first), first
    low = np.searchsorted(words[0], first & ~mask)
    counts = np.searchsorted(words[0], first | mask, "right") - low
    if not counts.any():
        return np.zeros(0, np.int64)
    which = np.repeat(np.arange(len(first)), counts)
    at = ranges_of(low, counts)
    if second is not None:
        at = at[words[1][at] == second[which]]
    return np.asarray(words[0][at] & mask, np.int64)


def _words_of(directory: Path, run: KeyRun) -> Codes:
    """Map a run into memory as one or two rows of words; raises DamagedError if its size is wrong."""
    path = directory / run.file
    try:
        with open(path, "rb", opener=open_regular) as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise _damaged(path) from error
    header = len(mapped) - run.size
    if not 0 < header <= _HEADER:
        raise _damaged(path)
    return np.frombuffer(mapped, np.uint64, -1, header).reshape(-1, run.keys)


def _in_partitions(index: Index, column: str, values: Any) -> tuple[Ints, Ints]:
    held = index.partitions[column].combine_chunks()
    kind = key_type(column, held.type)
    here = keys_of(held, kind)
    operand = operand_of([column], with_hints(index.partitions.schema, index.partitions))
    match = np.isin(here.first, keys_to_find(column, values, kind, operand).first)
    if here.valid is not None:
        match &= here.valid
    groups = np.flatnonzero(match[index.numbers("file")] & (index.rows > 0))
    rows = index.rows[groups]
    return np.repeat(groups, rows), ranges_of(np.zeros_like(rows), rows)


def write_key_index(
    directory: Path, field: pa.Field, runs: Sequence[KeyRun], spans: pa.Table, known: Mapping[str, str]
) -> None:
    """Write a key index durably; ``known`` has checksums of runs by file name."""
    about = {"pqcache": json.dumps({"format": FORMAT, "runs": [asdict(run) for run in runs]})}
    about["pqcache.schema"] = pa.schema([field]).serialize().to_pybytes()
    with pa.OSFile(str(directory / _INDEX), "wb") as sink:
        schema = SPANS.with_metadata(about)
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(spans.cast(schema).combine_chunks())
    sums = {run.file: known.get(run.file) or checksum_of(directory / run.file) for run in runs if run.keys}
    sums[_INDEX] = checksum_of(directory / _INDEX)
    (directory / CHECKSUMS).write_text(json.dumps(sums) + "\n")
    for name in (_INDEX, CHECKSUMS):
        fsync_path(directory / name)
    fsync_path(directory)


def read_key_index(directory: Path) -> KeyIndex:
    """Read a key index; raises DamagedError."""
    path = directory / _INDEX
    try:
        with pa.ipc.open_file(pa.py_buffer(read_regular(path))) as reader:  # small: faster than mapping it
            spans = reader.read_all()
        metadata = spans.schema.metadata or {}
        if not spans.schema.equals(SPANS) or any(column.null_count for column in spans.columns):
            raise TypeError("its columns are of other types")
        about = json.loads(metadata[b"pqcache"])
        if about["format"] != FORMAT:
            raise CacheError(
                path, f"written in format {about['format']}, this pqcache reads format {FORMAT}", "upgrade pqcache"
            )
        runs = tuple(KeyRun(**run) for run in about["runs"])
        field = pa.ipc.read_schema(pa.py_buffer(metadata[b"pqcache.schema"])).field(0)
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        raise _damaged(path) from error
    return KeyIndex(directory, field, runs, spans.replace_schema_metadata(None))


def read_checksums(directory: Path) -> dict[str, str]:
    """Checksums by file name; raises DamagedError if they can't be read."""
    path = directory / CHECKSUMS
    try:
        return {str(name): str(checksum) for name, checksum in json.loads(read_regular(path)).items()}
    except (OSError, *MALFORMED) as error:
        raise _damaged(path) from error


def check_key_index(directory: Path, deep: bool = False) -> KeyIndex:
    """Check a key index against its checksum, and runs against their sizes; raises DamagedError.

    With ``deep``, compares runs with their checksums too.
    """
    sums = read_checksums(directory)
    try:
        if not checksum_matches(sums.get(_INDEX, ""), directory / _INDEX):
            raise _damaged(directory / _INDEX)
        index = read_key_index(directory)
        for run in index.runs:
            path = directory / run.file
            if run.keys and not (0 < path.stat().st_size - run.size <= _HEADER):
                raise _damaged(path)
            if run.keys and deep and not checksum_matches(sums.get(run.file, ""), path):
                raise _damaged(path)
    except OSError as error:
        raise _damaged(Path(str(error.filename))) from error
    return index


def command_for(directory: Path) -> str:
    column = shlex.quote(unquote(directory.name))
    return f"pqcache index {shlex.quote(str(directory.parents[4]))} --key {column}"


def _damaged(path: Path) -> DamagedError:
    return DamagedError(path, "is missing, or not as it was written", f"'{command_for(path.parent)}' rebuilds it")
