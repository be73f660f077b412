"""The documentation says what is so: its commands and programs run, its tables are complete, its links resolve."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
import typer

from pqcache import errors, events
from pqcache.benchmark import Advice, BenchReport, Forecast, Measured
from pqcache.console.commands import app
from pqcache.store.cache_root import RemoveReport
from pqcache.store.gc import GcReport
from pqcache.store.inspect import (
    ColumnSummary,
    Difference,
    FileView,
    HistogramBar,
    Inspection,
    PartitionSummary,
    RowGroupView,
)
from pqcache.store.key_index import IndexReport, KeyView, index
from pqcache.store.key_lookup import KEYS, KeyRun
from pqcache.store.layout import FILES, ROW_GROUPS
from pqcache.store.manifest_file import FORMAT, read_manifest
from pqcache.store.repartition.to_target import RepartitionReport
from pqcache.store.sync.cache_run import SyncReport
from pqcache.store.sync.command import sync as sync_cache
from pqcache.store.urls import is_secret
from pqcache.store.verify import VerifyReport
from tests import ROOT
from tests.datasets import write_shop
from tests.forked_commands import warm
from tests.remote import S3Remote
from tests.scripts import run_script
from tests.servers.hdfs import superuser

if TYPE_CHECKING:
    from tests.conftest import Bucket
    from tests.servers.azure import Azure
    from tests.servers.gcs import Gcs
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3

README = ROOT / "README.md"
FORMAT_PAGE, JSON_PAGE = ROOT / "docs" / "cache-format.md", ROOT / "docs" / "json.md"
EXIT_CODES = ROOT / "docs" / "commands" / "README.md"
OWN = [README, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
PAGES = [*OWN, *sorted((ROOT / "docs").glob("**/*.md"))]
FRAMEWORK_PAGES = [page for page in PAGES if page.parent.name == "frameworks"]  # run by tests/frameworks/test_pages.py
_FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what stands behind the fence, its text, and its line."""

    page: str
    kind: str
    text: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The pqcache commands in it, each on one line."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return re.findall(r"^(?:[A-Z_]+=\S+ |ExecStart=|[\d* ]{9,} +)*(?:\S*/)?pqcache .*$", joined, re.MULTILINE)


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order; those inside lists have their indentation taken off."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page.name, match[2].strip(), "\n".join(lines), line))
    return found


def environment() -> dict[str, str]:
    """Return an environment in which ``pqcache`` and ``python`` are this project's."""
    path = os.pathsep.join([str(warm().bin), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def run_block(block: Block, directory: Path, stand_ins: Mapping[str, str]) -> None:
    """Run one block in ``directory``, with what stands in for the hosts and paths that it names."""
    text = block.text
    if text.startswith("# torchrun "):
        return  # tests/test_examples.py runs it, as an example of the same text
    for name, here in stand_ins.items():
        text = text.replace(name, here)
    words: list[str] = []
    if block.kind == "python":
        (directory / "example.py").write_text(text)
    elif block.kind == "sh":
        words = ["sh", "-eu", "-c", text]
    else:  # a crontab or a unit: with the little environment that cron gives
        lines = [line.partition("pqcache ")[2] for line in Block("", "", text, 0).commands]
        if not lines:
            return
        pqcache = shlex.quote(str(warm().bin / "pqcache"))
        words = ["env", "-i", f"HOME={directory}", f"PYTHONPATH={ROOT}", "sh", "-euc"]
        words.append("\n".join(f"{pqcache} {line}" for line in lines))
    if block.kind == "python":
        result = run_script(directory / "example.py", cwd=directory, env=environment())
    else:
        result = subprocess.run(words, cwd=directory, env=environment(), capture_output=True, text=True, timeout=300)
    said = f"{block.place}:\n{text}\n{result.stdout}{result.stderr}"
    assert result.returncode == 0, said
    assert "Traceback" not in result.stderr or "PQCACHE_DEBUG" in text, said
    assert "ERROR" not in result.stderr, said


RUN = ("sh", "python", "crontab", "ini")
# What is not run, and the word that shows why: it needs what no test has, or is another program's
NOT_RUN = {
    "sh of help": "pqcache ", "sh of demo": "pqcache demo",  # tests/test_demo.py and tests/test_package.py run the demo
    "sh of pip": "pip install", "sh of make": "make ", "sh of kerberos": "kinit", "sh of systemd": "systemctl",
    "sh of serve": "8700", "ini of serve": "8700",
    "sh of yarn": "yarn", "sh of dask": "--scheduler", "sh of ray": "--scheduler",
    "sh of spark": "--scheduler",
    "sh of hdfs3": "hdfs3", "sh of hive": "hive://", "sh of rclone": "rclone ",
    "python of petastorm": "petastorm", "python of webdataset": "webdataset", "python of streaming": "streaming",
    "python of prometheus_client": "prometheus_client", "python of opentelemetry": "opentelemetry",
    "python of tensorflow": "tensorflow", "json of yarn": "dask worker", "toml": "", "text": "", "": "",
}  # fmt: skip


def needs(block: Block) -> str:
    """Return which server a block needs: hdfs, s3, gcs, azure, or none."""
    schemes = {"hdfs://": "hdfs", "s3://": "s3", "gs://": "gcs", "az://": "azure", "abfss://": "azure"}
    return next((server for scheme, server in schemes.items() if scheme in block.text), "")


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A directory with ``lake/shop`` in it, where the documentation's commands run as they stand."""
    assert (Path(sys.executable).parent / "pqcache").exists(), "pqcache is not installed beside this Python"
    write_shop(tmp_path / "lake" / "shop", rows=600)
    return tmp_path


def run_page(page: Path, lake: Path, server: str, stand_ins: Mapping[str, str]) -> int:
    """Run the blocks of a page that need this server, one after the other; return how many there were.

    What shows one of the examples is run by tests/test_examples.py.
    """
    examples = [path.read_text().rstrip() for path in (ROOT / "examples").glob("*.py")]
    blocks = [block for block in blocks_of(page) if block.kind in RUN and needs(block) == server]
    blocks = [block for block in blocks if block.text not in examples]
    local = {"/data/cache/shop": str(lake / "cache" / "shop"), "/var/log/": f"{lake}/"}
    for block in blocks:
        run_block(block, lake, {**local, **stand_ins})
    return len(blocks)


def pages_with(server: str) -> list[Path]:
    """Return the pages that have blocks to run with this server."""
    pages = [page for page in PAGES if page not in FRAMEWORK_PAGES]
    return [page for page in pages if any(b.kind in RUN and needs(b) == server for b in blocks_of(page))]


@pytest.mark.slow
def test_the_readme_runs(lake: Path) -> None:
    sync_cache(str(lake / "lake" / "shop"), lake / "cache" / "shop")  # as the crontab has it
    assert run_page(README, lake, "", {}) >= 4
    assert len(list(lake.glob("cache/sales/current/dt=*/*.parquet"))) == 3


def test_the_readme_is_short_and_its_numbers_are_measured() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    table = text.partition("## Five numbers")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    for cell in itertools.chain(*rows):
        for number in re.findall(r"\d[\d.,]*", cell):
            assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", measured), f"{number}: {cell.strip()}"


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """The pages that everyone reads first are run by `make test`, the others by `make test-deep`."""
    return [] if page.name in ("quick-start.md", "nightly.md", "training.md") else [pytest.mark.deep]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=marks_of(p)) for p in pages_with("")[1:]])
def test_what_docs_show_runs(page: Path, lake: Path) -> None:
    if page.name != "quick-start.md":
        sync_cache(str(lake / "lake" / "shop"), lake / "cache" / "shop")
    assert run_page(page, lake, "", {})


@pytest.mark.hdfs
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("hdfs"), ids=lambda page: page.name)
def test_what_is_shown_of_hdfs_runs(
    page: Path, lake: Path, hdfs: Hdfs, hdfs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdfs.upload_tree(lake / "lake" / "shop", f"{hdfs_dir}/shop")
    for name, value in hdfs.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HADOOP_USER_NAME", superuser())
    rpc, http, base = (urlsplit(url) for url in (hdfs.url, hdfs.webhdfs_url, hdfs_dir))
    hosts = {"namenode:8020": rpc.netloc, "nn1:8020": rpc.netloc, "nn2:8020": rpc.netloc, "namenode:9870": http.netloc}
    assert run_page(page, lake, "hdfs", {**hosts, "/etc/hadoop/conf": hdfs.env["HADOOP_CONF_DIR"],
                                         "/warehouse/": f"{base.path}/"})  # fmt: skip


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("s3"), ids=lambda page: page.name)
def test_what_is_shown_of_s3_runs(
    page: Path, lake: Path, s3: S3, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    S3Remote(f"{s3_bucket.url}/warehouse/shop", s3_bucket.client).upload(lake / "lake" / "shop")
    keys = f"aws_access_key_id = {s3.access_key}\naws_secret_access_key = {s3.secret_key}\n"
    (lake / "credentials").write_text(f"[lake]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(lake / "credentials"))
    names = {
        "s3://lake/": f"{s3_bucket.url}/",
        "http://minio:9000": s3.endpoint,
        "https://ceph.example:7480": s3.endpoint,
    }
    public = {"s3://public-data/shop": f"{s3_bucket.url}/warehouse/shop"}
    policy = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"],
              "Resource": [f"arn:aws:s3:::{s3_bucket.name}", f"arn:aws:s3:::{s3_bucket.name}/*"]}  # fmt: skip
    s3_bucket.client.put_bucket_policy(
        Bucket=s3_bucket.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [policy]})
    )
    assert run_page(page, lake, "s3", {**names, **public})


@pytest.mark.gcs
@pytest.mark.usefixtures("no_cloud")
@pytest.mark.parametrize("page", pages_with("gcs"), ids=lambda page: page.name)
def test_what_is_shown_of_google_cloud_storage_runs(
    page: Path, lake: Path, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.create_bucket(bucket := f"docs-{os.urandom(4).hex()}")
    gcs.upload_tree(lake / "lake" / "shop", f"{bucket}/warehouse/shop")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", gcs.token)
    public = {"gs://public-data/shop": f"gs://{bucket}/warehouse/shop"}
    assert run_page(page, lake, "gcs", {**public, "gs://lake/": f"gs://{bucket}/"})


@pytest.mark.azure
@pytest.mark.usefixtures("no_cloud")
@pytest.mark.parametrize("page", pages_with("azure"), ids=lambda page: page.name)
def test_what_is_shown_of_azure_runs(page: Path, lake: Path, azure: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    azure.create_container(container := f"docs-{os.urandom(4).hex()}")
    azure.upload_tree(lake / "lake" / "shop", f"{container}/warehouse/shop")
    parts = (f"AccountName={azure.options['account_name']}", f"AccountKey={azure.key}")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ";".join([*parts, f"BlobEndpoint={azure.endpoint}"]))
    hosts = {"abfss://lake@account.dfs.core.windows.net/": f"abfss://{container}/", "az://lake/": f"az://{container}/"}
    assert run_page(page, lake, "azure", hosts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_snippet_of_ours_is_left_out(page: Path) -> None:
    for block in blocks_of(page):
        if block.kind in RUN:
            assert block.kind != "sh" or block.commands, f"{block.place}: runs nothing of ours; say whose it is"
            if block.kind == "python":
                compile(block.text, block.place, "exec")
            continue
        assert block.kind in NOT_RUN, f"{block.place}: ```{block.kind}: give it a kind that runs, or one of NOT_RUN"
        word = NOT_RUN[block.kind]
        assert word in block.text, f"{block.place}: not run, as if it were about {word}"
        if block.kind.startswith("python of"):
            assert "pqcache" not in block.text, f"{block.place}: ours, and not run"
        for command in block.commands:
            assert word in (command if word else ""), f"{block.place}: this could run: {command}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "pqcache" / "console" / "commands.py"], ids=lambda page: page.name)
def test_commands_have_the_options_they_use(page: Path) -> None:
    """Also those that are not run, and the examples of the commands' own help."""
    commands = [command for block in blocks_of(page) if block.kind != "text" for command in block.commands]
    group: Any = typer.main.get_command(app)
    if page.suffix == ".py":
        epilogs = [group.epilog, *(command.epilog for command in group.commands.values())]
        commands = [command for text in epilogs for command in Block(page.name, "", text, 0).commands]
        assert len(commands) > 12
    for line in commands:
        words = shlex.split(line.partition("pqcache ")[2].partition(" | ")[0].partition(" >> ")[0].partition(" && ")[0])
        words = list(itertools.takewhile(lambda word: word not in ("||", "&", ">", "#"), words))
        if not words[0].startswith("-") and "--help" not in words:
            group.commands[words[0]].make_context(words[0], words[1:], help_option_names=["-h", "--help"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        linked = page if not name else (page.parent / name)
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{page.name}: {target}"


def test_the_contents_have_every_page() -> None:
    """docs/README.md leads to each page, itself or through the README of its folder."""
    folders = [ROOT / "docs", *(path.parent for path in (ROOT / "docs").glob("*/README.md"))]
    for folder in folders:
        linked = {unquote(target) for target in re.findall(r"\]\(([^)#\s]+)", (folder / "README.md").read_text())}
        pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
        assert pages <= linked, folder
    text = (ROOT / "docs" / "site" / "conf.py").read_text()
    contents = set(
        re.findall(r'"((?:docs|benchmarks)/[\w./-]+|[A-Z]+)"', text.partition("CONTENTS = {")[2].partition("}")[0])
    )
    expected = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert expected <= contents, "docs/site/conf.py: CONTENTS"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made for reading on the web."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_row(page: Path, first: str) -> str:
    """Return the row of a Markdown table that begins with ``first``."""
    for line in page.read_text().splitlines():
        if line.startswith(f"| {first} |"):
            return line.removeprefix(f"| {first} |")
    raise AssertionError(f"{page.name}: no table has a row for {first}")


def quoted(text: str) -> set[str]:
    """Return the words in backquotes."""
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("kind", [kind for kind in get_args(events.Event) if kind is not events.Advanced])
def test_event_fields_are_documented(kind: type) -> None:
    name = kind.__name__.lower()
    expected = {field.name for field in fields(kind)}
    assert expected <= quoted(table_row(JSON_PAGE, f"`{name}`"))


@pytest.mark.parametrize(
    ("command", "report"),
    [
        ("sync", SyncReport),
        ("repartition", RepartitionReport),
        ("verify", VerifyReport),
        ("index", IndexReport),
        ("gc", GcReport),
        ("remove", RemoveReport),
    ],
)
def test_summary_fields_are_documented(command: str, report: type) -> None:
    names = {field.name for field in fields(report)} | ({"ok"} if report is VerifyReport else set())
    names |= {field.name for field in fields(KeyView)} if report is IndexReport else set()
    assert quoted(table_row(JSON_PAGE, f"`{command}`")) - {"damaged", "error"} == names


def test_inspect_json_is_documented() -> None:
    text = JSON_PAGE.read_text().partition("`pqcache inspect --json` writes")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in text.splitlines() if line.startswith("| `") and "| `--" not in line]
    assert set().union(*(quoted(first) for first, _ in rows)) == {field.name for field in fields(Inspection)} | {
        "training"
    }
    for name, kind in (
        ("histogram", HistogramBar),
        ("partitions", PartitionSummary),
        ("columns", ColumnSummary),
        ("training", Forecast),
    ):
        assert {field.name for field in fields(kind)} <= quoted(table_row(JSON_PAGE, f"`{name}`"))
    for name, kind in (("--files", FileView), ("--row-groups", RowGroupView), ("--diff", Difference)):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert {field.name for field in fields(kind)} <= quoted(row)
    assert {"min", "median", "mean", "max"} <= quoted(table_row(JSON_PAGE, "`row_group_bytes`"))


def test_bench_json_is_documented() -> None:
    text = JSON_PAGE.read_text().partition("`pqcache bench --json` writes")[2].partition("\n## ")[0]
    for kind in (BenchReport, Measured, Advice):
        assert {field.name for field in fields(kind)} <= quoted(text)


def test_exit_codes_are_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {0} | {kind.exit_code for kind in kinds if issubclass(kind, errors.PqcacheError)}
    text = EXIT_CODES.read_text().partition("## Exit status")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^- \*\*(\d+)\*\*: ", text, re.MULTILINE)} == codes


def test_secret_options_are_secret() -> None:
    for name in ("secret", "key", "token", "password"):
        assert is_secret(name)


def test_the_format_page_has_every_field(lake: Path) -> None:
    sync_cache(str(lake / "lake" / "shop"), lake / "cache" / "shop")
    index(lake / "cache" / "shop", keys=["title"])
    snapshot = lake / "cache" / "shop" / "current"
    page = FORMAT_PAGE.read_text()
    for name in (FILES, ROW_GROUPS, f"{KEYS}/title/index.arrow"):
        assert Path(name).name in page
        with pa.memory_map(str(snapshot / name)) as file, pa.ipc.open_file(file) as reader:
            schema = reader.schema
        assert set(schema.metadata) <= {name.encode() for name in quoted(page)}
        for field in schema:
            column, colon, what = field.name.rpartition(":")
            kind = "type of C" if what in ("min", "max") else str(field.type)
            if pa.types.is_dictionary(field.type):
                kind = f"dictionary<{field.type.value_type}>"
            if pa.types.is_list(field.type):
                kind = "list<struct>"
                for inner in field.type.value_type:
                    assert kind_row(page, f"sources.{inner.name}") == str(inner.type)
            assert kind_row(page, f"C:{what}" if colon and column else field.name) == kind
    assert f'"format": {FORMAT}' in page
    assert {field.name for field in fields(KeyRun)} <= quoted(page.partition("key indexes\n")[2])
    assert read_manifest(snapshot / FILES).source == str(lake / "lake" / "shop")


def kind_row(page: str, name: str) -> str:
    """Return the type that the format page gives a column."""
    match = re.search(rf"^\| (?:`[^|]*`, )?`{re.escape(name)}`(?:, `[^|]*`)? \| ([^|]+) \|", page, re.MULTILINE)
    assert match is not None, f"cache-format.md: no row for {name}"
    return match[1].strip()


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.rglob("*") if ".venv" not in path.parts]
    names = set(re.findall(r"`([a-z_/0-9]+(?:\.py|\.json|/))`", text)) - {
        "snapshots/",
        "arriving/",
        "tmp/",
    }  # of a cache
    missing = [name for name in sorted(names) if not any(path.endswith(f"/{name.rstrip('/')}") for path in there)]
    assert names
    assert not missing
    assert len(text.splitlines()) <= 200, "what is longer is for the code to say"
