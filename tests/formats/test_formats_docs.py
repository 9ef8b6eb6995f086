"""The examples in docs/data.md are read as the page says."""

import re
from pathlib import Path

import pytest

from harts.formats import read

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_all_sources_have_an_example() -> None:
    assert len(EXAMPLES) == 12


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_is_read(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.jsonl"
    path.write_text(example)
    (one,) = read(path)
    assert one.num_trained > 0
    assert ("routed_experts" in example) == (one.routes is not None)
    assert one.logprobs is None or (one.logprobs[one.loss_mask] < 0).all()
