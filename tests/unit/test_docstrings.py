"""Docstrings can be read without the line above them: none begins in the middle of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPENDS = re.compile(r"(Of|As|Likewise|The same|Its|Also)\b")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Those of modules, classes and functions, and those below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def dependent(code: str) -> list[int]:
    """Lines of docstrings that cannot be read by themselves."""
    found = [each for each in docstrings(ast.parse(code)) if DEPENDS.match(str(each.value).strip())]
    return [each.lineno for each in found]


def test_docstrings_can_be_read_by_themselves():
    files = [
        path for path in ROOT.glob("services/baton/**/*.py") if not path.stem.endswith(("_pb2", "_grpc"))
    ]
    assert len(files) > 400
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if "kernels" not in path.parts
        for line in dependent(path.read_text())
    ]
    assert wrong == []


def test_what_is_found():
    assert dependent('a = 1\n"""Of a page."""\nb = 2\n"""Offsets in it."""') == [2]
    assert dependent('def a():\n    """The same,\n    but longer."""') == [2]
