"""What is around the drivers of stores on a network, with a driver over a dictionary."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import pytest

from pqcache.errors import PqcacheError, SourceError, SourceNotFound, SourceUnavailable
from pqcache.store.drivers.remote import RemoteSource
from pqcache.store.manifest import Identity, SourceFile

FILES = {"dt=1/a": b"0123456789", "dt=1/b/c": b"x"}
SECRET = "hunter2-hunter2"


class _DictSource(RemoteSource):
    """A driver as short as one can be; ``fails`` is called before each answer."""

    def __init__(self, fails: Callable[[], object] = lambda: None, options: Mapping[str, str] | None = None) -> None:
        super().__init__(f"dict://user:{SECRET}@host/lake", "lake", options or {}, timeout=0.3)
        self._fails = fails

    def _list(self) -> Iterator[SourceFile]:
        return self.walk(self._entries)

    def _entries(self, directory: str) -> Iterator[tuple[str, SourceFile | None]]:
        self.within(self._fails)
        start = f"{directory}/" if directory else ""
        for path in {start + path[len(start) :].partition("/")[0] for path in FILES if path.startswith(start)}:
            yield path, SourceFile(path, self._stat(path)) if path in FILES else None

    def _stat(self, path: str) -> Identity:
        self._fails()
        return Identity(len(FILES[path]), 1)

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        for byte in FILES[path][offset : offset + length]:
            self._fails()
            yield bytes([byte])

    def explain(self, name: str, error: BaseException) -> PqcacheError:
        if isinstance(error, KeyError):
            return SourceNotFound(name, "no such file", "check the URL")
        return SourceUnavailable(name, str(error), "try again")

    def close(self) -> None:
        pass


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def use(source: RemoteSource, call: str) -> object:
    if call == "list":
        return sorted(file.path for file in source.list())
    return source.stat("dt=1/a") if call == "stat" else b"".join(source.read("dt=1/a", 2, 5))


CALLS = ["list", "stat", "read"]


def test_a_driver_lists_and_reads() -> None:
    source = _DictSource()
    assert source.url == "dict://user@host/lake"
    assert [use(source, call) for call in CALLS] == [sorted(FILES), Identity(10, 1), b"23456"]
    with pytest.raises(SourceNotFound, match=r"^dict://user@host/lake/no: no such file; check the URL$"):
        source.stat("no")


@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_waits_forever_is_given_up(call: str) -> None:
    with pytest.raises(SourceUnavailable, match=r"^dict://user@host/lake.*: no answer in time; check the host"):
        use(_DictSource(lambda: time.sleep(5)), call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "said",
    [
        f"no route to dict://user:{SECRET}@host/x",
        f"no route to http://user:{SECRET[:7]}/{SECRET[7:]}@host/x",
        f"denied: {SECRET}",
        f"GET http://host/x?sig={SECRET} failed",
        f"Max retries exceeded with url: /x?op=OPEN&delegation={SECRET} (refused)",
        "denied: an-option",
    ],
)
def test_secrets_are_taken_out_of_what_a_client_says(call: str, said: str) -> None:
    source = _DictSource(raising(OSError(said)), {"password": "an-option", "user": "denied"})
    with pytest.raises(SourceError, match=r"no route|denied|failed|exceeded") as error:
        use(source, call)
    shown = "".join(traceback.format_exception(error.value))  # as PQCACHE_DEBUG=1 and libraries show it
    assert not any(text in shown for text in (SECRET, SECRET[7:], "an-option"))
    assert "***" in str(error.value)


def test_the_cause_of_an_error_without_secrets_is_kept() -> None:
    with pytest.raises(SourceError) as error:
        _DictSource(raising(OSError("no route"))).stat("dt=1/a")
    assert isinstance(error.value.__cause__, OSError)


def test_an_error_of_this_program_is_none_of_the_store() -> None:
    source = _DictSource(raising(TypeError("oops")))
    source.raises = (OSError, KeyError)
    with pytest.raises(TypeError, match="oops"):
        use(source, "stat")
