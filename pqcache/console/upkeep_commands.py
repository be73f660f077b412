"""The commands log and gc."""

from __future__ import annotations

from pqcache.console import examples
from pqcache.console import options as opt
from pqcache.console.app import app, print_report
from pqcache.console.help import Command


@app.command(cls=Command, epilog=examples.LOG)
def log(
    cache: opt.CacheArgument,
    last: opt.Last = 20,
    json: opt.LogJson = False,
) -> None:
    """Show the runs of a cache: time, command, files, bytes, snapshot."""
    import pqcache
    from pqcache.console import terminal
    from pqcache.console.log_text import print_history

    records = pqcache.log(cache)[-last:]
    if json:
        for record in records:
            terminal.print_json(record)
    else:
        print_history(records)


@app.command(cls=Command, epilog=examples.GC)
def gc(
    cache: opt.CacheArgument,
    keep: opt.GcKeep = None,
    older_than: opt.OlderThan = 0.0,
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Remove old snapshots that no reader holds."""
    import pqcache
    from pqcache.console import progress, terminal

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.gc(cache, keep=keep, older_than=older_than, wait=wait, dry_run=dry_run, on_event=on_event)
    print_report(report.to_dict(), json, quiet, lambda: terminal.print_gc(report))
