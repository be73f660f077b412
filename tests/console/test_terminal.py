"""The command line where shells, pipes and full devices meet it: completion, no arguments, early Ctrl-C, reports."""

from __future__ import annotations

import fcntl
import os
import pty
import py_compile
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import pqcache
from pqcache.reader.open_dataset import open_local_dataset
from tests import ROOT
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache

PQCACHE = [sys.executable, "-m", "pqcache"]
COMPLETE = """
pqcache() {{ {python} -m pqcache "$@"; }}
eval "$(_PQCACHE_COMPLETE=source_bash pqcache)"
env() {{  # the completion calls "env NAME=VALUE ... pqcache"
    local -a set=()
    while [[ $1 == *=* ]]; do set+=("$1"); shift; done
    command env "${{set[@]}}" {python} -m "$@"
}}
COMP_WORDS=({words}) COMP_CWORD={last}
_pqcache_completion pqcache
echo "${{COMPREPLY[*]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [("pqcache ver", "verify"), ("pqcache sync --ma", "--marker --max-delete")],
)
def test_bash_completes_commands_and_options(words: str, expected: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("NOT CHECKED: bash is not installed")
    script = COMPLETE.format(python=sys.executable, words=words, last=len(words.split()) - 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for(shell: str) -> None:
    done = run_pqcache(env={**os.environ, "_PQCACHE_COMPLETE": f"source_{shell}"})
    assert "_PQCACHE_COMPLETE=complete_" + shell in done.stdout


def test_no_arguments_show_the_help_and_are_a_usage_error() -> None:
    done = run_pqcache()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: pqcache ")
    assert "error" not in done.stderr


def test_a_report_has_all_versions_and_a_bug_asks_for_it() -> None:
    done = run_pqcache("--version", "-v")
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert lines["pqcache"] == pqcache.__version__
    assert {"platform", "Python", "pyarrow", "fsspec", "botocore", "hdfs-native", "torch"} <= set(lines)
    code = "import pqcache.cli as c, pqcache.store.gc as g; g.gc = None; import sys; sys.exit(c.run(['gc', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "TypeError" in done.stderr
    assert "'pqcache --version -v'" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["inspect", "shop"], ["inspect", "shop", "--json"]])
def test_output_that_cannot_be_written_is_one_line(words: list[str], tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PQCACHE, *words], stdout=full, stderr=-1, text=True, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"pqcache: error: .*No space left on device", line)


IMPORTING = """
import builtins, time
import pqcache.__main__ as entry
imported = builtins.__import__
def slowly(name, *rest):
    if name == "pqcache.cli":
        print(flush=True)
        for _ in range(600):  # a signal just before a sleep does not end it
            time.sleep(0.1)
    return imported(name, *rest)
builtins.__import__ = slowly
entry.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_rest_is_imported_is_quiet(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", IMPORTING], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")


def test_the_public_names_are_there() -> None:
    assert set(pqcache.__all__) <= set(dir(pqcache))
    for name in pqcache.__all__:
        assert getattr(pqcache, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = pqcache.nothing  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-c", "import pqcache, sys; print('pyarrow' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("form", ["zip", "compiled"])
def test_the_public_names_are_there_without_a_source_file(form: str, tmp_path: Path) -> None:
    package = tmp_path / "made" / "pqcache"
    package.mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "units.py", "versions.py"):
        shutil.copy(ROOT / "pqcache" / name, package / name)
        if form == "compiled":
            py_compile.compile(str(package / name), str(package / f"{name}c"))
            (package / name).unlink()
    path = tmp_path / "made"
    if form == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "made"), "zip", path))
    code = "import pqcache; print(pqcache.__file__, len(pqcache.__all__), pqcache.parse_size('1KB'))"
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.startswith(str(path)), done.stderr
    assert done.stdout.split()[1:] == [str(len(pqcache.__all__)), str(pqcache.parse_size("1KB"))]


def without_override() -> list[str]:
    """Return words before a command that make permissions count for root, too; none for anyone else."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip(
            "NOT CHECKED: permissions do not count for root, and setpriv (Debian package util-linux) is missing"
        )
    caps = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}"]


def test_what_may_not_be_read_is_neither_damage_nor_a_wrong_use(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1, rows=10)
    pqcache.sync(str(tmp_path / "shop"), tmp_path / "cache")
    manifest = (tmp_path / "cache" / "current" / "_pqcache" / "files.arrow").resolve()
    for path, commands in (
        (manifest, ["sync", "verify"]),
        (tmp_path / "cache", ["sync", "inspect", "gc"]),
    ):
        mode = path.stat().st_mode
        path.chmod(0)
        for command in commands:
            words = [*without_override(), *PQCACHE, command, tmp_path / "cache"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1, (command, done)
            (line,) = done.stderr.splitlines()
            assert re.search(r"[Pp]ermission denied; make it (readable|accessible) for this user$", line)
        path.chmod(mode)


def test_a_directory_that_may_not_be_listed_is_not_passed_over(tmp_path: Path) -> None:
    """What trains on a plain directory has all its rows, or says why not; links are followed as sync follows them."""
    write_shop(tmp_path / "shop", days=3, files=1, rows=10)
    day = tmp_path / "shop" / "dt=2026-11-02"
    code = (
        "import sys; from pqcache.reader.open_dataset import open_local_dataset as opened; "
        "print(opened(sys.argv[1])[0].index.paths)"
    )
    words = [*without_override(), sys.executable, "-c", code, tmp_path / "shop"]
    day.chmod(0)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    day.chmod(0o755)
    assert f"{day}: permission denied; make it readable for this user" in done.stderr
    day.rename(tmp_path / "moved")
    day.symlink_to(tmp_path / "moved")
    assert pqcache.inspect(tmp_path / "shop").rows == 30
    assert sum(open_local_dataset(tmp_path / "shop")[0].index.numbers("rows")) == 30


def test_gc_of_a_cache_with_nothing_in_it(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1, rows=10)
    pqcache.sync(str(tmp_path / "shop"), tmp_path / "cache")
    (tmp_path / "cache" / "current").unlink()
    shutil.rmtree(tmp_path / "cache" / "snapshots")
    done = run_pqcache("gc", tmp_path / "cache")
    assert done.stdout.endswith("Z cache: removed nothing, kept nothing\n")


def test_what_a_sync_did_to_unchanged_files(tmp_path: Path) -> None:
    """Files that were damaged or are held otherwise are fetched again, which is no "no changed file"."""
    lake, cache = write_shop(tmp_path / "shop", days=2, files=2, rows=10), tmp_path / "cache"
    pqcache.sync(lake, cache)
    next((cache / "current" / "dt=2026-11-01").iterdir()).unlink()
    for words, said in (
        ((), "1 file again"),
        (("--columns", "id"), "4 files again"),
        (("--row-group-size", "1MB"), "rewrote 2 directories in dt=2026-11-01, dt=2026-11-02"),
    ):
        planned = run_pqcache("sync", cache, "--dry-run", *words)
        assert "again" not in said or f"would sync: {said}, " in planned.stdout, planned
        done = run_pqcache("sync", cache, *words)
        assert f" {said} in " in done.stdout, done
        assert "no changed file" not in done.stdout
    assert [record["fetched_again"] for record in pqcache.log(cache)] == [0, 1, 4, 0]
    history = run_pqcache("log", cache).stdout
    assert ("  1 again  " in history, "  4 again  " in history) == (True, True), history


def test_closed_streams_change_no_exit_code(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1)
    for words, code in (("nowhere", 2), ("shop cache", 0)):
        command = f"exec {shlex.join(PQCACHE)} sync {words} >&- 2>&-"
        assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60).returncode == code


def test_a_reader_that_goes_away_is_an_error_of_one_line(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PQCACHE, "help"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "pqcache: error: the output: its reader closed it early\n")


def test_a_narrow_terminal_shows_the_last_column_below(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1)
    cache = tmp_path / ("c" * 150)
    pqcache.sync(tmp_path / "shop", cache)
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 180, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([*PQCACHE, "status", cache], stdout=writer, env=clean, check=True, timeout=60)
    said = b""
    while said.count(b"\n") < 4:  # a terminal passes on a part at a time
        said += os.read(reader, 10_000)
    os.close(reader)
    os.close(writer)
    shown = said.decode().splitlines()
    assert shown[0].split()[-2:] == ["in", "use"]
    assert shown[2].split() == ["source:", f"{tmp_path}/shop"]


def test_an_interrupted_demo_says_that_it_begins_anew(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*PQCACHE, "demo"], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("pqcache in one run")
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=60)
    assert (demo.returncode, said) == (130, "pqcache: error: interrupted; run the command again, which begins anew\n")


def test_without_torch_an_import_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; from pqcache.torch import Loader"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = "ModuleNotFoundError: pqcache.torch needs torch: pip install 'pqcache[torch]'"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_all_is_done_changes_nothing(number: int) -> None:
    """While Python tidies up it has put the handlers of signals away: the process would die of one."""
    code = (
        f"import atexit, os; atexit.register(os.kill, os.getpid(), {int(number)}); from pqcache.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
