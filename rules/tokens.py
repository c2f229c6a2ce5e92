"""Tokens of the text notations, and errors that mark a place in the text."""

import re
from dataclasses import dataclass
from typing import NoReturn

from shardplan.rules.errors import RuleError

_TOKEN = re.compile(r"\s*(?:(->|\.\.\.|//|<=|>=|==|!=|[A-Za-z_][A-Za-z_0-9]*|\d+\.\d+|\d+|[^\sA-Za-z_0-9]))")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text and where it starts."""

    text: str
    start: int


def tokens(text: str) -> list[Token]:
    """The tokens of ``text``: names, numbers, operators."""
    return [Token(match.group(1), match.start(1)) for match in _TOKEN.finditer(text)]


def fail(text: str, place: Token | None, problem: str) -> NoReturn:
    """Raise an error that quotes the text and marks the place (the end of the text if there is none)."""
    start, length = (place.start, len(place.text)) if place else (len(text.rstrip()), 1)
    raise RuleError(f"{problem}\n    {text}\n    {' ' * start}{'^' * length}")
