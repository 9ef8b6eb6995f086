"""Our own schema: token rows under the names of `Trajectory`.

Required: `group`, `id`, `token_ids`, `loss_mask`. Optional: `logprobs`, `ref_logprobs`, `advantages` (a number or one
per token), `reward`, `temperature`, `merge_keys`, `routes`; null is the same as absent. `messages`, `tools`, `meta`,
`source` and `render` may stand beside them; `meta` and `source` are kept in `Trajectory.meta`. In place of `loss_mask`
a row may have `token_mask` (the name in NousResearch/atropos dumps); where it has both, they must be equal.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harts.formats.routes import align, missing_for_nulls, read_record
from harts.formats.rows import Row, build, common_fields
from harts.trajectory import Trajectory

__all__ = ["KNOWN", "fields_of", "matches", "trajectories"]

_PER_TOKEN = ("logprobs", "ref_logprobs", "advantages", "merge_keys")
KNOWN = frozenset({"group", "id", "token_ids", "loss_mask", "reward", "temperature", "routes", *_PER_TOKEN})
KNOWN |= {"messages", "tools", "meta", "source", "render", "token_mask"}


def matches(row: Row) -> bool:
    """Whether a row has one of this schema's telling fields."""
    return any(name in row.fields for name in ("token_ids", "loss_mask", "token_mask"))


def trajectories(row: Row) -> Iterator[Trajectory]:
    """The row's one trajectory."""
    row.refuse_unknown(KNOWN)
    for name in ("group", "id"):
        row.require(name)
    mask = row.require("loss_mask", "token_mask")
    other = row.get("token_mask")
    if other is not None and not np.array_equal(mask, other):
        action = "keep the one that says which tokens are trained"
        raise row.error("token_mask", "what loss_mask says, or no token_mask", "another mask", action)
    optional = {name: row.fields[name] for name in _PER_TOKEN if row.get(name) is not None}
    yield build(
        row,
        group=row.text("group", ""),
        id=row.text("id", ""),
        token_ids=row.require("token_ids"),
        loss_mask=mask,
        routes=_routes(row),
        **optional,
        **common_fields(row),
    )


def _routes(row: Row) -> Any:
    """Recorded experts [L, layers, experts per token]; a token's null becomes -1 throughout; base64 is decoded."""
    routes = row.get("routes")
    if isinstance(routes, str | bytes | Mapping):
        return align(row, read_record(row, "routes", routes), len(row.require("token_ids")))
    return missing_for_nulls(routes)


def fields_of(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON object of a trajectory; reading it back gives the same trajectory."""
    fields: dict[str, Any] = {
        "group": trajectory.group,
        "id": trajectory.id,
        "reward": trajectory.reward,
        "temperature": trajectory.temperature,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.astype(np.int8).tolist(),
    }
    for name in _PER_TOKEN:
        values = getattr(trajectory, name)
        if values is not None:
            constant = name == "advantages" and bool((values == values[0]).all())
            fields[name] = float(values[0]) if constant else values.tolist()
    if trajectory.routes is not None:
        fields["routes"] = [token.tolist() if (token >= 0).any() else None for token in trajectory.routes]
    if trajectory.meta:
        fields["meta"] = dict(trajectory.meta)
    return fields
