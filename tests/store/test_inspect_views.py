"""Inspect's verdict, its closer looks, its HTML page, and what it says of a training run."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import cli
from pqcache.benchmark import forecast
from pqcache.console.inspect_text import remedy, verdict
from pqcache.reader.epoch_options import WINDOW
from pqcache.torch import ParquetDataset
from pqcache.units import format_size
from tests.datasets import files_of, write_day, write_shop


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", rows=100)


def lines(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run ``inspect`` and return the lines of its output."""
    assert cli.run(["inspect", *words]) == 0
    return capfd.readouterr().out.splitlines()


def test_row_groups_and_files_are_those_of_the_footers(shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = files_of(shop)
    footers = {path: pq.read_metadata(shop / path) for path in paths}
    groups = [json.loads(line) for line in lines(capfd, str(shop), "--row-groups", "--json")]
    assert [(g["path"], g["row_group"]) for g in groups] == [
        (path, i) for path in paths for i in range(footers[path].num_row_groups)
    ]
    for group in groups:
        footer = footers[group["path"]].row_group(group["row_group"])
        assert (group["rows"], group["uncompressed"]) == (footer.num_rows, footer.total_byte_size)
        chunks = [footer.column(c) for c in range(footer.num_columns)]
        assert group["bytes"] == sum(chunk.total_compressed_size for chunk in chunks)
    files = [json.loads(line) for line in lines(capfd, str(shop), "--files", "--json")]
    assert [file["path"] for file in files] == paths
    for file in files:
        here = [group["bytes"] for group in groups if group["path"] == file["path"]]
        assert (file["largest"], file["row_groups"]) == (max(here), len(here))
        assert file["bytes"] == (shop / file["path"]).stat().st_size
    shown = lines(capfd, str(shop), "--row-groups", "--block-size", str(groups[0]["bytes"] - 1))
    assert len(shown) == len(groups) + 1
    assert "!" in shown[1]
    assert "!" not in lines(capfd, str(shop), "--row-groups")[1]


def test_schema_and_sample(shop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fields = [json.loads(line) for line in lines(capfd, str(shop), "--schema", "--json")]
    assert [field["name"] for field in fields] == ["id", "title", "tokens", "price", "note", "image", "dt"]
    assert [field["partition"] for field in fields] == [False] * 6 + [True]
    pqcache.sync(str(shop), tmp_path / "cache")
    for target in (shop, tmp_path / "cache"):
        rows = [json.loads(line) for line in lines(capfd, str(target), "--sample", "130", "--json")]
        assert [row["id"] for row in rows] == list(range(130)), "over the end of a file"
        assert rows[0]["dt"] == "2026-11-01"
        assert rows[0]["image"].startswith("<binary, ")
    shown = "\n".join(lines(capfd, str(shop), "--sample", "1"))
    assert "item 0 of 0" in shown
    pq.write_table(pa.table({"long": [list(range(12))]}), tmp_path / "long.parquet")
    assert "  long  [0, 1, 2, 3, 4, 5, 6, 7, … 4 more]" in lines(capfd, str(tmp_path / "long.parquet"), "--sample", "1")
    assert "<binary, " in shown
    beyond = pa.array([1 << 60], pa.int64()).cast(pa.timestamp("us"))
    no_utf8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\x80a")])
    odd = {
        "time": beyond,
        "text": no_utf8,
        "struct": pa.StructArray.from_arrays([no_utf8], ["x"]),
        "list": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), beyond),
        "map": pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["k"]), no_utf8),
    }
    pq.write_table(pa.table(odd), tmp_path / "odd.parquet")
    (row,) = lines(capfd, str(tmp_path / "odd.parquet"), "--sample", "1", "--json")
    time, text = str(1 << 60), "\ufffda"
    expected = {"time": time, "text": text, "struct": {"x": text}, "list": [time], "map": [["k", text]]}
    assert json.loads(row) == expected, "what Python cannot hold"


def test_what_differs_between_snapshots(shop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    old = pqcache.sync(str(shop), cache).snapshot
    write_day(shop, "2026-11-09", files=1, rows=10)
    write_day(shop, "2026-11-02", files=1, rows=50, seed=5)
    (shop / "dt=2026-11-03" / "part-00002.parquet").unlink()
    new = pqcache.sync(cache).snapshot
    assert old is not None
    assert new is not None
    (line,) = lines(capfd, str(cache), "--diff", old, new, "--json")
    found = json.loads(line)
    assert (found["added"], found["changed"], found["removed"]) == (
        ["dt=2026-11-09/part-00000.parquet"],
        ["dt=2026-11-02/part-00000.parquet"],
        ["dt=2026-11-03/part-00002.parquet"],
    )
    assert found["unchanged"] == 7
    assert found["partitions"] == {"dt=2026-11-02": [50, 100], "dt=2026-11-03": [0, 100], "dt=2026-11-09": [10, 0]}
    assert found["rows"] == [900, 760]
    assert (found["old"], found["new"]) == (old, new)
    pqcache.pin(cache, old, name="before")
    for names in ((old, new), ("1", "2"), ("before", "2")):
        shown = lines(capfd, str(cache), "--diff", *names)
        assert shown[0] == f"{old} -> {new}: 1 added, 1 removed, 1 changed, 7 unchanged files"
    back = json.loads(*lines(capfd, str(cache), "--diff", new, old, "--json"))
    assert (back["old"], back["new"], back["added"]) == (new, old, found["removed"])
    assert "  + dt=2026-11-09/part-00000.parquet" in shown
    assert [line.split() for line in shown if line.startswith("  dt=2026-11-02")] == [["dt=2026-11-02", "+50", "-100"]]
    pqcache.repartition(cache, row_group_size="1MB")
    write_day(shop, "2026-11-10", files=1, rows=10)
    write_day(shop, "2026-11-10", files=2, rows=10)
    pqcache.sync(cache)
    last = json.loads(*lines(capfd, str(cache), "--diff", "3", "4", "--json"))["partitions"]
    assert last == {"dt=2026-11-10": [20, 0]}
    write_day(shop, "2026-11-10", files=3, rows=10)
    (shop / "dt=2026-11-02" / "part-00002.parquet").unlink()
    pqcache.sync(cache)
    last = json.loads(*lines(capfd, str(cache), "--diff", "4", "5", "--json"))["partitions"]
    assert last["dt=2026-11-02"] == [0, 100], "the rows of the other files were only written again"
    assert cli.run(["inspect", str(cache), "--diff", old, "nosuch"]) == 1
    assert "there is no snapshot nosuch" in capfd.readouterr().err


def test_the_verdict_and_its_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Row groups of known sizes against a limit between them."""
    rng = np.random.default_rng(0)
    data, source = pa.table({"x": [rng.bytes(1000) for _ in range(400)]}), tmp_path / "in"
    source.mkdir()
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(source / "a.parquet", data.schema, **plain) as writer:
        for rows in (100, 300, 20, 20):
            writer.write_table(data.slice(0, rows), row_group_size=rows)
    found = pqcache.inspect(source, block_size=200_000)
    assert (found.over_block, found.under_quarter) == (1, 2)
    assert verdict(found) == "1 of 4 row groups exceed 195 KB; 2 are under 48.8 KB"
    command = remedy(found)
    assert command == f"pqcache repartition {source} DEST --row-group-size 200000"
    words = command.replace("DEST", str(tmp_path / "out")).split()
    assert cli.run(words[1:]) == 0, "the command works as it is shown"
    mended = pqcache.inspect(tmp_path / "out", block_size=200_000)
    assert mended.over_block == 0
    assert remedy(mended) is None
    fine = pqcache.inspect(source, block_size=310_000)
    assert verdict(fine) == "2 of 4 row groups are under 75.7 KB"
    shown = "\n".join(lines(capfd, str(source), "--block-size", "200000"))
    assert verdict(found) in shown
    assert "<- limit" in shown
    assert command in shown


def test_the_forecast_is_what_a_dataset_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({"x": rng.random(400_000), "y": [b"y" * 40] * 400_000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000, use_dictionary=False)
    for memory in (1 << 30, 24 << 20, 16 << 20):
        found = forecast(tmp_path, memory, lanes=2)
        assert found is not None
        dataset = ParquetDataset(tmp_path, batch_size=256, lanes=2, memory=memory)
        assert found.window == dataset.state_dict()["window"]
        assert (found.row_group_size is None) == (found.window >= WINDOW)
    assert found.window < WINDOW
    assert found.row_group_size == 1 << 20
    assert forecast("hdfs://127.0.0.1:1/nowhere") is None


def test_the_forecast_of_row_groups_that_take_more_than_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are read one at a time, as their files have no page index; training warns of it."""
    texts = [f"{number}".zfill(500) for number in range(100)]
    for number in range(2):
        rows = pa.table({"x": pa.DictionaryArray.from_arrays(np.arange(1_000_000, dtype=np.int32) % 100, texts)})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=1_000_000)
    found = forecast(tmp_path)
    assert found is not None
    assert (found.window, found.pieces, found.memory) == (1, 1, 2 << 30)
    assert found.needed is not None
    assert found.needed > found.memory
    with pytest.warns(UserWarning, match="one is read at a time in each lane, which may take more"):
        assert ParquetDataset(tmp_path, batch_size=256, lanes=2).state_dict()["window"] == 1
    shown = lines(capfd, str(tmp_path))
    assert f"  over memory: one at a time may take {format_size(found.needed)}" in shown
    assert any(line.endswith("decoded; one is read at a time") for line in shown)
    assert cli.run(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["training"]["needed"] == found.needed
    less = forecast(tmp_path, 4 * found.needed)
    assert less is not None
    assert less.needed is None


def test_blocks_and_training_are_kept_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After a plain sync nothing asks for row groups of 128 MB, and what is proposed is proposed once."""
    shop = write_shop(tmp_path / "shop", rows=100)
    pqcache.sync(str(shop), tmp_path / "cache")
    for target in (shop, tmp_path / "cache"):
        shown = lines(capfd, str(target))
        blocks, training = (
            shown.index("blocks, as HDFS and Spark read them"),
            shown.index("training, memory=2GB, num_workers=2"),
        )
        assert "row groups are under 32 MB" in shown[blocks + 1]
        assert shown[training + 1] == "  window=16: each worker mixes all row groups that it reads"
        assert not [line for line in shown if "command:" in line]
    few = tmp_path / "few"
    few.mkdir()
    pq.write_table(
        pa.table({"x": np.random.default_rng(0).random(4_000_000)}), few / "a.parquet", row_group_size=1 << 22
    )
    (command,) = [line for line in lines(capfd, str(few)) if "command:" in line]
    assert command == f"  command: pqcache repartition {few} DEST --row-group-size 256KB"
    assert cli.run(command.replace("DEST", str(tmp_path / "out")).split()[2:]) == 0, "the command works as it is shown"
    found = forecast(tmp_path / "out")
    assert found is not None
    assert found.row_group_size is None
    assert found.mixed > 0.5, "32 of its row groups, where it was one"


class Page(HTMLParser):
    """Gathers a page's tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shop = write_shop(tmp_path / "<shop>&co", rows=100)
    file = tmp_path / "shop.html"
    assert lines(capfd, str(shop), "--html", str(file)) == [f"wrote {file}"]
    text = file.read_text()
    page = Page(text)
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "onload", "onclick", "action"}
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "shop"}
    assert "@import" not in text
    assert "url(" not in text
    bars = [attributes for tag, attributes in page.tags if attributes.get("class") == "bar"]
    found = pqcache.inspect(shop)
    assert len(bars) == len(found.histogram) + len([c for c in found.columns if c.bytes]) + len(found.partitions)
    assert str(shop) in page.text
    assert "under 32 MB" in page.text
    assert cli.run(["inspect", str(shop), "--html", str(tmp_path / "no" / "where.html")]) == 2
    assert "where.html: No such file or directory" in capfd.readouterr().err
    assert cli.run(["inspect", str(shop), "--html", "/dev/full"]) == 1
    assert "/dev/full: No space left on device" in capfd.readouterr().err


def test_many_partitions_are_collapsed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for day in range(30):
        (tmp_path / f"d={day:02d}").mkdir()
        if day:
            shutil.copy(tmp_path / "d=00" / "a.parquet", tmp_path / f"d={day:02d}")
        else:
            pq.write_table(pa.table({f"c{i:02d}": [day] for i in range(40)}), tmp_path / "d=00" / "a.parquet")
    shown = "\n".join(lines(capfd, str(tmp_path)))
    assert "10 more; --partitions shows all" in shown
    assert "d=09" in shown
    assert "d=15" not in shown
    assert "11 smaller columns; --columns shows all" in shown  # with d: 41
    assert "d=15" in "\n".join(lines(capfd, str(tmp_path), "--partitions"))
    columns = lines(capfd, str(tmp_path), "--columns")
    assert len([line for line in columns if line.startswith("  c")]) == 41  # and the heading
    document = json.loads(lines(capfd, str(tmp_path), "--json")[0])
    assert len(document["partitions"]) == 30
    assert document["columns"][0]["codec"] == "SNAPPY"
    assert document["columns"][0]["encodings"] == ["DICTIONARY"]
    assert document["training"]["window"] == 16


def test_plain_terminals_get_plain_text(
    shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "█" in "\n".join(lines(capfd, str(shop)))
    monkeypatch.setenv("LC_ALL", "C")
    for words in ([], ["--files"], ["--row-groups"], ["--schema"], ["--sample", "1"], ["--columns"]):
        text = "\n".join(lines(capfd, str(shop), *words))
        assert text.isascii()
        assert "\x1b" not in text


def test_one_view_at_a_time(shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(shop), "--files", "--schema"]) == 2
    assert "--schema and --files: exclude each other" in capfd.readouterr().err
    assert cli.run(["inspect", str(shop.parent / "nowhere"), "--files"]) == 1
