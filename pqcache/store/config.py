"""The source and options that a cache remembers, in ``pqcache.toml``, which users may edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqcache.errors import MALFORMED, CacheError, UsageError
from pqcache.options import Remembered, options_of
from pqcache.options import parsed as parsed_options
from pqcache.parquet.rewrite.recipe import RewriteOptions, parse_compression
from pqcache.store.cache_directory import config_text, parsed
from pqcache.store.expect import Rule, parse_rules
from pqcache.store.layout import CONFIG
from pqcache.store.ownership import file_mode
from pqcache.store.partition_paths import parse_types
from pqcache.store.table_part import FREE, parse_newest, parse_shard
from pqcache.store.tables.base import VersionRule
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import quoted
from pqcache.system.disk import write_durably

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Config(Remembered):
    """A cache's source and options, as the table of options describes them."""

    def __post_init__(self) -> None:
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
        _ = self.rules

    @property
    def file_rules(self) -> FileRules:
        types = self.partition_types or {}
        return FileRules(as_files=self.as_files, all_files=self.all_files, marker=self.marker, types=types)

    @property
    def version_rule(self) -> VersionRule:
        return VersionRule(version=self.version, as_of=self.as_of)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return parse_rules(self.expect)

    def rewrite(self) -> RewriteOptions | None:
        """How files are rewritten; None if they are kept as they are."""
        if self.row_group_size is None:
            return None
        codec, level = (None, None) if self.compression is None else parse_compression(self.compression)
        dense = None
        if self.dense is not None:
            from pqcache.parquet.dense import (
                parse_dense,  # and pyarrow, which a sync with nothing to do does not need
            )

            dense = tuple((name, parse_dense(text)) for name, text in sorted(self.dense.items()))
        return RewriteOptions(
            row_group_size=self.row_group_size,
            compression=codec,
            compression_level=level,
            compat=self.compat,
            dense=dense,
            shuffle=self.shuffle,
        )


def updated(config: Config, changes: Mapping[str, Any]) -> Config:
    """Apply ``changes``; None leaves an option as it is, an empty value restores its default."""
    known = options_of(Remembered)
    changed = {n: known[n].default if v in ("", (), {}) else v for n, v in changes.items() if v is not None}
    return replace(config, **changed)


def read_config(cache: Path) -> Config:
    """Read ``pqcache.toml``; raises CacheError if it is missing, malformed or of a newer format."""
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
    """Parse a document; raises UsageError, KeyError, ValueError, TypeError or AttributeError if it is wrong."""
    _check_names(document)
    values = {name: value for name, value in document.items() if name != "format" and value != ""}
    return Config(**{"source": document["source"], **parsed_options(values, Remembered)})


def _check_names(document: Mapping[str, Any]) -> None:
    """Raise UsageError for unknown names instead of ignoring them silently."""
    known = {"format", *options_of(Remembered)}
    for name in document.keys() - known:
        from difflib import get_close_matches  # a correct file does not need it

        nearest = get_close_matches(name.lower().replace("-", "_"), known, 1, 0.5)
        meant = f"(did you mean '{nearest[0]}'?)" if nearest else f"(known: {', '.join(sorted(known))})"
        raise UsageError("", f"'{name}' is not known {meant}")


def write_config(cache: Path, config: Config) -> None:
    """Write ``pqcache.toml``, keeping the user's comments; ``config.options`` must not contain secrets."""
    import tomlkit  # slow to import, and a sync with nothing to do writes nothing

    path = cache / CONFIG
    if path.is_file():
        document = tomlkit.parse(config_text(path))
    else:
        document = tomlkit.document()
        document.add(tomlkit.comment("Written by pqcache; 'pqcache sync CACHE' repeats with what is here."))
    before = tomlkit.dumps(document)
    values: dict[str, Any] = {"format": FORMAT, "source": config.source}
    for name, known in options_of(Remembered).items():
        value = getattr(config, name)
        is_said = value != known.default or (value and name in document) or name == "keep"  # which people should see
        values[name] = known.kind.show(value) if is_said and value is not None else None
    for name, value in values.items():
        if value is None:
            document.pop(name, None)
        elif document.get(name) != value:
            document[name] = value
    after = tomlkit.dumps(document)
    if after != before or not path.is_file():
        write_durably(path, after.encode(), cache / "tmp", file_mode())


def parse_max_delete(text: str) -> tuple[float, bool]:
    """Parse ``--max-delete``: the limit, and whether it is a percentage.

    >>> parse_max_delete("50%"), parse_max_delete("1000")
    ((50.0, True), (1000.0, False))
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if match is None or (match[2] and float(match[1]) > 100):
        raise UsageError(f"--max-delete {text!r}", "write a number of files like 1000, or a share like 50%")
    return float(match[1]), bool(match[2])
