"""Lists what breaks a rule on the size or the names of code: python tools/house.py [PATH...]

Two classes of one name (`_X` and `X` are one name), modules of more than 400 lines, functions of 50 lines and more
below their docstring, functions with 8 parameters and more, and dataclasses of more than four fields that take
positional arguments. Public entry points may have as many parameters as users need.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODULE_LINES, FUNCTION_LINES, PARAMETERS, FIELDS = 400, 49, 7, 4  # the most there may be
COMMANDS = "pqcache/console/commands.py"  # the command line's options are the parameters of its functions
ENTRY_POINTS = {
    "sync", "repartition", "inspect", "verify", "bench", "Cache.batches", "ParquetDataset.__init__",
    "Mix.__init__", "Loader.__init__", "rows",
}  # fmt: skip


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Yield every class and function with its name, a method's with that of its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node
            yield from definitions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield inside + node.name, node
            yield from definitions(node)
        else:
            yield from definitions(node, inside)


def in_function(path: str, name: str, node: ast.FunctionDef) -> Iterator[str]:
    """Yield what is wrong with a function."""
    first = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = (node.end_lineno or 0) - first[0].lineno + 1 if first else 0
    if lines > FUNCTION_LINES:
        yield f"{path}:{node.lineno}: {name} has {lines} lines"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = sum(argument.arg not in ("self", "cls") for argument in arguments)
    if count > PARAMETERS and path != COMMANDS and name not in ENTRY_POINTS:
        yield f"{path}:{node.lineno}: {name} has {count} parameters"


def in_class(path: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield what is wrong with a class."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list if "dataclass" in ast.unparse(decorator)]
    annotated = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    fields = [item for item in annotated if "ClassVar" not in ast.unparse(item.annotation)]
    if decorators and len(fields) > FIELDS and "kw_only=True" not in decorators[0]:
        yield f"{path}:{node.lineno}: the dataclass {node.name} has {len(fields)} fields and is not kw_only"


def found(paths: list[Path]) -> list[str]:
    """Return a line for each rule that is broken in these modules."""
    lines: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for file in paths:
        text = file.read_text(encoding="utf-8")
        path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
        if (count := len(text.splitlines())) > MODULE_LINES:
            lines.append(f"{path}: has {count} lines")
        for name, node in definitions(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
                lines += in_class(path, node)
            else:
                lines += in_function(path, name, node)
    return lines + [f"{', '.join(places)}: classes named {name}" for name, places in classes.items() if places[1:]]


def main() -> int:
    """Print what is found in the paths that are named, or in the package; return whether there is anything."""
    roots = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / "pqcache"]
    paths = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    lines = found(paths)
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
