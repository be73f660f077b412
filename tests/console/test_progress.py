"""The progress bar of a first copy that is read while it arrives."""

from __future__ import annotations

from pqcache.console import terminal
from pqcache.events import Advanced, Awaited, Started


def test_what_readers_wait_for() -> None:
    with terminal._ProgressBars() as bars:
        bars(Awaited(1, 1))  # before there is a bar
        bars(Started("fetch", 100 << 20))
        bars(Advanced("fetch", 10 << 20))
        bars(Awaited(2, 3 << 20))
        fields = bars._progress.tasks[0].fields
        assert (fields["amount"], fields["awaited"]) == ("10 MB", ", readers wait for 3 MB")
        bars(Awaited(0, 0))
        assert bars._progress.tasks[0].fields["awaited"] == ""
