"""GLOSSARY.md: every link leads to a notebook that exists and to a section of it that mentions the term."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\*\*.+?) \| .+ \| (.+) \|$", TEXT, re.MULTILINE)
TERMS = [(re.findall(r"\*\*(.+?)\*\*", name), links) for name, links in ROWS]


def sections(path: Path) -> dict[str, str]:
    """Everything under each numbered heading, code included; "" holds the whole notebook."""
    text = "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    parts = re.split(r"^## (\d+)\. ", text, flags=re.MULTILINE)
    return {"": text} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_terms_are_unique_and_sorted_out():
    names = [name for names, _ in TERMS for name in names]
    assert len(names) == len(set(names))
    assert len(TERMS) > 40


@pytest.mark.parametrize(("names", "links"), TERMS, ids=[names[0] for names, _ in TERMS])
def test_each_link_leads_to_a_section_that_mentions_the_term(names, links):
    found = re.findall(r"\[(\w+)(?:, (\d+))?\]\((.+?)\)", links)
    assert found
    for label, number, target in found:
        path = ROOT / target
        assert path.is_file(), target
        assert label == "deeper" or path.name.startswith(label), (label, target)
        text = sections(path)[number].lower()
        # The stem of its last word: "flush" is also "flushed", "saturate" also "saturation".
        assert any(name.lower().split()[-1][:7].rstrip("e") in text for name in names), (
            f"{target}, section {number}, of {names}"
        )
