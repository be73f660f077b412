"""What a person writes into ``pqcache.toml``: what is not understood is named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import pqcache
from pqcache.errors import CacheError, UsageError
from pqcache.options import COMMANDS, REMEMBERED, options_of
from pqcache.store.config import Config, read_config, write_config
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("kep = 3", r"'kep' is not known \(did you mean 'keep'"),
        ('row-group-size = "1MB"', r"'row-group-size' is not known \(did you mean 'row_group_size'"),
        ("zzzz = 1", r"'zzzz' is not known \(known: all_files, as_files, as_of, "),
        ('checksum = "yes"', r"checksum='yes': neither true nor false"),
        ('settle = "10x"', r"settle='10x': not a duration; write it like 90s, 10m"),
        ("keep = 3.5", "keep=3.5: not a whole number"),
        ("keep = true", "keep=True: not a whole number"),
        ("keep = 0", "keep=0: has to be at least 1"),
        ("where = 3", "where=3: not a text"),
        ('columns = "id"', "columns='id': not a list of names"),
        ('partition_types = "hour=int"', "partition_types='hour=int': not a table"),
        ("shuffle = [1]", r"shuffle=\[1\]: not a whole number"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pqcache.toml").write_text(f'format = 1\nsource = "x"\n{line}\n')
    with pytest.raises(CacheError, match=rf"pqcache\.toml: {reason}.*; correct it"):
        read_config(tmp_path)


def test_all_that_is_written_is_known(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    full = Config(
        source="lake/shop", where="a > 1", columns=("a",), row_group_size=1 << 20, newest="30", keep=4,
        marker="_SUCCESS", settle=600.0, max_delete="10%", checksum=True, skip_bad=True, as_files=True, all_files=True,
        version="3", options={"endpoint": "http://127.0.0.1:1"}, compression="zstd", compat=True,
        dense={"t": "uint16[4]"}, shuffle=1, keys=("a",), time_units={"ts": "us"}, ignore_case=True,
        partition_types={"hour": "int"}, expect=("nulls.a < 1%: warn",),
    )  # fmt: skip
    write_config(tmp_path, full)
    assert read_config(tmp_path) == full
    plain = {item.name for item in fields(Config) if getattr(full, item.name) == getattr(Config(source=""), item.name)}
    assert plain == {"shard", "hdfs_driver", "as_of"}  # what excludes others, or needs another library


def test_an_empty_value_is_the_default_again(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    given = {"keep": "5", "settle": "0.001s", "max-delete": "10%", "row-group-size": "64KB", "where": "id >= 0"}
    given |= {"columns": "id,dt", "partition-types": "dt=text", "newest": "2", "hdfs-driver": "hdfs3"}
    run_pqcache("sync", shop, cache, *(f"--{name}={text}" for name, text in given.items())).check_returncode()
    assert read_config(cache).keep == 5
    known = options_of(*COMMANDS["sync"]).values()
    values = [o for o in known if o.scope == REMEMBERED and not (o.kind.is_flag or o.kind.is_list)]
    assert given.keys() < {option.flag[2:] for option in values}
    run_pqcache("sync", cache, *(f"{option.flag}=" for option in values)).check_returncode()
    assert read_config(cache) == Config(source=str(shop))
    pqcache.sync(cache, keep=5)
    pqcache.sync(cache, keep="", where="")
    assert read_config(cache) == Config(source=str(shop))
    text = (cache / "pqcache.toml").read_text()
    (cache / "pqcache.toml").write_text(text.replace("keep = 2", 'keep = ""'))
    assert read_config(cache).keep == 2
    with pytest.raises(UsageError, match="jobs=''"):
        pqcache.sync(cache, jobs="")
