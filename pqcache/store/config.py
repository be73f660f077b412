"""What a cache remembers of its source and options: ``pqcache.toml``, which people may edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pqcache.errors import MALFORMED, CacheError, UsageError
from pqcache.parquet.rewrite.options import RewriteOptions, parse_compression
from pqcache.store.cache_directory import config_text, parsed
from pqcache.store.drivers.base import HDFS3, HDFS_NATIVE
from pqcache.store.hive import parse_types
from pqcache.store.layout import CONFIG
from pqcache.store.newest import FREE, parse_newest
from pqcache.store.ownership import file_mode
from pqcache.store.shard import parse_shard
from pqcache.store.tables.base import VersionRule
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import quoted
from pqcache.system.disk import write_durably
from pqcache.units import parse_duration, parse_size

FORMAT = 1
KEEP = 2
MAX_DELETE = "50%"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A cache's source and options; ``row_group_size`` is in bytes, None keeps files as they are at the source.

    From ``compression`` to ``shuffle`` they are the options of the last repartition, None where it had none.
    ``keys`` are the columns that each new snapshot has key indexes of, ``time_units`` the units that columns of times
    have, where not the ones that they had first, and ``partition_types`` the types declared for partition columns.
    """

    source: str
    where: str | None = None
    columns: tuple[str, ...] | None = None
    row_group_size: int | None = None
    shard: str | None = None
    newest: str | None = None
    keep: int = KEEP
    marker: str | None = None
    settle: float = 0.0
    max_delete: str = MAX_DELETE
    hdfs_driver: str = HDFS_NATIVE
    checksum: bool = False
    skip_bad: bool = False
    ignore_case: bool = False
    as_files: bool = False
    all_files: bool = False
    version: str | None = None
    as_of: str | None = None
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    compression: str | None = None
    compat: bool = False
    keep_int96: bool = False
    dense: Mapping[str, str] | None = None
    shuffle: int | None = None
    keys: tuple[str, ...] = ()
    time_units: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    partition_types: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep = {self.keep}", "at least one snapshot has to be kept")
        if self.row_group_size is not None and self.row_group_size < 1:
            raise UsageError(f"row_group_size = {self.row_group_size}", "has to be at least one byte")
        if self.hdfs_driver not in (HDFS_NATIVE, HDFS3):
            raise UsageError(f"--hdfs-driver {self.hdfs_driver}", f"choose {HDFS_NATIVE} or {HDFS3}")
        parse_max_delete(self.max_delete)
        if self.version is not None and self.as_of is not None:
            raise UsageError("--version", "and --as-of name two versions", "give one of them, and '' for the other")
        if self.shard is not None:
            parse_shard(self.shard)
        parse_types(self.partition_types)
        if self.newest and parse_newest(self.newest).text == FREE and self.shard is not None:
            raise UsageError(
                f"--newest {FREE}",
                f"excludes --shard {self.shard}, because nodes with other free space would take other partitions",
                "give a size or a number of partitions",
            )
        for name, unit in self.time_units.items():
            if unit not in ("s", "ms", "us", "ns"):
                raise UsageError(f"--time-units {name}={unit}", "not a unit of time", "choose s, ms, us or ns")
        self.rewrite()

    @property
    def file_rules(self) -> FileRules:
        """Which files of the source are taken, and what their paths say."""
        types = self.partition_types or {}
        return FileRules(as_files=self.as_files, all_files=self.all_files, marker=self.marker, types=types)

    @property
    def version_rule(self) -> VersionRule:
        """Which version of a table is taken."""
        return VersionRule(version=self.version, as_of=self.as_of)

    def rewrite(self) -> RewriteOptions | None:
        """Return how files are rewritten, or None when they are taken as they come."""
        if self.row_group_size is None:
            return None
        codec, level = (None, None) if self.compression is None else parse_compression(self.compression)
        dense = None
        if self.dense is not None:
            from pqcache.parquet.dense_columns import (
                parse_dense,  # and pyarrow, which a sync with nothing to do does not need
            )

            dense = tuple((name, parse_dense(text)) for name, text in sorted(self.dense.items()))
        return RewriteOptions(
            row_group_size=self.row_group_size,
            compression=codec,
            compression_level=level,
            compat=self.compat,
            keep_int96=self.keep_int96,
            dense=dense,
            shuffle=self.shuffle,
        )


def updated(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return ``config`` with ``changes``; None leaves a field as it is, an empty string clears it."""
    changed: dict[str, Any] = {name: None if v == "" else v for name, v in changes.items() if v is not None}
    return replace(config, **changed)


def read_config(cache: Path) -> Config:
    """Read ``pqcache.toml``; a missing, malformed or newer one raises CacheError."""
    path = cache / CONFIG
    try:
        document: Mapping[str, Any] = parsed(config_text(path))
    except FileNotFoundError as error:
        raise CacheError(cache, "not a pqcache", f"make one with 'pqcache sync SOURCE {quoted(cache)}'") from error
    except (OSError, *MALFORMED) as error:
        raise CacheError(path, f"cannot be read ({error})", "correct it, or sync into a new directory") from error
    if document.get("format") != FORMAT:
        raise CacheError(
            path,
            f"format {document.get('format')} is not {FORMAT}, which this pqcache reads",
            "upgrade pqcache, or sync into a new directory",
        )
    try:
        return config_of(document)
    except MALFORMED as error:
        raise CacheError(path, f"{error}", "correct it, or sync into a new directory") from error


def config_of(document: Mapping[str, Any]) -> Config:
    """Return what a document says; UsageError, KeyError, ValueError, TypeError or AttributeError for what is wrong."""
    _check_names(document)
    size = document.get("row_group_size")
    return Config(
        source=str(document["source"]),
        where=_text(document, "where"),
        columns=_names(document, "columns") if "columns" in document else None,
        row_group_size=None if size is None else parse_size(size),
        shard=_text(document, "shard"),
        newest=str(document["newest"]) if "newest" in document else None,
        keep=_count(document, "keep", KEEP),
        marker=_text(document, "marker"),
        settle=parse_duration(document.get("settle", 0.0)),
        max_delete=str(document.get("max_delete", MAX_DELETE)),
        hdfs_driver=str(document.get("hdfs_driver", HDFS_NATIVE)),
        checksum=_flag(document, "checksum"),
        skip_bad=_flag(document, "skip_bad"),
        ignore_case=_flag(document, "ignore_case"),
        as_files=_flag(document, "as_files"),
        all_files=_flag(document, "all_files"),
        version=None if "version" not in document else str(document["version"]),
        as_of=None if "as_of" not in document else str(document["as_of"]),
        options={str(k): str(v) for k, v in document.get("options", {}).items()},
        compression=_text(document, "compression"),
        compat=_flag(document, "compat"),
        keep_int96=_flag(document, "keep_int96"),
        dense=_pairs(document, "dense"),
        shuffle=None if document.get("shuffle") is None else _count(document, "shuffle", 0),
        keys=_names(document, "keys"),
        time_units=_pairs(document, "time_units") or {},
        partition_types=_pairs(document, "partition_types"),
    )


def _check_names(document: Mapping[str, Any]) -> None:
    """Raise UsageError for a name that is not known: what a person means by it would not be done."""
    known = {"format", *(item.name for item in fields(Config))}
    for name in document.keys() - known:
        from difflib import get_close_matches  # a correct file does not need it

        nearest = get_close_matches(name.lower().replace("-", "_"), known, 1, 0.5)
        meant = f"'{nearest[0]}' is the nearest that is" if nearest else f"these are: {', '.join(sorted(known))}"
        raise UsageError("", f"'{name}' is not known, {meant}")


def _flag(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise UsageError("", f"{name} = {value!r} has to be true or false")
    return value


def _text(document: Mapping[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError("", f"{name} = {value!r} has to be a text in quotes")
    return value


def _names(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = document.get(name, [])
    if isinstance(value, str):  # which would be taken as a list of letters
        raise UsageError("", f"{name} = {value!r} has to be a list, like [{value!r}]")
    return tuple(map(str, value))


def _pairs(document: Mapping[str, Any], name: str) -> dict[str, str] | None:
    value = document.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise UsageError("", f"{name} = {value!r} has to be a table, like [{name}]")
    return None if value is None else {str(k): str(v) for k, v in value.items()}


def _count(document: Mapping[str, Any], name: str, default: int) -> int:
    value = document.get(name, default)
    if isinstance(value, bool | float) or not isinstance(value, int | str):
        raise UsageError("", f"{name} = {value!r} has to be a whole number")
    return int(value)


def write_config(cache: Path, config: Config) -> None:
    """Write ``pqcache.toml``, keeping a person's comments; secrets must not be in ``config.options``."""
    import tomlkit  # slow to import, and a sync with nothing to do writes nothing

    path = cache / CONFIG
    if path.is_file():
        document = tomlkit.parse(config_text(path))
    else:
        document = tomlkit.document()
        document.add(tomlkit.comment("Written by pqcache; 'pqcache sync CACHE' repeats with what is here."))
    before = tomlkit.dumps(document)
    size = config.row_group_size
    values = {
        "format": FORMAT,
        "source": config.source,
        "where": config.where,
        "columns": None if config.columns is None else list(config.columns),
        "row_group_size": None if size is None else _size_text(size),
        "shard": config.shard,
        "newest": config.newest,
        "keep": config.keep,
        "marker": config.marker,
        "settle": f"{config.settle:f}".rstrip("0").rstrip(".") + "s" if config.settle else None,  # never 1e+06s
        "max_delete": config.max_delete if config.max_delete != MAX_DELETE else None,
        "hdfs_driver": config.hdfs_driver if config.hdfs_driver != HDFS_NATIVE else None,
        "checksum": config.checksum or None,
        "skip_bad": config.skip_bad or None,
        "ignore_case": config.ignore_case or None,
        "as_files": config.as_files or None,
        "all_files": config.all_files or None,
        "version": config.version,
        "as_of": config.as_of,
        "options": dict(config.options) or None,
        "compression": config.compression,
        "compat": config.compat or None,
        "keep_int96": config.keep_int96 or None,
        "shuffle": config.shuffle,
        "keys": list(config.keys) or None,
        "dense": None if config.dense is None else dict(config.dense),
        "time_units": dict(config.time_units) or None,
        "partition_types": dict(config.partition_types) if config.partition_types else None,
    }
    for name, value in values.items():
        if value is None:
            document.pop(name, None)
        elif document.get(name) != value:
            document[name] = value
    after = tomlkit.dumps(document)
    if after != before or not path.is_file():
        write_durably(path, after.encode(), cache / "tmp", file_mode())


def _size_text(size: int) -> str:
    """Return ``size`` as people write it: ``128MB`` where that is exact."""
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def parse_max_delete(text: str) -> tuple[float, bool]:
    """Return the limit in ``--max-delete`` and whether it is a percentage.

    >>> parse_max_delete("50%"), parse_max_delete("1000")
    ((50.0, True), (1000.0, False))
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if match is None or (match[2] and float(match[1]) > 100):
        raise UsageError(f"--max-delete {text!r}", "write a number of files like 1000, or a share like 50%")
    return float(match[1]), bool(match[2])
