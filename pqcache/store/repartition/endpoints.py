"""The source and the target of a repartition, and the store options of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pqcache.errors import UsageError
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import installed
from pqcache.store.tables.base import OpenOptions, VersionRule, store_options
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import check_url, local_path, redact, url_scheme

_KINDS = {"gcs": "gs", "abfs": "az", "abfss": "az"}  # by scheme
_COMMON_OPTIONS = {"endpoint", "token", "anon"}  # that other stores have as well


@dataclass(frozen=True, kw_only=True, repr=False)
class Endpoints:
    """A source and a target by URL or absolute path, with the store options of each, which may hold secrets.

    On HDFS the target's files get blocks of ``block_size`` bytes, None for the cluster's own. ``rules`` say which files
    of the source are taken, ``rule`` which version of a table.
    """

    source: str
    source_options: Mapping[str, str]
    target: str
    target_options: Mapping[str, str]
    block_size: int | None
    rules: FileRules = field(default_factory=FileRules)
    rule: VersionRule = field(default_factory=VersionRule)

    def open_source(self) -> Source:
        options = OpenOptions(store=self.source_options, as_files=self.rules.as_files, rule=self.rule)
        return open_table(self.source, options)


def make_endpoints(source: str, target: str, options: Mapping[str, str], block_size: int | None) -> Endpoints:
    """Divide ``options`` among source and target; UsageError if these cannot go together."""
    check_url(source)
    check_url(target)
    if url_scheme(target) not in ("", "file") and target.partition("://")[2].strip("/") == "":
        raise UsageError(target, "names no directory", f"write {url_scheme(target)}://HOST/PATH")
    check_apart(source, target)
    source_options = _options_for(source, target, options)
    target_options = _options_for(target, source, options)
    if options and not source_options and not target_options:
        source_options = options  # a local source refuses them by name
    return Endpoints(
        source=_absolute(source),
        source_options=source_options,
        target=_absolute(target),
        target_options=target_options,
        block_size=block_size,
    )


def check_apart(source: str, target: str) -> None:
    """Raise UsageError if one of two URLs is, or lies below, the other."""
    one, other = _place(source), _place(target)
    if one[0] == "az" and len({_account(url) for url in (source, target)} - {""}) > 1:
        return
    if one == other:
        raise UsageError(redact(target), "is the source itself", "name another directory to write to")
    if other[: len(one)] == one:
        raise UsageError(redact(target), f"lies inside the source {redact(source)}", "name a directory apart from it")
    if one[: len(other)] == other:
        raise UsageError(
            redact(target), f"holds the source {redact(source)}", "name a new or empty directory apart from it"
        )


def _options_for(url: str, other: str, options: Mapping[str, str]) -> Mapping[str, str]:
    """Options for the store of ``url``, if another store is used as well.

    Between HDFS and another store, names with a dot are Hadoop's. Those that only one cloud's store has are that one's.
    """
    one, two = url_scheme(url), url_scheme(other)
    if one == "hive":  # it has those of the stores of its files too
        return options
    if two == "hive":
        return store_options(options, one)
    if one in ("", "file"):
        return {}
    one, two = _KINDS.get(one, one), _KINDS.get(two, two)
    if one == two or two in ("", "file"):
        return options
    if "hdfs" in (one, two):
        options = {name: value for name, value in options.items() if ("." in name) == (one == "hdfs")}
    ours, others = _cloud_options(url, one), _cloud_options(other, two)
    if ours:  # what is unknown to both is refused by the other one, or by this if it is that one's too
        return {name: value for name, value in options.items() if name in ours}
    return {name: value for name, value in options.items() if name not in others or name in _COMMON_OPTIONS}


def _cloud_options(url: str, kind: str) -> Mapping[str, str]:
    if kind not in ("gs", "az"):
        return {}
    with installed(url, "obstore", "gcs" if kind == "gs" else "azure"):
        from pqcache.store.drivers.object_store import AZURE_OPTIONS, GCS_OPTIONS
    return GCS_OPTIONS if kind == "gs" else AZURE_OPTIONS


def _absolute(url: str) -> str:
    """Make local paths absolute, as workers may run elsewhere."""
    if url_scheme(url) not in ("", "file"):
        return url
    return os.path.abspath(os.path.expanduser(local_path(url)))


def _place(url: str) -> tuple[str, ...]:
    """Parts of a URL or path; what lies below another begins with its parts."""
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        return ("file", *Path(local_path(url)).expanduser().resolve().parts)
    host, _, path = url.partition("://")[2].partition("/")
    kind = _KINDS.get(scheme, scheme)
    host = host.partition("@")[0] if kind == "az" else host.rpartition("@")[2]  # of a container, without the account
    return (kind, host.lower(), *(segment for segment in path.split("/") if segment))


def _account(url: str) -> str:
    """Empty if the options name the account instead."""
    return url.partition("://")[2].partition("/")[0].partition("@")[2].partition(".")[0].lower()
