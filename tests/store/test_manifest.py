"""The manifest: it comes back as written, and every source file is accounted for."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import pqcache
from pqcache.errors import CacheError
from pqcache.store.layout import FILES, ROW_GROUPS
from pqcache.store.manifest import (
    assign_sources,
)
from tests.damage import flip
from tests.datasets import write_day, write_shop


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_every_row_and_every_source_is_assigned(source_rows: list[int], data: st.DataObject) -> None:
    total = sum(source_rows)
    cuts = data.draw(st.lists(st.integers(0, total), max_size=4).map(sorted))
    edges = [0, *cuts, total]
    output_rows = [b - a for a, b in pairwise(edges)]
    assigned = assign_sources(source_rows, output_rows)
    assert sorted({position for part in assigned for position in part}) == list(range(len(source_rows)))
    starts = [sum(source_rows[:i]) for i in range(len(source_rows) + 1)]
    for output, part in enumerate(assigned):
        low, high = edges[output], edges[output + 1]
        overlapping = {i for i in range(len(source_rows)) if max(low, starts[i]) < min(high, starts[i + 1])}
        assert overlapping <= set(part)
        assert part == sorted(set(part))


def test_a_manifest_of_another_format_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1), tmp_path / "cache"
    with monkeypatch.context() as before:
        for module in ("manifest", "manifest_file", "snapshot"):
            before.setattr(f"pqcache.store.{module}.FORMAT", 1)
        pqcache.sync(shop, cache)
    published = (cache / "current").resolve()
    for day in (None, "2026-12-01"):  # also where nothing has changed at the source
        if day:
            write_day(shop, day, files=1, rows=5, first=10_000)
        for call in (pqcache.sync, partial(pqcache.repartition, row_group_size="1MB")):
            with pytest.raises(CacheError, match=r"files\.arrow: written in format 1, .* sync into a new directory"):
                call(cache)
    assert (cache / "current").resolve() == published


def test_checksums_are_those_of_the_bytes_and_are_kept(tmp_path: Path) -> None:
    """Copied, subset and rewritten files have theirs; a file that is kept, or linked, has what was recorded."""
    shop, cache = write_shop(tmp_path / "shop", days=2), tmp_path / "cache"

    def checksums() -> dict[str, str]:
        snapshot = pqcache.Cache(cache).snapshot()
        snapshot.check(FILES)
        snapshot.check(ROW_GROUPS)
        return {entry.path: entry.checksum for entry in snapshot.manifest().files}

    pqcache.sync(str(shop), cache)
    first = checksums()
    assert len(first) == 6
    for path, checksum in first.items():
        assert checksum == "xxh3:" + xxhash.xxh3_64_hexdigest((shop / path).read_bytes())
    rotten = next(iter(first))
    flip(cache / "current" / rotten, 100)  # what was recorded of the good bytes must not be recorded anew
    write_day(shop, "2026-11-09")
    pqcache.sync(cache)
    assert {**checksums(), **first} == checksums()
    flip(cache / "current" / rotten, 100)
    pqcache.repartition(cache, row_group_size=64 << 20)
    current = cache / "current"
    rewritten = checksums()
    for path, checksum in rewritten.items():
        assert checksum == "xxh3:" + xxhash.xxh3_64_hexdigest((current / path).read_bytes())
    pqcache.repartition(cache, row_group_size=65 << 20)  # fits: linked
    assert checksums() == rewritten
    pqcache.sync(cache, columns=["id"])
    for path, checksum in checksums().items():
        assert checksum == "xxh3:" + xxhash.xxh3_64_hexdigest((current / path).read_bytes())
