"""Tables under `docs/benchmarks/`: a title, the meaning of the columns, the command and versions, and the rows.

A table is written again with every new row, so that an interrupted run leaves its rows.
"""

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardplan.common.tables import markdown_table, text_table

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def made_with() -> str:
    """The versions that a table was made with, and the day."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("shardplan", "jax", "jaxlib", "ortools"))
    return f"{packages}, Python {platform.python_version()}; {date.today().isoformat()}"


@dataclass(slots=True)
class Document:
    """A document of one or several tables. `command` is the module that writes it."""

    name: str
    title: str
    introduction: str
    command: str
    writes: bool = True
    tables: list["Table"] = field(default_factory=list)

    def table(self, header: Sequence[str], title: str = "") -> "Table":
        """A new, empty table."""
        self.tables.append(Table(self, title, tuple(header)))
        return self.tables[-1]

    def write(self) -> None:
        """Writes the document in its present state, unless it is only printed."""
        if not self.writes:
            return
        parts = [f"# {self.title}", self.introduction, f"`python -m benchmarks.{self.command}`; {made_with()}."]
        for table in self.tables:
            parts += [f"## {table.title}"] if table.title else []
            parts += [markdown_table(table.header, table.rows), *table.notes]
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{self.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    def print(self) -> None:
        for table in self.tables:
            title = [table.title] if table.title else []
            print("\n".join((*title, text_table(table.header, table.rows), *table.notes)), end="\n\n", flush=True)


@dataclass(slots=True)
class Table:
    """A header, rows in the order of their arrival, and sentences below."""

    document: Document
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: Sequence[str]) -> None:
        self.rows.append(tuple(row))
        self.document.write()

    def say(self, notes: Iterable[str]) -> None:
        """Replaces the sentences below the table."""
        self.notes = list(notes)
        self.document.write()


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress line on the error stream."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        yield shown
