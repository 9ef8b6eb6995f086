"""What messages say: one wording for what was wrong, in every module."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "harts"
MODULES = sorted(PACKAGE.rglob("*.py"))


def texts_of(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and text of every string of a module that is no documentation."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(node.lineno, str(node.value)) for node in strings if id(node) not in said]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_say_got(path: Path) -> None:
    found = [(line, text) for line, text in texts_of(ast.parse(path.read_text())) if re.search(r"\bcame\b", text)]
    assert not found, "write: expected ..., got ...; what to do"


def test_the_search_sees_messages_and_not_documentation() -> None:
    source = '"""A signal got."""\ndef f(x):\n    """It got."""\n    raise ValueError(f"expected 1, got {x}")\n'
    assert [line for line, text in texts_of(ast.parse(source)) if "got" in text] == [4]
