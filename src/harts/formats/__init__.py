"""Files and other people's field names to `Trajectory`.

`read` takes JSON Lines or Parquet and rows in memory; `from_lists` and `from_padded` take arrays. One module a source:
harts (our own schema), chat, claude_code, codex, inspect_ai, vllm, sglang, verifiers, trl, verl, slime, atropos, rllm.
docs/data.md has the schema and every mapping.
"""

from harts.formats.checks import check_vocabulary
from harts.formats.memory import from_lists, from_padded
from harts.formats.reading import Format, iter_trajectories, read
from harts.formats.writing import write

__all__ = [
    "Format",
    "check_vocabulary",
    "from_lists",
    "from_padded",
    "iter_trajectories",
    "read",
    "write",
]
