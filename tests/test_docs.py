"""The documentation says what is so: its commands and programs run, its tables are complete, its links resolve."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pyarrow as pa
import pytest

from pqcache import errors, events
from pqcache.config import Config
from pqcache.forecast import Forecast
from pqcache.store.cache import FILES, ROW_GROUPS
from pqcache.store.gc import GcReport
from pqcache.store.inspect import Bin, Column, Inspection, Partition
from pqcache.store.manifest import FORMAT, read_manifest
from pqcache.store.repartition_to import RepartitionReport
from pqcache.store.source import is_secret
from pqcache.store.sync import SyncReport
from pqcache.store.sync import sync as sync_cache
from pqcache.store.verify import VerifyReport
from pqcache.store.views import Difference, FileView, RowGroupView
from tests.datasets import write_shop

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MAN = ROOT / "man" / "man1"
FORMAT_PAGE = ROOT / "docs" / "cache-format.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what stands behind the fence, its text, and its line."""

    kind: str
    text: str
    line: int

    @property
    def command(self) -> str | None:
        """The shell commands to run, or None for a block that is not to be run."""
        lines = [line.removeprefix("$ ") for line in self.text.splitlines()]
        first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
        return "\n".join(lines) if self.kind == "sh" and first.startswith(("pqcache ", "PQCACHE_")) else None


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order; those inside lists have their indentation taken off."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        found.append(Block(match[2].strip(), "\n".join(lines), text.count("\n", 0, match.start()) + 1))
    return found


def environment() -> dict[str, str]:
    """Return an environment in which ``pqcache`` and ``python`` are this project's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def run_blocks(page: Path, directory: Path) -> int:
    """Run a page's commands and programs one after the other in ``directory``; return how many there were."""
    done = 0
    for block in blocks_of(page):
        if block.kind == "python":
            script = directory / "example.py"
            script.write_text(block.text)
            words = [sys.executable, str(script)]
            if block.text.startswith("# torchrun "):
                words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        elif block.command is not None:
            words = ["sh", "-eu", "-c", block.command]
        else:
            continue
        result = subprocess.run(words, cwd=directory, env=environment(), capture_output=True, text=True, timeout=300)
        said = f"{page.name}:{block.line}:\n{block.text}\n{result.stdout}{result.stderr}"
        assert result.returncode == 0, said
        assert "Traceback" not in result.stderr or "PQCACHE_DEBUG" in block.text, said
        assert "ERROR" not in result.stderr, said
        done += 1
    return done


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A directory with ``lake/shop`` in it, where the documentation's commands run as they stand."""
    assert shutil.which("pqcache", path=environment()["PATH"]), "pqcache is not installed beside this Python"
    write_shop(tmp_path / "lake" / "shop", rows=600)
    return tmp_path


@pytest.mark.slow
def test_the_readme_runs(lake: Path) -> None:
    assert run_blocks(README, lake) >= 10
    for name in ("cache/shop", "cache/recent"):
        assert (lake / name / "current").is_dir()
    assert len(list(lake.glob("shop-8mb/dt=*/*.parquet"))) == 3
    assert not (lake / "cache" / "other").exists()


def test_no_command_of_the_readme_is_overlooked() -> None:
    for block in blocks_of(README):
        if block.kind == "sh":
            assert block.command is not None, f"README.md:{block.line}: begin it with pqcache, or say 'sh no-run'"
        elif block.kind not in ("", "python", "ini", "crontab"):
            assert block.kind == "sh no-run", f"README.md:{block.line}: ```{block.kind}"


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.name)
def test_the_programs_in_docs_run(page: Path, lake: Path) -> None:
    sync_cache(lake / "cache" / "shop", str(lake / "lake" / "shop"))
    run_blocks(page, lake)


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
    assert expected <= quoted(table_row(README, f"`{name}`"))
    assert re.search(rf"^\.It Cm {name}$", (MAN / "pqcache.1").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "report"),
    [("sync", SyncReport), ("repartition", RepartitionReport), ("verify", VerifyReport), ("gc", GcReport)],
)
def test_summary_fields_are_documented(command: str, report: type) -> None:
    names = {field.name for field in fields(report)} | ({"ok"} if report is VerifyReport else set())
    assert quoted(table_row(README, f"`{command}`")) - {"damaged", "error"} == names
    page = (MAN / f"pqcache-{command}.1").read_text()
    assert names <= set(re.findall(r"^\.(?:It )?Cm (\w+)", page, re.MULTILINE)) | set(re.findall(r" Cm (\w+)", page))


def test_inspect_json_is_documented() -> None:
    text = README.read_text().partition("`pqcache inspect --json` writes")[2].partition("\n`pqcache log")[0]
    rows = [line.split(" | ", 1) for line in text.splitlines() if line.startswith("| `") and "| `--" not in line]
    assert set().union(*(quoted(first) for first, _ in rows)) == {field.name for field in fields(Inspection)} | {
        "training"
    }
    for name, kind in (("histogram", Bin), ("partitions", Partition), ("columns", Column), ("training", Forecast)):
        assert {field.name for field in fields(kind)} <= quoted(table_row(README, f"`{name}`"))
    for name, kind in (("--files", FileView), ("--row-groups", RowGroupView), ("--diff", Difference)):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert {field.name for field in fields(kind)} <= quoted(row)
    assert {"min", "median", "mean", "max"} <= quoted(table_row(README, "`row_group_bytes`"))
    page = (MAN / "pqcache-inspect.1").read_text()
    for field in fields(Inspection):
        assert re.search(rf"^\.It .*\bCm {field.name}\b", page, re.MULTILINE), field.name


def test_exit_codes_are_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {0} | {kind.exit_code for kind in kinds if issubclass(kind, errors.PqcacheError)}
    text = README.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


def test_secret_options_are_secret() -> None:
    for name in ("secret", "key", "token", "password"):
        assert is_secret(name)


def test_the_format_page_has_every_field(lake: Path) -> None:
    sync_cache(lake / "cache" / "shop", str(lake / "lake" / "shop"))
    snapshot = lake / "cache" / "shop" / "current"
    page = FORMAT_PAGE.read_text()
    for name in (FILES, ROW_GROUPS):
        assert name in page
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
    for option in fields(Config):
        assert re.search(rf"^\| (?:`\w+`, )*`{option.name}`", page, re.MULTILINE), option.name
    assert read_manifest(snapshot / FILES).source == str(lake / "lake" / "shop")


def kind_row(page: str, name: str) -> str:
    """Return the type that the format page gives a column."""
    match = re.search(rf"^\| (?:`[^|]*`, )?`{re.escape(name)}`(?:, `[^|]*`)? \| ([^|]+) \|", page, re.MULTILINE)
    assert match is not None, f"cache-format.md: no row for {name}"
    return match[1].strip()


def test_the_design_names_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    (tree,) = [block.text for block in blocks_of(ROOT / "docs" / "design.md") if block.text.startswith("pqcache/")]
    package = ROOT / "pqcache"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    expected = {path for path in found if "/" not in path or not path.endswith("__init__.py")}
    named = set()
    parts: list[tuple[int, str]] = []
    for line in tree.splitlines()[1:]:
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        parts = [part for part in parts if part[0] < indent]
        if name.endswith("/"):
            parts.append((indent, name))
        else:
            named.add("".join(part for _, part in parts) + name)
    assert named == expected, "docs/design.md: the tree under 'The modules'"
    assert "## Decisions" in text
