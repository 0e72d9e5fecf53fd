"""Links of the documentation lead somewhere: files are there, and the headings that they name. So are the
files that it names without a link."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = ("services", "tests", "benchmarks", "examples", "tools", "docker")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)", re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Without blocks of code, in which a `#` begins a comment."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, punctuation left out, a dash for each space. Of a heading
    that comes twice the first is meant."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert not list(broken(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_stand_in_tables(page):
    """Behind an empty line a row without a head is shown as text."""
    blocks = (block.split("\n") for block in prose(page).split("\n\n"))
    tables = [block for block in blocks if block[0].startswith("|")]
    assert [block[0] for block in tables if not re.fullmatch(r"\|[ :|-]+\|", "".join(block[1:2]))] == []


PACKAGES = sorted(ROOT.glob("services/baton/**/__init__.py"))
FILES = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")}


def named_files(text: str) -> list[str]:
    return re.findall(r"`([\w./-]+\.py)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    names = named_files(prose(page))
    assert [name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in FILES)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.parent.name)
def test_files_that_a_package_names_are_there(package):
    names = named_files(ast.get_docstring(ast.parse(package.read_text())) or "")
    folders = package.parent, ROOT
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_every_page_can_be_found_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        links = [(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(page))]
        left += [link for link in links if link in PAGES and link not in reached]
    assert reached >= set(ROOT.glob("docs/*.md"))


def test_broken_links_are_seen(tmp_path):
    page = tmp_path / "page.md"
    links = "[a](#one-two) [b](#three) [c](other.md)"
    page.write_text(f"# One, two\n\n{links}\n\n```\n# No heading [d](gone.md)\n```\n")
    assert list(broken(page)) == ["#three: there is no such heading", "other.md: there is no such file"]
