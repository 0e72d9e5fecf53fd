"""Regular expressions of JSON Schemas that need look-around, which the grammar library has not: known ones,
as common generators write them, said without it."""

from __future__ import annotations

import re

_LOCAL = r"[A-Za-z0-9_'+\-]"
_TIME = r"T(?:\d+H(?:\d+M)?(?:{s})?|\d+M(?:{s})?|{s})".format(s=r"\d+(?:[.,]\d+)?S")
_KNOWN = {
    # zod 4, z.email(): no dot at the beginning, and no two in a row.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^(?:{_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
    # zod 3, by zod-to-json-schema.
    r"^(?!\.)(?!.*\.\.)([A-Z0-9_'+\-\.]*)[A-Z0-9_+-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$": (
        r"^(?:[A-Z0-9_'+\-]+\.)*[A-Z0-9_'+\-]*[A-Z0-9_+\-]@(?:[A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$"
    ),
    # zod 4, z.iso.duration().
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
    ),
}
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
"""Begins pydantic's pattern of a Decimal (2.12): not without a digit."""
_PLACES = re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(\d+)\}0\*)\$")
_DIGITS = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<most>\d+)\}0\*\$\)"
    r"\\d(?:\*|\{0,(?P=whole)\})\\\.\\d(?:\*|\{0,(?P<places>\d+)\})0\*\$\)"
)
_MOST_DIGITS = 64
"""Most digits of a Decimal: the pattern grows with them."""
_ESCAPE = re.compile(r"\\k<|\\.", re.DOTALL)
_CLASS = re.compile(r"\[[^\]]*\]")
_AROUND = re.compile(r"\(\?<?[=!]")


def without_look_around(pattern: str) -> str | None:
    """A pattern for the same texts; None: it needs look-around or a back-reference, and is not known. Where
    pydantic does not anchor a Decimal's pattern at its end, the one that comes back is of whole Decimals."""
    escapes = _ESCAPE.findall(pattern)
    if not _AROUND.search(_CLASS.sub("", _ESCAPE.sub("", pattern))):
        back = any(each == r"\k<" or each[1:] in "123456789" for each in escapes)
        return None if back else pattern
    if pattern.startswith(_DECIMAL):
        return _decimal(pattern.removeprefix(_DECIMAL))
    return _KNOWN.get(pattern)


def _decimal(rest: str) -> str | None:
    if found := _PLACES.fullmatch(rest):
        return _number(r"\d+", r"\d*", r"\d+") if found[1] is None else _fixed(r"\d+", int(found[1]))
    found = _DIGITS.fullmatch(rest)
    most = int(found["most"]) - 1 if found else 0
    if found is None or most > _MOST_DIGITS:
        return None
    if found["places"] is not None:
        whole = int(found["whole"])
        return _fixed(rf"0*\d{{1,{whole}}}" if whole else "0+", min(int(found["places"]), most))
    parts = [rf"0*\d{{1,{most}}}", rf"0*\.\d{{1,{most}}}0*"]
    parts += [rf"0*\d{{{count}}}\.\d{{0,{most - count}}}0*" for count in range(1, most + 1)]
    return rf"^[+-]?(?:{'|'.join(parts)})$"


def _fixed(whole: str, places: int) -> str:
    if not places:
        return _number(whole, "0*", "0+")
    return _number(whole, rf"\d{{0,{places}}}0*", rf"\d{{1,{places}}}0*")


def _number(whole: str, fraction: str, alone: str) -> str:
    return rf"^[+-]?(?:{whole}(?:\.{fraction})?|0*\.{alone})$"
