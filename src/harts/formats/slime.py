"""slime's samples as JSON: `tokens` of prompt and response, and `response_length`.

Field names as in THUDM/slime, slime/utils/types.py (Sample): tokens; response_length, how many of them at the end are
the response; loss_mask and rollout_log_probs, one a token of the response; reward, a number or an object of them;
group_index; remove_sample, which takes the sample out of the loss. Without loss_mask the whole response is trained.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from harts.formats.padded import per_token, zero_one
from harts.formats.rows import Row, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

READ = frozenset({"tokens", "response_length", "loss_mask", "rollout_log_probs", "remove_sample", "advantages"})
CHOICES = (("group", "group_index"),)


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return row.get("tokens") is not None and row.get("response_length") is not None


def trajectories(row: Row) -> Iterator[Trajectory]:
    """The row's one trajectory."""
    row.refuse_unknown_masks(("loss_mask",))
    tokens = ids_of(row, "tokens", row.require("tokens"))
    length = row.require("response_length")
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length <= len(tokens):
        expected = f"a whole number from 0 to the {len(tokens)} tokens"
        raise row.error("response_length", expected, repr(length), "count the tokens of the response")
    if isinstance(row.get("reward"), Mapping):
        keys = ", ".join(map(str, row.fields["reward"]))
        raise row.error("reward", "a number", f"an object of {keys}", "put the one that slime's reward_key names there")
    length, name = int(length), row.text("id", row.id)
    trained = zero_one(row, "loss_mask", length, what="response")
    if row.get("remove_sample"):
        trained = np.zeros(length, np.bool_)
    values = {}
    if row.get("rollout_log_probs") is not None:
        values["logprobs"] = ("rollout_log_probs", per_token(row, "rollout_log_probs", length, what="response"))
    start = len(tokens) - length
    yield respond(
        row,
        id=name,
        group=row.text("group", row.text("group_index", name)),
        prompt=tokens[:start],
        response=tokens[start:],
        mask=("loss_mask", trained),
        values=values,
        advantages=row.get("advantages"),
        **common_fields(row),
    )
