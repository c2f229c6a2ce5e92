"""An audit as a JUnit report, which continuous integration shows as a test."""

from __future__ import annotations

import re
from os import PathLike
from xml.etree import ElementTree

from shardplan.audits.audit import Audit
from shardplan.common.atomic_files import write_file

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(found: Audit, name: str, tolerance: float) -> str:
    """The report of one audit: a test that fails outside of its tolerance."""
    agrees = found.ok(tolerance)
    counts = {"tests": "1", "failures": str(int(not agrees)), "errors": "0"}
    suite = ElementTree.Element("testsuite", {"name": "shardplan audit", **counts})
    seconds = f"{found.compiled.compile_seconds:.3f}"
    case = ElementTree.SubElement(
        suite, "testcase", {"classname": "shardplan.audit", "name": _plain(name), "time": seconds}
    )
    if not agrees:
        message = f"compiled / predicted bytes are {found.ratio:.4f}, the tolerance is {tolerance:g}"
        ElementTree.SubElement(case, "failure", {"message": message}).text = _plain(found.details())
    ElementTree.SubElement(case, "system-out").text = _plain(str(found))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def save_junit(found: Audit, path: str | PathLike[str], name: str, tolerance: float) -> None:
    """Writes the report, atomically. Raises ArgumentError for a path that cannot be written."""
    write_file(path, junit_text(found, name, tolerance), "the report")


def _plain(text: str) -> str:
    """A text without the characters that XML has not."""
    return _NOT_IN_XML.sub("?", text)
