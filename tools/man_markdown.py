"""Manual pages as Markdown, for docs/commands/: what tools/man.py writes as mdoc, for reading on the web.

It knows the macros that the pages use, and refuses others by name. ``.Dq TITLE`` becomes a link to that page of docs/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CODE = {"Fl", "Cm", "Li", "Ev", "Pa", "Ar", "Ql"}  # macros whose words are code
CALLABLE = CODE | {"No", "Ns", "Em", "Xr", "Op", "Pq", "Sq", "Dq", "Nm"}
DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLES = {page.read_text().partition("\n")[0].removeprefix("# "): page.name for page in sorted(DOCS.glob("*.md"))}
ENCLOSING = {"Op": "[]", "Pq": "()", "Sq": "''"}
SKIPPED = {"See [pqcache](README.md)."}  # sections that only say this


@dataclass
class Word:
    """A piece of a line: its text, whether it is code, whether it joins what is before it, and begins a line."""

    text: str
    code: bool = False
    joined: bool = False
    first: bool = False


def markdown(page: str) -> str:
    """Return a manual page as Markdown."""
    lines = [line for line in page.splitlines() if not line.startswith(('.\\"', ".Dd", ".Dt", ".Os"))]
    sections = re.split(r"^\.Sh (.*)\n", "\n".join(lines) + "\n", flags=re.MULTILINE)[1:]
    named = dict(zip(sections[::2], sections[1::2], strict=True))
    name, about = re.fullmatch(r"\.Nm (.*)\n\.Nd (.*)\n", named.pop("NAME")).groups()  # type: ignore[union-attr]
    title = name.replace("-", " ")
    parts = [f"# {title}", sentence(about)]
    if "SYNOPSIS" in named:
        parts.append(f"```text\n{synopsis(named.pop('SYNOPSIS'), title)}\n```")
    described = Page(title).text(named.pop("DESCRIPTION").splitlines())
    described = described.removeprefix(sentence(about)).lstrip()
    parts.append(re.sub(r"^### ", "## ", described, flags=re.MULTILINE))
    for heading, text in named.items():
        body = Page(title).text(text.splitlines())
        if body not in SKIPPED:
            parts += [f"## {heading.capitalize()}", body]
    return "\n\n".join(filter(None, parts)) + "\n"


def sentence(text: str) -> str:
    """Return text as a sentence."""
    return text[0].upper() + text[1:] + "."


def synopsis(text: str, title: str) -> str:
    """Return the forms of a command, a line for each."""
    forms: list[str] = []
    for line in text.splitlines():
        words = inline(line.removeprefix("."), title)
        piece = join(words, marked=False)
        if line.startswith(".Nm") or not forms:
            forms.append(piece)
        else:
            forms[-1] += f" {piece}"
    return "\n".join(forms)


class Page:
    """The body of a section, line by line."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.blocks: list[str] = []  # paragraphs, lists and code, complete
        self.words: list[Word] = []  # of the paragraph that is not complete

    def text(self, lines: list[str]) -> str:
        """Return the lines as Markdown."""
        rest = iter(lines)
        for line in rest:
            if line == ".Pp":
                self.flush()
            elif line.startswith(".Ss "):
                self.flush()
                self.blocks.append(f"### {line[4:]}")
            elif line.startswith(".Bd"):
                self.flush()
                code = []
                while (inner := next(rest)) != ".Ed":
                    code.append(plain(inner))
                kind = "sh of help" if any("pqcache " in piece for piece in code) else "text"
                self.blocks.append(f"```{kind}\n" + "\n".join(code) + "\n```")
            elif line.startswith(".Bl"):
                self.flush()
                self.blocks.append(self.items(collected(rest)))
            elif line.startswith("."):
                words = inline(line[1:], self.title)
                words[0].first = True
                self.words += words
            else:
                self.words.append(Word(marked_up(plain(line))))
        self.flush()
        return "\n\n".join(self.blocks)

    def items(self, lines: list[str]) -> str:
        """Return a list: of each item its term and its text."""
        items: list[tuple[str, list[str]]] = []
        depth = 0
        for line in lines:
            depth += line.startswith(".Bl") - line.startswith(".El")
            if line.startswith(".It") and depth == 0:
                term = line[4:]
                words = inline(term, self.title) if term.split()[0] in CALLABLE else [Word(f"**{plain(term)}**")]
                items.append((join(words), []))
            else:
                items[-1][1].append(line)
        found = []
        for term, body in items:
            text = Page(self.title).text(body).replace("\n", "\n  ").replace("\n  \n", "\n\n")
            found.append(f"- {term}: {text}" if text else f"- {term}")
        return "\n".join(found)

    def flush(self) -> None:
        """Complete a paragraph."""
        if self.words:
            self.blocks.append(join(self.words))
        self.words = []


def collected(rest: object) -> list[str]:
    """Return the lines up to the end of a list, without that."""
    depth, lines = 1, []
    for line in rest:  # type: ignore[attr-defined]
        depth += line.startswith(".Bl") - line.startswith(".El")
        if depth == 0:
            break
        lines.append(line)
    return lines


def inline(line: str, title: str) -> list[Word]:
    """Return the words of a line of macros."""
    name, *arguments = line.split()
    if name not in CALLABLE:
        raise SystemExit(f"tools/man_markdown.py: the macro {name} is not known: .{line}")
    if name in ENCLOSING:
        closing: list[str] = []
        while arguments and re.fullmatch(r"[.,:;)]", arguments[-1]):
            closing.insert(0, arguments.pop())
        inner = inline(" ".join(arguments if arguments[0] in CALLABLE else ["No", *arguments]), title)
        opening, end = ENCLOSING[name]
        inner[0].joined = True
        return [Word(opening), *inner, Word(end, joined=True), *[Word(text, joined=True) for text in closing]]
    if name == "Dq":
        wanted, end = re.fullmatch(r"(.*?)(?: ([.,:;]))?", " ".join(arguments)).groups("")  # type: ignore[union-attr]
        if wanted not in TITLES:
            raise SystemExit(f"tools/man_markdown.py: docs/ has no page {wanted!r}")
        return [Word(f"[{wanted}](../{TITLES[wanted]}){end}")]
    if name == "Xr":
        page, section, *more = arguments
        return [Word(reference(page, section)), *[Word(text, joined=True) for text in more]]
    if name == "Nm" and not arguments:
        arguments = [title]
    return styled(name, arguments, title)


def styled(name: str, arguments: list[str], title: str) -> list[Word]:
    """Return words in the style of a macro, and of those that follow on its line."""
    words: list[Word] = []
    joined = False
    for number, text in enumerate(arguments):
        if text == "Ns":
            joined = True
        elif text in ENCLOSING or text in ("Xr", "Dq"):
            return [*words, *inline(" ".join(arguments[number:]), title)]
        elif text in CALLABLE:
            name = text
        elif re.fullmatch(r"[.,:;)]", text):
            words.append(Word(text, joined=True))
        else:
            words.append(one_word(name, plain(text), joined))
            joined = False
    return words


def one_word(name: str, text: str, joined: bool) -> Word:
    """Return one word in the style of a macro."""
    if name == "Fl":
        text = f"-{text}"
    if name == "Ar" and not joined and re.fullmatch(r"[a-z]+", text):
        text = text.upper()
    if name == "Em":
        text = f"*{text}*"
    return Word(text if name in (*CODE, "Em") else marked_up(text), name in CODE or name == "Nm", joined)


def reference(page: str, section: str) -> str:
    """Return a link to a page of ours, or the name of another one."""
    if not page.startswith("pqcache"):
        return f"`{page}({section})`"
    target = {"pqcache": "README", "pqcache.toml": "pqcache.toml"}.get(page, page.removeprefix("pqcache-"))
    return f"[{page.replace('-', ' ')}]({target}.md)"


def join(words: list[Word], marked: bool = True) -> str:
    """Return words as text; code that is next to code of the same line is one piece of it."""
    text, code = "", False
    for word in words:
        space = "" if word.joined or not text or text.endswith("(") else " "
        if word.code and code and not word.first:
            text += space + word.text
        elif marked:
            text += ("`" if code else "") + space + ("`" if word.code else "") + word.text
        else:
            text += space + word.text
        code = word.code and marked
    return text + ("`" if code else "")


def plain(text: str) -> str:
    """Return text without roff's escapes."""
    return text.replace("\\&", "").replace("\\(dq", '"').replace("\\e", "\\")


def marked_up(text: str) -> str:
    """Return plain text so that Markdown takes it as it is."""
    return re.sub(r"([\\*_`<\[\]|])", r"\\\1", text)
