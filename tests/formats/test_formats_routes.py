"""Recorded expert routes in files and in memory."""

from pathlib import Path

import numpy as np
import pytest

from harts.formats import from_lists, read, write
from harts.trajectory import Trajectory

ROUTES = np.array([[[0, 2], [1, 3]], [[2, 3], [0, 1]], [[-1, -1], [-1, -1]]], np.int16)
ROW = {"group": "g", "id": "a", "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def same(trajectory: Trajectory) -> bool:
    routes = trajectory.routes
    return routes is not None and routes.dtype == np.int16 and np.array_equal(routes, ROUTES)


def test_routes_are_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write(path, [Trajectory(**ROW, routes=ROUTES)])  # type: ignore[arg-type]
    assert '"routes":[[[0,2],[1,3]],[[2,3],[0,1]],null]' in path.read_text()
    (trajectory,) = read(path)
    assert same(trajectory)


def test_order_of_experts_does_not_matter_and_null_is_no_record() -> None:
    (trajectory,) = read([{**ROW, "routes": [[[2, 0], [3, 1]], [[3, 2], [1, 0]], None]}])
    assert same(trajectory)
    (trajectory,) = read([{**ROW, "routes": [None, None, None]}])
    assert trajectory.routes is None
    (trajectory,) = from_lists([[5, 6, 7]], [[0, 1, 1]], routes=[ROUTES])
    assert same(trajectory)


BAD = [
    (ROUTES[:2], r"shape \[3, layers, experts per token\], got shape \[2, 2, 2\]"),
    (ROUTES[:, 0], r"got shape \[3, 2\]"),
    (ROUTES.astype(float), "integers, got values of type float64"),
    (np.where(ROUTES == 2, 0, ROUTES), "distinct experts .* an expert twice at position 0, layer 0"),
    (np.where(ROUTES == 2, -1, ROUTES), r"-1 in all where none is recorded, got .*-1.* at position 0, layer 0"),
    (ROUTES.astype(int) * 20_000, "a larger one at position 0, layer 0"),
]


@pytest.mark.parametrize(("routes", "message"), BAD)
def test_bad_routes_name_trajectory_and_place(routes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=rf"trajectory 'a', field routes: expected .*{message}"):
        Trajectory(**ROW, routes=routes)  # type: ignore[arg-type]


def test_ragged_routes_in_a_file_name_the_place() -> None:
    with pytest.raises(ValueError, match="row 1: trajectory 'a', field routes: expected numbers, got a ragged"):
        read([{**ROW, "routes": [[[0, 1]], [[0, 1], [2, 3]], None]}])
