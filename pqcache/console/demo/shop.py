"""A shop's dataset as a lake holds it: daily partitions of Parquet, some with unsuitable row groups.

    python -m pqcache.console.demo.shop DIR --days 4

Each day is a directory ``dt=YYYY-MM-DD`` of about 9 MB. The second day is one file with a single large row group, the
third is 60 small files, the others are ordinary. The same seed gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import re
import shutil
import zlib
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.console.demo import pictures

FIRST_DAY = date(2026, 11, 16)
ROWS = 1_800  # per day
VOCABULARY = 8_192
PICTURES = 80  # distinct ones per category

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"comment": "one per offer, for ever"}),
        pa.field("title", pa.string()),
        pa.field("tokens", pa.list_(pa.int32()), metadata={"comment": "title and description, hashed"}),
        pa.field("category", pa.string()),
        pa.field("price", pa.float64(), metadata={"comment": "EUR"}),
        pa.field("image", pa.binary(), metadata={"comment": "PNG"}),
    ],
    metadata={"owner": "catalogue team", "contract": "offers-v3"},
)

# Per category: what it is called, what it is made of, words of its descriptions, and a usual price.
CATALOGUE: dict[str, tuple[list[str], list[str], list[str], float]] = {
    "backpack": (
        ["backpack", "rucksack", "daypack"],
        ["canvas", "nylon", "leather"],
        ["litres", "strap", "pocket", "hiking", "laptop"],
        75.0,
    ),
    "chair": (
        ["chair", "stool", "armchair"],
        ["oak", "beech", "steel"],
        ["seat", "legs", "dining", "stackable", "backrest"],
        120.0,
    ),
    "jacket": (
        ["jacket", "parka", "blazer"],
        ["wool", "nylon", "denim"],
        ["sleeve", "hood", "zip", "lining", "pocket"],
        110.0,
    ),
    "lamp": (
        ["lamp", "lantern", "spotlight"],
        ["brass", "steel", "linen"],
        ["shade", "watt", "dimmable", "bulb", "desk"],
        55.0,
    ),
    "mug": (
        ["mug", "cup", "tumbler"],
        ["stoneware", "steel", "porcelain"],
        ["dishwasher", "coffee", "tea", "handle", "millilitres"],
        14.0,
    ),
    "watch": (
        ["watch", "chronograph", "timepiece"],
        ["steel", "leather", "titanium"],
        ["strap", "dial", "quartz", "waterproof", "sapphire"],
        210.0,
    ),
}
CATEGORIES = tuple(CATALOGUE)
BRANDS = ["Nordvik", "Halden", "Orima", "Castell", "Mirado", "Fjell & Co", "Tamsin", "Brava", "Kestrel"]
STYLES = ["slim", "classic", "light", "large", "compact", "everyday", "vintage", "premium", "soft", "folding"]
COLOURS = ["black", "white", "sand", "navy", "olive", "rust", "grey", "teal"]
COMMON = re.findall(
    r"\w+",
    "the a and of with for in our new this very made to your it is from design quality home gift set "
    "free best colour size year days warranty delivery available limited edition natural simple easy care "
    "clean every detail finish well tested durable season work travel weekend outdoor indoor family",
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
    for number, groups in enumerate(cut(day, table.num_rows, rng)):
        name = f"part-{number:05}-{job}-c000.snappy.parquet"
        with pq.ParquetWriter(directory / name, SCHEMA, use_dictionary=["category"]) as writer:
            for size in groups:
                writer.write_table(table.slice(at, size), row_group_size=size)
                at += size
    (directory / "_SUCCESS").touch()
    return table


def cut(day: date, rows: int, rng: np.random.Generator) -> list[list[int]]:
    """Return the rows of each row group of each file of a day."""
    number = (day - FIRST_DAY).days
    if number == 1:  # somebody coalesced the day into one task with a large block size
        return [[rows]]
    if number == 2:  # a stream wrote a file every few minutes
        return [[len(part)] for part in np.array_split(np.arange(rows), min(60, rows))]
    return [_mixed(len(part), rng) for part in np.array_split(np.arange(rows), min(4, rows))]


def _mixed(rows: int, rng: np.random.Generator) -> list[int]:
    sizes: list[int] = []
    while rows:
        sizes.append(min(rows, int(rng.integers(40, 560))))
        rows -= sizes[-1]
    return sizes


def make_rows(day: date, rows: int, seed: int = 0, revision: int = 0) -> pa.Table:
    """Return the offers of a day; words, price and picture predict the category, with noise."""
    rng = np.random.default_rng([seed, day.toordinal()])
    columns = _columns(day, rows, rng)
    if revision:
        again = np.random.default_rng([seed, day.toordinal(), revision])
        late = _columns(day, 1 + rows // 20, again, first=rows)
        columns = {name: [*values, *late[name]] for name, values in columns.items()}
        factors = again.choice([0.8, 0.9, 1.0, 1.1], len(columns["price"]))
        columns["price"] = [round(p * f, 2) for p, f in zip(columns["price"], factors, strict=True)]
    return pa.table(columns, schema=SCHEMA)


def _columns(day: date, rows: int, rng: np.random.Generator, first: int = 0) -> dict[str, list[Any]]:
    label = rng.integers(0, len(CATEGORIES), rows)
    category = [CATEGORIES[number] for number in label]
    ids = (day.toordinal() * 1_000_000 + first + rng.permutation(rows)).tolist()
    titles = [_title(name, rng) for name in category]
    usual = np.array([CATALOGUE[name][3] for name in CATEGORIES])[label]
    price = np.round(usual * rng.lognormal(0.0, 0.35, rows), 2)
    return {
        "id": ids,
        "title": titles,
        "tokens": _tokens(titles, category, rng),
        "category": category,
        "price": price.tolist(),
        "image": _images(label, ids, rng),
    }


def _title(category: str, rng: np.random.Generator) -> str:
    nouns, materials, _, _ = CATALOGUE[category]
    brand, style, colour, material = (_one(words, rng) for words in (BRANDS, STYLES, COLOURS, materials))
    model = rng.integers(100, 1000)
    kind = rng.random()
    if kind < 0.3:  # the kind of title that says nothing: only words and picture help
        return f"{brand} {style.capitalize()} {model}, {colour}"
    if kind < 0.65:
        return f"{brand} {model} {material} {_one(nouns, rng)}, {colour}"
    return f"{style.capitalize()} {colour} {_one(nouns, rng)} by {brand}, {material}"


def _one(words: list[str], rng: np.random.Generator) -> str:
    return words[rng.integers(len(words))]


def _tokens(titles: list[str], category: list[str], rng: np.random.Generator) -> list[list[int]]:
    lengths = np.clip(rng.lognormal(3.1, 0.6, len(titles)), 4, 160).astype(int)
    common = np.array([token(word) for word in COMMON])
    typical = {name: np.array([token(word) for word in CATALOGUE[name][2]]) for name in CATEGORIES}
    tokens = []
    for title, name, length in zip(titles, category, lengths, strict=True):
        body = common[rng.integers(0, len(common), length)]
        own = rng.random(length) < 0.1
        body[own] = typical[name][rng.integers(0, len(typical[name]), int(own.sum()))]
        tokens.append([token(word.strip(",")) for word in title.lower().split()] + body.tolist())
    return tokens


@cache
def token(word: str) -> int:
    """Return a word's token id, 1 to 8191; 0 is left for padding."""
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def _images(label: npt.NDArray[np.int64], ids: list[int], rng: np.random.Generator) -> list[bytes]:
    """Return a PNG per row; one in eight may show another category than its own."""
    bank = picture_bank()
    shown = np.where(rng.random(len(ids)) < 0.125, rng.integers(0, len(CATEGORIES), len(ids)), label)
    which = rng.integers(0, PICTURES, len(ids))
    return [pictures.stamp(bank[s][w], f"offer {i}") for s, w, i in zip(shown, which, ids, strict=True)]


@cache
def picture_bank() -> list[list[bytes]]:
    """Return the distinct pictures of each category; they do not depend on the seed."""
    return [
        [pictures.draw(name, np.random.default_rng([number, item])) for item in range(PICTURES)]
        for number, name in enumerate(CATEGORIES)
    ]


def main() -> None:
    """Read the command line and make the shop."""
    parser = argparse.ArgumentParser(description="Make a shop's dataset: daily partitions of Parquet files.")
    parser.add_argument("directory", type=Path, help="where to write it; days that are there are made anew")
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a day (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    days = make_shop(options.directory, options.days, options.rows, options.seed)
    files = list(options.directory.rglob("*.parquet"))
    size = sum(file.stat().st_size for file in files) / (1 << 20)
    print(f"{len(days)} days, {len(files)} files, {len(days) * options.rows:,} rows, {size:.0f} MB")


if __name__ == "__main__":
    main()
