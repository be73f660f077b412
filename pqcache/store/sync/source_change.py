"""Refuses to replace the files of a cache by those of another source, unless that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pqcache.errors import UsageError
from pqcache.store.arriving.arriving_snapshot import find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.history import copied_source
from pqcache.store.layout import CONFIG
from pqcache.store.same_source import is_same_source
from pqcache.store.snapshot import Snapshot
from pqcache.store.urls import check_url, is_secret, redact, remembered_url

OPTION = "--new-source"


def changed_source(
    cache: CacheDirectory, current: Snapshot | None, remembered: Config | None, config: Config, is_allowed: bool
) -> str | None:
    """Return the source that ``cache`` is a copy of, where ``config`` has another one; None where it is the same.

    ``remembered`` is what ``pqcache.toml`` has, which a person may have edited. A change that is not allowed raises
    UsageError. A cache without files is bound to no source.
    """
    if remembered is None or (current is None and find_arriving(cache) is None):
        return None
    held = copied_source(cache, current) or redact(remembered.source)
    before = remembered.options if is_same_source(held, remembered.source, {}, {}) else {}
    if is_same_source(held, config.source, before, config.options):
        return None
    if not is_allowed:
        raise _refusal(cache.path, held, remembered, config)
    return held


def _refusal(cache: Path, held: str, remembered: Config, config: Config) -> UsageError:
    wanted = redact(config.source)
    if is_same_source(held, wanted, {}, {}):
        held = f"{held} at {remembered.options.get('endpoint')}"
        wanted = f"{wanted} at {config.options.get('endpoint')}"
    reason = f"is a copy of {held}, and {wanted} is another source"
    if not is_same_source(held, remembered.source, {}, {}) and remembered.source == config.source:
        return UsageError(
            cache / CONFIG,
            f"names the source {wanted}, and the cache is a copy of {held}",
            f"correct it, or say {OPTION} if the cache is to be a copy of {wanted} from now on",
        )
    advice = f"name another directory, or say {OPTION} if the cache is to be a copy of {wanted} from now on"
    return UsageError(cache, reason, advice)


def merged_config(remembered: Config | None, source: str | None, options: Mapping[str, str] | None) -> Config:
    """Return the configuration with the source and its options, as it is remembered from now on, without secrets."""
    known = {k: v for k, v in (options or {}).items() if not is_secret(k)}
    if source is None:
        assert remembered is not None
        return replace(remembered, options={**remembered.options, **known})
    check_url(source)
    shown = remembered_url(source)
    if remembered is not None and is_same_source(remembered.source, shown, remembered.options, known):
        known = {**remembered.options, **known}
    return replace(remembered or Config(source=shown), source=shown, options=known)
