"""A shop's dataset as a lake holds it: daily partitions of Parquet, some with unsuitable row groups.

Each day is a directory ``dt=YYYY-MM-DD`` of about 9 MB. The second day is one file with a single large row group, the
third is 60 small files, the others are ordinary. The same seed gives the same files, byte for byte.
"""

from __future__ import annotations

import shutil
import zlib
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIRST_DAY = date(2026, 11, 16)
ROWS = 1_800  # per day
VOCABULARY = 8_192
SIDE = 40  # pixels

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"comment": "one per offer, for ever"}),
        pa.field("title", pa.string()),
        pa.field("tokens", pa.list_(pa.int32()), metadata={"comment": "the words of the description, hashed"}),
        pa.field("category", pa.string()),
        pa.field("price", pa.float64(), metadata={"comment": "EUR"}),
        pa.field("image", pa.binary(), metadata={"comment": f"{SIDE} x {SIDE} pixels, RGB"}),
    ],
    metadata={"owner": "catalogue team", "contract": "offers-v3"},
)

CATALOGUE = {  # by category: words of its descriptions, and a usual price
    "backpack": ("backpack rucksack canvas nylon litres strap pocket hiking laptop", 75.0),
    "chair": ("chair stool armchair oak beech seat legs dining backrest", 120.0),
    "jacket": ("jacket parka blazer wool denim sleeve hood zip lining", 110.0),
    "lamp": ("lamp lantern spotlight brass linen shade watt dimmable bulb", 55.0),
    "mug": ("mug cup tumbler stoneware porcelain dishwasher coffee tea handle", 14.0),
    "watch": ("watch chronograph titanium leather strap dial quartz waterproof sapphire", 210.0),
}
CATEGORIES = tuple(CATALOGUE)
COMMON = (
    "Nordvik Halden Orima Castell Mirado slim classic light large compact everyday vintage black white sand navy olive "
    "the of with for new this very made quality design home gift set free best warranty delivery limited edition easy "
    "care detail tested durable season work travel weekend outdoor indoor family"
)


def make_shop(root: Path, days: int = 4, rows: int = ROWS, seed: int = 0) -> list[date]:
    """Write ``days`` days below ``root`` and return them."""
    made = [FIRST_DAY + timedelta(days=number) for number in range(days)]
    for day in made:
        make_day(root, day, rows, seed)
    return made


def make_day(root: Path, day: date, rows: int = ROWS, seed: int = 0, revision: int = 0) -> pa.Table:
    """Write one day anew and return its rows, in the order in which the files hold them.

    A ``revision`` above 0 is what a shop does to its past: other prices, and rows that came late.
    """
    table = make_rows(day, rows, seed, revision)
    rng = np.random.default_rng([seed, day.toordinal(), revision, 1])
    directory = root / f"dt={day.isoformat()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    job, at = rng.bytes(4).hex(), 0
    for number, groups in enumerate(_row_groups(day, table.num_rows, rng)):
        name = f"part-{number:05}-{job}-c000.snappy.parquet"
        with pq.ParquetWriter(directory / name, SCHEMA, use_dictionary=["category"]) as writer:
            for size in groups:
                writer.write_table(table.slice(at, size), row_group_size=size)
                at += size
    (directory / "_SUCCESS").touch()
    return table


def _row_groups(day: date, rows: int, rng: np.random.Generator) -> list[list[int]]:
    """The rows of each row group of each file of a day."""
    number = (day - FIRST_DAY).days
    if number == 1:  # somebody coalesced the day into one task with a large block size
        return [[rows]]
    if number == 2:  # a stream wrote a file every few minutes
        return [[len(part)] for part in np.array_split(np.arange(rows), 60)]
    files = []
    for part in np.array_split(np.arange(rows), 4):
        ends = np.minimum(np.cumsum(rng.integers(40, 560, len(part))), len(part))
        files.append(np.diff(np.unique(ends), prepend=0).tolist())
    return files


def make_rows(day: date, rows: int, seed: int = 0, revision: int = 0) -> pa.Table:
    """The offers of a day; words, price and picture predict the category, with noise."""
    table = _offers(day, rows, np.random.default_rng([seed, day.toordinal()]))
    if revision:
        rng = np.random.default_rng([seed, day.toordinal(), revision])
        table = pa.concat_tables([table, _offers(day, 1 + rows // 20, rng, first=rows)]).combine_chunks()
        prices = np.round(table["price"].to_numpy() * rng.choice([0.8, 0.9, 1.0, 1.1], len(table)), 2)
        table = table.set_column(4, SCHEMA.field("price"), pa.array(prices))
    return table


def _offers(day: date, rows: int, rng: np.random.Generator, first: int = 0) -> pa.Table:
    label = rng.integers(0, len(CATEGORIES), rows)
    words = [_description(CATEGORIES[number], rng) for number in label]
    usual = np.array([price for _, price in CATALOGUE.values()])[label]
    columns: dict[str, Any] = {
        "id": day.toordinal() * 1_000_000 + first + rng.permutation(rows),
        "title": [" ".join(text[:4]) for text in words],
        "tokens": [[token(word) for word in text] for text in words],
        "category": [CATEGORIES[number] for number in label],
        "price": np.round(usual * rng.lognormal(0.0, 0.35, rows), 2),
        "image": [_picture(number, rng) for number in label],
    }
    return pa.table(columns, schema=SCHEMA)


def _description(category: str, rng: np.random.Generator) -> list[str]:
    own, common = (words.split() for words in (CATALOGUE[category][0], COMMON))
    pools = [own if is_own else common for is_own in rng.random(int(np.clip(rng.lognormal(3.1, 0.6), 4, 160))) < 0.1]
    return [pool[rng.integers(len(pool))] for pool in pools]


@cache
def token(word: str) -> int:
    """A word's token, 1 to 8191; 0 is left for padding."""
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def _picture(label: int, rng: np.random.Generator) -> bytes:
    """Stripes before a noisy wall; their angle tells the category."""
    y, x = np.mgrid[:SIDE, :SIDE]
    angle = np.pi * label / len(CATEGORIES)
    stripes = np.sin((x * np.cos(angle) + y * np.sin(angle)) / 2 + rng.uniform(0, 2 * np.pi))
    pixels = rng.uniform(90, 160, 3) + 40 * stripes[:, :, None] + rng.normal(0, 25, (SIDE, SIDE, 3))
    return bytes(np.clip(pixels, 0, 255).astype(np.uint8))
