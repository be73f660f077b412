"""The table of options: what the shell and Python say becomes a value, or an error that names the option."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import pqcache
from pqcache.errors import UsageError
from pqcache.options import (
    COMMANDS,
    PYTHON,
    REMEMBERED,
    RUN,
    SIZE,
    BenchArguments,
    GcArguments,
    IndexArguments,
    InspectArguments,
    Remembered,
    RepartitionArguments,
    ServeArguments,
    SyncArguments,
    SyncRun,
    SyncRunArguments,
    VerifyArguments,
    options_of,
)
from pqcache.reader.epoch_options import BatchArguments, BatchOptions, RowArguments, RowOptions
from pqcache.torch import Mix, ParquetDataset
from pqcache.torch.dataset_options import DatasetArguments, DatasetOptions, IterationArguments, IterationOptions
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


@pytest.mark.parametrize(
    ("command", "name", "words", "value"),
    [
        ("sync", "where", "a > 1", "a > 1"),
        ("sync", "columns", " a, b,,c ", ["a", "b", "c"]),
        ("sync", "columns", "", ""),
        ("sync", "keep", "", ""),
        ("sync", "jobs", "3", 3),
        ("sync", "wait", "10m", 600.0),
        ("sync", "row_group_size", "8k", 8192),
        ("sync", "options", ["endpoint=http://h:1/?a=b", "x=y"], {"endpoint": "http://h:1/?a=b", "x": "y"}),
        ("sync", "partition_types", "hour = int,dt=date", {"hour": "int", "dt": "date"}),
        ("sync", "checksum", False, False),
        ("bench", "workers", "0, 2", [0, 2]),
        ("inspect", "diff", ("1", "2"), ("1", "2")),
        ("inspect", "html", "page", Path("page")),
        ("rows", "sample_share", "0.5", 0.5),
    ],
)
def test_words_of_the_shell_become_what_python_takes(command: str, name: str, words: Any, value: Any) -> None:
    found = options_of(*COMMANDS[command])[name].from_shell(words)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "c", "--workers", "0,x"], "--workers 0,x: 'x' is not a number; write numbers, like 0,2,4"),
        (["inspect", "c", "--block-size", "0"], "--block-size 0: has to be at least 1"),
        (["inspect", "c", "--files", "--diff", "1", "2"], "--files and --diff: exclude each other"),
        (["repartition", "c", "--dense", "tokens", "--dense", "none"], "--dense none: excludes other columns"),
        (["repartition", "c", "d", "--align", "page"], "--align page: choose block"),
        (["sync", "s", "c", "-o", "endpoint"], "-o endpoint: not a key with a value; write it as KEY=VALUE"),
        (["sync", "s", "c", "--partition-types", "hour"], "--partition-types hour: not NAME=VALUE"),
        (["sync", "s", "c", "--compare", "bytes"], "--compare bytes: choose identity or content"),
        (["sync", "s", "c", "--jobs", "two"], "--jobs two: not a whole number; write it like 8"),
        (["sync", "s", "c", "--keep", "0"], "--keep 0: has to be at least 1"),
        (["sync", "s", "c", "--wait", "10x"], "--wait 10x: not a duration; write it like 90s, 10m, 48h or 2d"),
        (["sync", "s", "c", "--timeout", "0"], "--timeout 0: has to be at least 0.1"),
        (["rows", "c", "--batch", "1"], "rows: no state is given; give --state, or --prove"),
        (["sync"], "Missing argument 'SOURCE'"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    result = run_pqcache(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep": 0}, "keep=0: has to be at least 1"),
        ({"jobs": 1.5}, "jobs=1.5: not a whole number"),
        ({"skip_bad": "yes"}, "skip_bad='yes': neither true nor false"),
        ({"columns": "id"}, "columns='id': not a list of names"),
        ({"time_units": "ts=us"}, "time_units='ts=us': not a table of names and values"),
        ({"settle": "soon"}, "settle='soon': not a duration"),
        ({"hdfs_driver": "hdfs9"}, "hdfs_driver='hdfs9': choose hdfs-native or hdfs3"),
    ],
)
def test_values_that_make_no_sense_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        pqcache.sync(tmp_path / "lake", tmp_path / "cache", **given)  # type: ignore[arg-type]
    assert said in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wherre'; did you mean 'where'"):
        pqcache.sync(tmp_path / "lake", tmp_path / "cache", wherre="id > 1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'job'; did you mean 'jobs'"):
        pqcache.sync_all(tmp_path, job=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("function", "arguments", "tables"),
    [
        (pqcache.sync, SyncArguments, COMMANDS["sync"]),
        (pqcache.sync_all, SyncRunArguments, [SyncRun]),
        (pqcache.verify, VerifyArguments, COMMANDS["verify"]),
        (pqcache.index, IndexArguments, COMMANDS["index"]),
        (pqcache.inspect, InspectArguments, COMMANDS["inspect"]),
        (pqcache.bench, BenchArguments, COMMANDS["bench"]),
        (pqcache.gc, GcArguments, COMMANDS["gc"]),
        (pqcache.serve, ServeArguments, COMMANDS["serve"]),
        (pqcache.repartition, RepartitionArguments, COMMANDS["repartition"]),
        (pqcache.Cache.batches, BatchArguments, [BatchOptions]),
        (pqcache.rows, RowArguments, [RowOptions]),
        (ParquetDataset, DatasetArguments, [DatasetOptions]),
        (Mix, IterationArguments, [IterationOptions]),
    ],
)
def test_python_has_the_options_of_the_tables(function: Any, arguments: Any, tables: Any) -> None:
    parameters = inspect.signature(function).parameters
    known = {n: option for n, option in options_of(*tables).items() if option.scope in (RUN, REMEMBERED, PYTHON)}
    own = {"columns"} - arguments.__annotations__.keys()
    assert arguments.__annotations__.keys() == known.keys() - own
    assert "given" not in parameters
    text = inspect.getdoc(function) or ""
    for name, option in known.items():
        default = option.default and option.kind.show(option.default) if option.kind is SIZE else option.default
        assert parameters[name].default == (None if option.scope == REMEMBERED else default), name
        assert f"\n    {name}: {option.help.split()[0]}" in text, name


@pytest.mark.parametrize("command", ["add", "remove", "pin", "unpin", "rollback"])
def test_functions_that_list_their_options_have_the_defaults_of_the_command(command: str) -> None:
    parameters, known = inspect.signature(getattr(pqcache, command)).parameters, options_of(*COMMANDS[command])
    shared = [name for name, option in known.items() if name in parameters and option.scope == RUN]
    assert shared
    for name in shared:
        assert (parameters[name].default or None) == (known[name].default or None), name


def test_help_lists_what_is_read_before_its_order_and_its_source() -> None:
    shown = list(inspect.signature(ParquetDataset).parameters)
    wanted = [
        "columns",
        "filters",
        "limit",
        "batch_size",
        "shuffle",
        "seed",
        "rank",
        "pad",
        "memory",
        "source",
        "transform",
    ]
    assert [name for name in shown if name in wanted] == wanted


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pqcache.gc("cache", keep=0), "keep=0: has to be at least 1"),
        (lambda: pqcache.gc("cache", wait="soon"), "wait='soon': not a duration"),
        (lambda: pqcache.gc("cache", dry_run="yes"), "dry_run='yes': neither true nor false"),  # type: ignore[arg-type]
        (lambda: pqcache.verify("cache", jobs=0), "jobs=0: has to be at least 1"),
        (lambda: pqcache.verify("cache", engine="duckdb"), "engine='duckdb': choose fastparquet"),
        (lambda: pqcache.index("cache", keys="id"), "keys='id': not a list of names"),
        (lambda: pqcache.inspect("cache", block_size=0), "block_size=0: has to be at least 1"),
        (lambda: pqcache.bench("cache", seconds=0), "seconds=0: has to be at least 0.01"),
        (lambda: pqcache.serve(["cache"], connections=0), "connections=0: has to be at least 1"),
    ],
)
def test_functions_refuse_what_their_commands_refuse(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert said in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'json'"):
        pqcache.gc("cache", json=True)  # type: ignore[call-arg]


def test_none_is_a_value_where_an_option_says_so(tmp_path: Path) -> None:
    write_shop(tmp_path / "lake")
    assert (
        ParquetDataset(tmp_path / "lake", ["id"], batch_size=None, stall_timeout=None, lanes=None).stall_timeout is None
    )
    for name in ("shuffle", "seed", "memory", "on_error", "ragged"):
        with pytest.raises(UsageError, match=f"{name}=None"):
            ParquetDataset(tmp_path / "lake", ["id"], **{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, np.False_, torch.tensor(False)])
def test_flags_of_other_libraries(given: Any, tmp_path: Path) -> None:
    write_shop(tmp_path / "lake")
    found = ParquetDataset(tmp_path / "lake", ["id"], shuffle=given)
    assert next(iter(found)).index == 0
    assert found.options.shuffle is False


def test_options_of_a_dataset_show_no_secret(tmp_path: Path) -> None:
    write_shop(tmp_path / "lake")
    pqcache.sync(tmp_path / "lake", tmp_path / "cache")
    found = ParquetDataset(tmp_path / "cache", ["id"], source=tmp_path / "lake", source_options={"token": "HUNTER2"})
    assert "HUNTER2" not in repr(found.options)


def test_type_hints_are_resolved() -> None:
    for function in (ParquetDataset.__init__, Mix.__init__, pqcache.Cache.batches, pqcache.sync):
        assert "given" in get_type_hints(function)


def test_all_that_a_cache_remembers_is_an_option_of_a_command() -> None:
    commands = {name for tables in COMMANDS.values() for name in options_of(*tables)}
    assert set(options_of(Remembered)) <= commands


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("inspect ca", ["cache/"]),
        ("inspect cache/", ["cache/shop"]),
        ("pin cache/shop ", ["ID", "paper"]),
        ("rollback cache/shop pa", ["paper"]),
        ("repartition cache/shop --compression z", ["zstd"]),
        ("sync --compare ", ["content", "identity"]),
        ("help roll", ["rollback"]),
        ("ROOT verify s", ["shop"]),
        ("ROOT verify c", ["cache/"]),
        ("ROOT remove ", ["cache/", "lake/", "shop"]),
        ("ROOT rollback shop pa", ["paper"]),
    ],
)
def test_the_shell_completes_values(
    words: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words.startswith("ROOT "):
        monkeypatch.setenv("PQCACHE_ROOT", "cache")
        words = words.removeprefix("ROOT ")
    write_shop(tmp_path / "lake")
    snapshot = pqcache.sync("lake", "cache/shop").snapshot or ""
    pqcache.pin("cache/shop", snapshot, name="paper")
    last = len(words.split(" "))
    environment = {"_PQCACHE_COMPLETE": "complete_bash", "COMP_WORDS": f"pqcache {words}", "COMP_CWORD": str(last)}
    done = run_pqcache(env={**os.environ, **environment})
    assert done.stdout.split() == [snapshot if word == "ID" else word for word in expected], done.stderr
