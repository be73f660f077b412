"""Writes the manual pages, in man/ and in docs/commands/, from the commands' own help and the parts in man/parts/.

    python tools/man.py            write them
    python tools/man.py --check    name the pages that are not as they would be written

A part is mdoc with the sections that the help does not give. In its OPTIONS section, what stands below ``.It Fl -name``
is added to what the help says of that option; what stands before the first and after ``.El`` frames the list.
A command without a part gets a page from its help alone. The pages in docs/commands/ are the same text as Markdown.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import typer
from man_markdown import markdown

from pqcache.console.app import OptionHelp, first_line, option_groups
from pqcache.console.commands import app
from pqcache.options import Remembered, options_of

ROOT = Path(__file__).resolve().parent.parent
MAN, WEB = ROOT / "man", ROOT / "docs" / "commands"
DATE = "November 21, 2026"
GROUP: Any = typer.main.get_command(app)
SEE = "See\n.Xr pqcache 1 ."
EXIT = "0 on success, 1 on failure, 2 for a usage error, 130 if interrupted; see\n.Xr pqcache 1 ."


def pages() -> dict[str, str]:
    """Return the text of every manual page by its path below man/."""
    commands = {"pqcache": GROUP} | {f"pqcache-{name}": command for name, command in GROUP.commands.items()}
    written = {f"man1/{name}.1": page(name, command) for name, command in commands.items()}
    return {**written, "man5/pqcache.toml.5": header("pqcache.toml", 5) + config_page()}


def config_page() -> str:
    """Return the page of pqcache.toml, with its keys from the table of options."""
    part = (MAN / "parts" / "pqcache.toml.mdoc").read_text()
    keys = [f".It Cm {name}\n{mdoc(option.config_text)}" for name, option in options_of(Remembered).items()]
    return part.replace('.\\" KEYS\n', "\n".join(keys) + "\n")


def files() -> dict[Path, str]:
    """Return the text of every file that is written: the manual pages, and the same as Markdown."""
    found = {}
    for name, text in pages().items():
        stem = Path(name).stem
        found[MAN / name] = text
        found[WEB / f"{'README' if stem == 'pqcache' else stem.removeprefix('pqcache-')}.md"] = markdown(text)
    return found


def header(name: str, section: int) -> str:
    """Return the beginning of a page."""
    made = ".\\\" Made by tools/man.py from the command's help and man/parts/: change those.\n"
    return f"{made}.Dd {DATE}\n.Dt {name.upper()} {section}\n.Os\n"


def page(name: str, command: Any) -> str:
    """Return a command's page."""
    own = sections_of(MAN / "parts" / f"{name}.mdoc")
    words = name.replace("-", " ", 1)
    first = first_line(command).rstrip(".")
    sections = {
        "NAME": f".Nm {name}\n.Nd {first[0].lower() + first[1:]}",
        "SYNOPSIS": own.get("SYNOPSIS", synopsis(words, command)),
        "DESCRIPTION": own.get("DESCRIPTION", mdoc(command.help)).replace('.\\" COMMANDS', command_list()),
        "OPTIONS": options(command, own.get("OPTIONS", "")),
        "ENVIRONMENT": own.get("ENVIRONMENT", SEE),
        "FILES": own.get("FILES", SEE),
        "EXIT STATUS": own.get("EXIT STATUS", EXIT),
        "EXAMPLES": "\n.Pp\n".join(filter(None, [examples(command.epilog or ""), own.get("EXAMPLES", "")])),
        "SEE ALSO": see_also() if command is GROUP else own.get("SEE ALSO", ".Xr pqcache 1"),
    }
    return header(name, 1) + "".join(f".Sh {title}\n{text}\n" for title, text in sections.items() if text)


def sections_of(part: Path) -> dict[str, str]:
    """Return the sections of a part by their titles; none if there is no such file."""
    pieces = re.split(r"^\.Sh (.*)\n", part.read_text(), flags=re.MULTILINE)[1:] if part.exists() else []
    return {title: text.rstrip("\n") for title, text in zip(pieces[::2], pieces[1::2], strict=True)}


def synopsis(words: str, command: Any) -> str:
    """Return a synopsis from the command's arguments."""
    lines = [f".Nm {words}", ".Op Ar option ..."]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or parameter.name).lower()
            lines.append(f".Ar {name}" if parameter.required else f".Op Ar {name}")
    return "\n".join(lines)


def command_list() -> str:
    """Return the commands, each with what it is for."""
    items = [f".It Xr pqcache-{name} 1\n{mdoc(first_line(command))}" for name, command in GROUP.commands.items()]
    return "\n".join([".Bl -tag -width repartition", *items, ".El"])


def see_also() -> str:
    """Return references to all other pages."""
    return " ,\n".join([*(f".Xr pqcache-{name} 1" for name in sorted(GROUP.commands)), ".Xr pqcache.toml 5"])


def options(command: Any, own: str) -> str:
    """Return the options in their groups, each with what its help says and what the part adds."""
    before, *details = re.split(r"^\.It Fl -(\S+)\n", own.partition("\n.El")[0] + "\n", flags=re.MULTILINE)
    more = dict(zip(details[::2], (text.strip("\n") for text in details[1::2]), strict=True))
    lines = [before.strip("\n")] if before.strip() else []
    found = option_groups(command)
    for title, items in found.items():
        lines += [f".Ss {title}"] if len(found) > 1 else []
        lines.append(".Bl -tag -width Ds")
        for item in items:
            name = next(name for name in item.names if name.startswith("--")).removeprefix("--")
            lines += [f".It {names(item)}", mdoc(item.text), *([text] if (text := more.pop(name, "")) else [])]
        lines.append(".El")
    if more:
        raise SystemExit(f"man/parts: {command.name} has no option {', '.join(more)}")
    after = own.partition("\n.El")[2].strip("\n")
    return "\n".join([*lines, *([after] if after else [])])


def names(item: OptionHelp) -> str:
    """Return an option's names and what follows them, as macros."""
    text = " , ".join(f"Fl {escaped(name[1:])}" for name in item.names)
    return text + "".join(f" Ar {escaped(word)}" for word in item.metavar.split())


def examples(epilog: str) -> str:
    """Return a help's examples."""
    lines = []
    for piece in re.split(r"^# ", epilog, flags=re.MULTILINE)[1:]:
        purpose, _, commands = piece.rstrip("\n").partition("\n")
        lines += [".Pp"] if lines else []
        lines += [mdoc(purpose.rstrip(".?") + ("?" if purpose.endswith("?") else ":"))]
        lines += [".Bd -literal -offset indent", *map(escaped, commands.splitlines()), ".Ed"]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return plain text so that roff takes it as it is."""
    text = text.replace("\\", "\\e")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def mdoc(text: str) -> str:
    """Return plain text as mdoc: a line for each sentence, names of options as macros."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines += [".Pp"] if lines else []
        for sentence in re.split(r"(?<=[.?:]) +(?=[A-Z0-9'])", " ".join(paragraph.split())):
            for piece in re.split(r"(?<!\S)(--[a-z][a-z-]*[.,:;)]*)(?= |$)", sentence):
                option = re.fullmatch(r"-(-[a-z-]+)(.*)", piece)
                if option:
                    lines.append(f".Fl {option[1]}" + (f" {option[2]}" if option[2] else ""))
                elif piece.strip():
                    lines += map(escaped, textwrap.wrap(piece.strip(), 78, break_on_hyphens=False))
    return "\n".join(lines)


def main() -> int:
    """Write the pages, or name those that differ."""
    check, different, wanted = "--check" in sys.argv, [], files()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            different.append(path)
            if not check:
                path.write_text(text)
    for stray in sorted({*MAN.glob("man?/*"), *WEB.glob("*.md")} - set(wanted)):
        different.append(stray)
        if not check:
            stray.unlink()
    if different:
        shown = ", ".join(path.relative_to(ROOT).as_posix() for path in different)
        print(f"{'not as they would be written' if check else 'written'}: {shown}")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
