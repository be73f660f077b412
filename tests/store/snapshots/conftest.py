"""A lake of days, and a cache of three nights of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import pqcache
from tests.datasets import write_day


def add_day(lake: Path, day: int) -> None:
    write_day(lake, f"2026-11-0{day}", files=1, rows=20, first=day * 1000)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    add_day(tmp_path / "lake", 1)
    return tmp_path / "lake"


@pytest.fixture
def cache(lake: Path, tmp_path: Path) -> Path:
    """A cache of three nights: its snapshots hold one, two and three days."""
    place = tmp_path / "cache"
    pqcache.sync(lake, place, keep=3)
    for day in (2, 3):
        add_day(lake, day)
        pqcache.sync(place)
    return place
