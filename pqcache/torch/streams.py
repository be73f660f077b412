"""Several generators read as one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from typing import TypeVar

_T = TypeVar("_T")


def merged(streams: Sequence[int], read: Callable[[int], Generator[_T]]) -> Generator[_T]:
    """Yield the next item of each of ``streams``, which are numbers that ``read`` opens a generator for."""
    with ExitStack() as stack:
        found = {stream: stack.enter_context(closing(read(stream))) for stream in dict.fromkeys(streams)}
        for stream in streams:
            yield next(found[stream])
