"""The documents keep their sentences short, and docstrings name their subjects.

A sentence is measured as a reader sees it: without links' targets, code blocks, tables and
generated parts. Code in backticks counts as one word.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parent.parent

#: The pages of the site that lie in ``docs/``.
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))

#: Document -> the most words that its sentences may have on average. Lower them, never raise them.
AVERAGES = {
    "CONTRIBUTING.md": 13,
    "README.md": 13,
    "benchmarks/README.md": 15,
    "integrations/FAULTS.md": 14,
    "integrations/KV_CANARY.md": 13,
    "integrations/SGLANG.md": 13,
    **dict.fromkeys(PAGES, 13),
}

#: The most words of one sentence.
LONGEST = 30

#: Folders whose docstrings name the object and not a stand-in for it.
FOLDERS = (
    *("backends/attention", "backends/gated_delta", "backends/mamba2", "backends/move_rows"),
    *("benchmarks", "integrations/vllm_plugin/policy", "kvtxn/testing"),
)

#: Words that stand for an object without naming it.
VAGUE = re.compile(r"\b(those that|what is told|(is|are|was|were) told|nobody's|likewise)\b", re.I)

#: Parts of a document that are no sentences of its author's.
NO_PROSE = (
    re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL),
    re.compile(r"<!-- ([\w.-]+) -->.*?<!-- /\1 -->", re.DOTALL),
    re.compile(r"^ *\|.*$", re.MULTILINE),
    re.compile(r"^#+ .*$", re.MULTILINE),
)


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text, each on one line."""
    for pattern in NO_PROSE:
        text = pattern.sub("\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    ends = re.compile(r"(?<=[.!?:])[)\"*_]* +(?=[A-Z`*(\"\[]|vLLM|kvtxn|numba)")
    return [line for part in paragraphs for line in ends.split(part) if length(line)]


def length(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(re.findall(r"[\w`][\w`.,'/-]*", sentence))


@pytest.mark.parametrize("document", AVERAGES)
def test_no_sentence_is_long(document):
    """No sentence has more than ``LONGEST`` words."""
    text = (ROOT / document).read_text()
    long = [line for line in sentences(text) if length(line) > LONGEST]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("document", AVERAGES)
def test_sentences_are_short_on_average(document):
    """The mean number of words is within the bound of the document."""
    assert mean(map(length, sentences((ROOT / document).read_text()))) <= AVERAGES[document]


def test_a_long_sentence_is_noticed():
    """Code, tables and generated parts are left out; what remains is measured."""
    text = "One two.\n\n```\n# a b c\n```\n| a b |\n\n<!-- x -->\nA b c d.\n<!-- /x -->\n"
    text += f"\n- {'word ' * 31}end. [Two words](link.md)."
    assert list(map(length, sentences(text))) == [2, 32, 2]


@pytest.mark.parametrize("document", AVERAGES)
def test_documents_name_the_object(document):
    """No prose of a document has a word of ``VAGUE``."""
    prose = sentences((ROOT / document).read_text())
    assert not [line for line in prose if VAGUE.search(line)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_name_the_object(folder):
    """No docstring of a folder has a word of ``VAGUE``."""
    vague = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstring = " ".join((ast.get_docstring(node) or "").split())
                vague += [f"{path}: {word[0]}" for word in VAGUE.finditer(docstring)]
    assert not vague, "\n".join(vague)
