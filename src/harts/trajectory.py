"""The input contract: one trajectory of token ids, checked at the door.

Everything behind this module may rely on what `Trajectory` guarantees; every reader in `harts.formats` ends here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Trajectory"]

_MAX_TOKEN_ID = 2**31 - 1
_MAX_EXPERT = 2**15 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One sequence of tokens, which of them are trained, and what a loss needs.

    Attributes:
        token_ids: int32 [L], L >= 1, each in [0, 2**31). Any integer sequence is taken.
        loss_mask: bool [L]; True where the token is trained. 0/1 integers are taken. The first token has nothing
            before it that could predict it, so it cannot be trained.
        group: name of the task or prompt; trajectories of one group are samples of the same start.
        id: name of the trajectory, used in messages and outputs.
        logprobs: float64 [L] or None: log-probability (nats) of each token under the policy that sampled it.
            Values where `loss_mask` is False are ignored, but must be finite.
        ref_logprobs: float64 [L] or None: the same under a reference policy.
        advantages: float64 [L] or None; a single number stands for all tokens.
        reward: a finite number or None.
        temperature: sampling temperature, finite and > 0; logits are divided by it.
        merge_keys: int64 [L] or None: tokens of two trajectories merge only where these agree too (an adapter id, the
            id of an image). None merges with all zeros.
        routes: int16 [L, Y, K] or None: for each token and each of the model's Y mixture-of-experts layers the K
            distinct experts that the sampler ran (kept in ascending order); -1 in all K where it recorded none (the
            last token never ran). They are forced in training, and tokens merge only where they agree.
        meta: anything else worth keeping; never read by HARTS.

    Raises:
        ValueError: a field is missing, of another length, out of range or not finite. The message names the
            trajectory and the field.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    group: str = ""
    id: str = ""
    logprobs: NDArray[np.float64] | None = None
    ref_logprobs: NDArray[np.float64] | None = None
    advantages: NDArray[np.float64] | None = None
    reward: float | None = None
    temperature: float = 1.0
    merge_keys: NDArray[np.int64] | None = None
    routes: NDArray[np.int16] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("group", "id"):
            if not isinstance(getattr(self, name), str):
                raise self._error(name, "a string", f"{getattr(self, name)!r}", "convert it with str()")
        tokens = self._integers("token_ids", self.token_ids)
        if tokens.size == 0:
            raise self._error("token_ids", "at least one token", "none", "leave empty trajectories out")
        if tokens.min() < 0 or tokens.max() > _MAX_TOKEN_ID:
            at = int(np.argmax((tokens < 0) | (tokens > _MAX_TOKEN_ID)))
            raise self._error("token_ids", "ids in [0, 2**31)", f"{tokens[at]} at position {at}", "remove padding ids")
        mask = self._loss_mask(len(tokens))
        self._set("token_ids", tokens.astype(np.int32, copy=False))
        self._set("loss_mask", mask)
        for name in ("logprobs", "ref_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, self._floats(name, getattr(self, name), len(tokens)))
        if self.advantages is not None:
            advantages = self._numeric("advantages", self.advantages)
            if advantages.ndim == 0:
                advantages = np.full(len(tokens), advantages)
            self._set("advantages", self._floats("advantages", advantages, len(tokens)))
        if self.merge_keys is not None:
            keys = self._integers("merge_keys", self.merge_keys)
            self._check_length("merge_keys", keys, len(tokens))
            self._set("merge_keys", keys)
        if self.routes is not None:
            self._set("routes", self._routes(len(tokens)))
        if self.reward is not None:
            self._set("reward", self._number("reward", self.reward))
        temperature = self._number("temperature", self.temperature)
        if temperature <= 0:
            raise self._error(
                "temperature", "a number > 0", f"{temperature:g}", "greedy rollouts are scored at temperature 1"
            )
        self._set("temperature", temperature)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def name(self) -> str:
        """What messages call this trajectory: its id, else its group."""
        return repr(self.id) if self.id else (f"of group {self.group!r}" if self.group else "(unnamed)")

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    # -- checks -------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value = value.copy()  # what was checked must not change under us; a read-only array is taken as it is
            value.flags.writeable = False
        object.__setattr__(self, name, value)

    def _error(self, name: str, expected: str, got: str, action: str) -> ValueError:
        return ValueError(f"trajectory {self.name}, field {name}: expected {expected}, got {got}; {action}")

    def _numeric(self, name: str, value: ArrayLike) -> NDArray[Any]:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise self._error(name, "numbers", "a ragged sequence", "pass one flat list") from error
        except (TypeError, RuntimeError) as error:  # a torch tensor in bf16, on a GPU or with a graph
            got = f"something numpy cannot read ({error})"
            raise self._error(name, "numbers", got, "pass tensor.detach().float().cpu()") from error
        if array.dtype.kind not in "iufb":
            kind = f"values of type {array.dtype}"
            if array.dtype.kind == "O":
                kind = "null among them" if None in array.ravel().tolist() else "values that are no machine numbers"
            raise self._error(name, "numbers", kind, "pass plain numbers")
        return array

    def _check_length(self, name: str, array: NDArray[Any], length: int) -> None:
        if array.shape != (length,):
            got = f"shape {list(array.shape)}" if array.ndim != 1 else f"{array.size} values"
            raise self._error(name, f"one value per token ({length})", got, "give every token its value")

    def _integers(self, name: str, value: ArrayLike) -> NDArray[np.int64]:
        array = self._numeric(name, value) if not _is_empty(value) else np.zeros(0, np.int64)
        if array.ndim != 1:
            raise self._error(name, "a flat list", f"shape {list(array.shape)}", "pass one trajectory at a time")
        if array.dtype.kind not in "iu":
            raise self._error(name, "integers", f"values of type {array.dtype}", "convert them before")
        if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise self._error(name, "integers below 2**63", str(array.max()), "use smaller keys")
        return array.astype(np.int64, copy=False) if name != "token_ids" else array

    def _floats(self, name: str, value: ArrayLike, length: int) -> NDArray[np.float64]:
        array = self._numeric(name, value).astype(np.float64)
        self._check_length(name, array, length)
        if not np.isfinite(array).all():
            at = int(np.argmin(np.isfinite(array)))
            raise self._error(
                name, "finite numbers", f"{array[at]} at position {at}", "set untrained positions to 0, drop bad rows"
            )
        return array

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise self._error(name, "a number", repr(value), "pass one number per trajectory")
        if not np.isfinite(value):
            raise self._error(name, "a finite number", str(value), "fix or leave out this trajectory")
        return float(value)

    def _routes(self, length: int) -> NDArray[np.int16]:
        routes = self._numeric("routes", self.routes)  # type: ignore[arg-type]
        if routes.ndim != 3 or routes.shape[0] != length or 0 in routes.shape:
            got = f"shape {list(routes.shape)}"
            raise self._error("routes", f"shape [{length}, layers, experts per token]", got, "give every token its own")
        if routes.dtype.kind not in "iu":
            raise self._error("routes", "integers", f"values of type {routes.dtype}", "convert them before")
        ordered = np.sort(routes, axis=-1)
        recorded = ordered[..., 0] >= 0
        missing = (ordered == -1).all(-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & recorded
        for bad, got in ((ordered[..., -1] > _MAX_EXPERT, "a larger one"), (repeated, "an expert twice")):
            if bad.any():
                token, layer = np.argwhere(bad)[0].tolist()
                expected = f"distinct experts in [0, {_MAX_EXPERT}]"
                raise self._error("routes", expected, f"{got} at position {token}, layer {layer}", "check the recorder")
        if not (recorded | missing).all():
            token, layer = np.argwhere(~(recorded | missing))[0].tolist()
            got = f"{routes[token, layer].tolist()} at position {token}, layer {layer}"
            raise self._error(
                "routes", "experts >= 0, or -1 in all where none is recorded", got, "set all of them to -1"
            )
        return ordered.astype(np.int16, copy=False)

    def _loss_mask(self, length: int) -> NDArray[np.bool_]:
        mask = self._numeric("loss_mask", self.loss_mask)
        self._check_length("loss_mask", mask, length)
        if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
            bad = mask[~np.isin(mask, (0, 1))][0]
            raise self._error("loss_mask", "0/1 or booleans", str(bad), "use advantages for weights")
        mask = mask.astype(np.bool_)
        if mask[0]:
            raise self._error(
                "loss_mask", "False for the first token", "True", "nothing before it predicts it: unset it"
            )
        return mask


def _is_empty(value: ArrayLike) -> bool:
    return isinstance(value, Sequence) and len(value) == 0
