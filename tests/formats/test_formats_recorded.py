"""Experts recorded by vLLM, SGLang and verl become `Trajectory.routes`, in every form that they come in."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.cli.inspect import describe
from harts.formats import from_padded, read, write
from harts.trajectory import Trajectory

# Five tokens, two layers, two of 300 experts: what an engine records of a prompt of three and a response of two.
RECORD = np.array([[[1, 0], [2, 3]], [[4, 1], [0, 299]], [[0, 1], [2, 5]], [[7, 6], [1, 2]]], np.int32)
NONE = np.full((1, 2, 2), -1)
ROUTES = np.concatenate([np.sort(RECORD, -1), NONE])


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def bare(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def routes_of(row: dict[str, Any], fmt: Any = "auto") -> list[Any] | None:
    (one,) = read([row], fmt=fmt)
    if one.routes is None:
        return None
    assert one.routes.dtype == np.int16
    return list(one.routes.tolist())


def refused(row: dict[str, Any], fmt: Any, name: str, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([{"id": "x", **row}], fmt=fmt)
    assert str(caught.value).startswith("row 1: trajectory 'x")
    for part in (f"field {name}: expected ", *parts):
        assert part in str(caught.value)


# -- vLLM -------------------------------------------------------------------------------------------------------------


def vllm(record: Any, **fields: Any) -> dict[str, Any]:
    output = {"token_ids": [4, 5], "routed_experts": record}
    return {"prompt_token_ids": [1, 2, 3], "outputs": [output], **fields}


def envelope(array: np.ndarray, **more: Any) -> dict[str, Any]:
    return {"data": bare(array), "shape": list(array.shape), **more}


FORMS = {
    "array": RECORD,
    "small array": RECORD.astype(np.uint16),
    "wide array": RECORD.astype(np.uint64),
    "tensor": torch.from_numpy(RECORD),
    "lists": RECORD.tolist(),
    "npy": npy(RECORD.astype(np.uint16)),
    "envelope": envelope(RECORD),
    "envelope of two bytes": envelope(RECORD.astype(np.uint16)),
    "envelope with a dtype": envelope(RECORD.astype(np.int64), dtype="int64", start=0),
    "with the last token's": np.concatenate([RECORD, NONE]),
}


@pytest.mark.parametrize("form", FORMS)
def test_vllm_in_all_forms(form: str) -> None:
    assert routes_of(vllm(FORMS[form])) == ROUTES.tolist()


def test_vllm_choices_of_the_server_and_files(tmp_path: Path) -> None:
    choice = {"index": 0, "token_ids": [4, 5], "routed_experts": npy(RECORD.astype(np.uint16))}
    row = {"id": "chatcmpl-1", "prompt_token_ids": [1, 2, 3], "choices": [choice, {**choice, "index": 1}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    trajectories = read(tmp_path / "x.jsonl")
    write(tmp_path / "ours.jsonl", trajectories)
    for one in [*trajectories, *read(tmp_path / "ours.jsonl")]:
        assert one.routes is not None
        assert one.routes.tolist() == ROUTES.tolist()


def test_vllm_prompt_apart() -> None:
    apart = {"prompt_routed_experts": RECORD[:3].astype(np.int16).tolist()}
    assert routes_of(vllm(RECORD[3:].tolist(), **apart)) == ROUTES.tolist()
    missed = np.concatenate([np.full((2, 2, 2), -1), RECORD[2:3]])  # the prefix cache was hit
    expected = [*([[[-1, -1]] * 2] * 2), *ROUTES[2:].tolist()]
    assert routes_of(vllm(RECORD[3:].tolist(), prompt_routed_experts=missed.tolist())) == expected
    one_token = {"prompt_token_ids": [1, 2, 3, 4], "outputs": [{"token_ids": [5], "routed_experts": None}]}
    assert routes_of({**one_token, "prompt_routed_experts": RECORD}) == ROUTES.tolist()


def test_rows_taken_off_the_front_are_no_record() -> None:
    expected = [*([[[-1, -1]] * 2] * 2), *ROUTES[2:].tolist()]
    assert routes_of(vllm(RECORD[2:], routed_experts_prompt_start=2)) == expected
    assert routes_of(vllm(RECORD[2:], sampling_params={"routed_experts_prompt_start": 2})) == expected
    assert routes_of(vllm(envelope(RECORD[2:], start=2))) == expected
    assert routes_of(sglang(RECORD[2:], routed_experts_start_len=2)) == expected


def test_no_record_is_none() -> None:
    for record in (None, "", [], [None] * 5):
        assert routes_of(vllm(record)) is None
    assert routes_of(vllm([None, *RECORD[1:].tolist(), None])) == [[[-1, -1]] * 2, *ROUTES[1:].tolist()]


BAD_VLLM: list[tuple[Any, str]] = [
    (RECORD[:3], "expected 4 rows, for tokens 0 to 3 of 5 (the last one never ran), got 3 rows"),
    (np.concatenate([RECORD, RECORD]), "got 8 rows"),
    (RECORD[:, 0], "expected shape [tokens, layers, experts per token], got shape [4, 2]"),
    (RECORD.astype(float).tolist(), "expected integers, got values of type float64"),
    ([[[0, 1]], [[0, 1], [2, 3]]], "got ragged lists"),
    ("no base64!", "expected base64, got "),
    (npy(RECORD)[:40], "expected an .npy file, got a damaged one"),
    (bare(RECORD), "expected its shape in routed_experts_shape beside it, got bare numbers alone"),
    ({"bytes": "AA=="}, 'an object with "data" and "shape", got the members bytes'),
    ({"data": bare(RECORD), "shape": [5, 2, 2]}, "expected 20 numbers, for shape [5, 2, 2], got 16 numbers"),
    ({"data": bare(RECORD), "shape": [0, 2, 2]}, "got 16 numbers"),
    ({"data": bare(RECORD), "shape": [4, 4]}, "got 1 rows"),
    ({"data": bare(RECORD), "shape": "4x2x2"}, "a shape [layers, experts per token] or"),
    ({"data": bare(RECORD), "shape": [4, 0, 2]}, "a shape [layers, experts per token] or"),
    ({"data": bare(RECORD), "shape": [4, 2, 2], "dtype": "float32"}, "a dtype of uint8, int16, uint16, int32, int64"),
    ({"data": "AAAA", "shape": [2, 2]}, "whole numbers of 4 bytes (int32), got 3 bytes"),
    (envelope(RECORD, start=-1), "a first token >= 0, got -1"),
    (np.zeros_like(RECORD), "expected experts, got 0 in all places of all tokens"),
]


@pytest.mark.parametrize(("record", "message"), BAD_VLLM)
def test_bad_vllm_records(record: Any, message: str) -> None:
    refused(vllm(record), "vllm", "outputs[0].routed_experts", message)


def test_bad_prompts_apart() -> None:
    for rows in (2, 4):
        row = vllm(RECORD[3:], prompt_routed_experts=RECORD[:rows])
        refused(row, "vllm", "prompt_routed_experts", f"3 rows, one per prompt token, got {rows} rows")
    row = vllm(RECORD[3:, :1], prompt_routed_experts=RECORD[:3])
    refused(row, "vllm", "outputs[0].routed_experts", "2 layers and 2 experts per token", "got 1 and 2")
    refused(vllm(None, prompt_routed_experts=RECORD[:3]), "vllm", "prompt_routed_experts", "expected 4 rows")


def test_a_token_that_was_not_captured_is_not_taken_for_expert_0() -> None:
    hole = RECORD.copy()
    hole[1] = 0
    refused(vllm(hole), "vllm", "routes", "distinct experts", "an expert twice at position 1, layer 0")


def test_layers_without_experts_are_left_out() -> None:
    dense = np.zeros((4, 1, 2), np.int32)
    assert routes_of(vllm(np.concatenate([dense, RECORD, dense], 1))) == ROUTES.tolist()
    missed = np.concatenate([dense, RECORD, dense], 1)
    missed[:2] = -1  # the prefix cache was hit
    assert routes_of(vllm(missed)) == [*([[[-1, -1]] * 2] * 2), *ROUTES[2:].tolist()]
    assert routes_of(vllm([None, None, *missed[2:].tolist()])) == [*([[[-1, -1]] * 2] * 2), *ROUTES[2:].tolist()]
    assert routes_of(vllm(np.full_like(missed, -1))) == [[[-1, -1]] * 4] * 5
    single = RECORD[:, :, :1] * 0  # one expert a token: 0 can be one
    assert routes_of(vllm(single)) == [*([[[0], [0]]] * 4), [[-1], [-1]]]


# -- SGLang -----------------------------------------------------------------------------------------------------------


def sglang(record: np.ndarray, *, shape: Any = (2, 2), **info: Any) -> dict[str, Any]:
    info = {"id": "x", "routed_experts": bare(record), "routed_experts_shape": shape, **info}
    return {"input_ids": [1, 2, 3], "output_ids": [4, 5], "meta_info": info}


def test_sglang() -> None:
    assert routes_of(sglang(RECORD)) == ROUTES.tolist()
    assert routes_of(sglang(RECORD, shape=[4, 2, 2])) == ROUTES.tolist()
    beside = {**sglang(RECORD, shape=None), "routed_experts_shape": [2, 2]}
    assert routes_of(json.loads(json.dumps(beside))) == ROUTES.tolist()
    small = sglang(RECORD.astype(np.uint16), routed_experts_dtype="uint16")
    assert routes_of(small) == ROUTES.tolist()
    flat = sglang(RECORD)
    flat["meta_info"]["routed_experts"] = RECORD.reshape(-1)  # extract_routed_experts_from_meta_info
    assert routes_of(flat) == ROUTES.tolist()


def test_bad_sglang_records() -> None:
    name = "meta_info.routed_experts"
    refused(sglang(RECORD, shape=None), "sglang", name, "bare numbers alone", "num_hidden_layers")
    refused(sglang(RECORD[:3]), "sglang", name, "expected 4 rows", "got 3 rows")
    refused(sglang(RECORD, shape=[3, 2]), "sglang", name, "a multiple of 6 numbers, for shape [3, 2], got 16 numbers")
    refused(sglang(RECORD, routed_experts_start_len=2), "sglang", name, "expected 2 rows, for tokens 2 to 3 of 5")
    refused(sglang(RECORD, routed_experts_start_len="2"), "sglang", name, "a first token >= 0, got '2'")


# -- verl and padded batches ------------------------------------------------------------------------------------------

# Two samples: five tokens padded on both sides, and three; zeros where nothing is recorded.
PADDED = np.zeros((2, 8, 2, 2), np.int16)
PADDED[0, 2:6] = RECORD
PADDED[1, 3:5] = RECORD[:2]
ATTENTION = np.array([[0, 0, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 0, 0]])
BATCH: dict[str, Any] = {
    "uid": ["u", "v"],
    "prompts": np.array([[0, 0, 1, 2], [0, 0, 0, 1]]),
    "responses": np.array([[3, 4, 5, 0], [2, 3, 0, 0]]),
    "attention_mask": ATTENTION,
    "response_mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]]),
    "routed_experts": PADDED,
}
SHORT = np.concatenate([ROUTES[:2], NONE]).tolist()


def test_verl_batches() -> None:
    for wrap in (np.asarray, torch.from_numpy):
        batch = {name: wrap(value) if isinstance(value, np.ndarray) else value for name, value in BATCH.items()}
        one, two = read([batch])
        assert (one.token_ids.tolist(), two.token_ids.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 3])
        assert one.routes is not None
        assert two.routes is not None
        assert (one.routes.tolist(), two.routes.tolist()) == (ROUTES.tolist(), SHORT)
    short = PADDED.copy()
    short[0, 5] = 0  # the token before the last trained one
    refused(
        {**BATCH, "routed_experts": short}, "verl", "routed_experts", "expected 4 rows, for tokens 0 to 3", "3 rows"
    )
    none = {**BATCH, "routed_experts": np.zeros_like(PADDED)}
    assert [one.routes for one in read([none])] == [None, None]


def test_verl_agent_loops_stop_recording_at_the_last_generation() -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_mask": [1, 1, 0]}
    for rows in (3, 4):
        expected = [*ROUTES[:rows].tolist(), *([[[-1, -1]] * 2] * (5 - rows))]
        assert routes_of({**row, "routed_experts": RECORD[:rows]}) == expected
    refused({**row, "routed_experts": RECORD[:2]}, "verl", "routed_experts", "3 to 5 rows, for tokens from 0 on, of 5")
    refused({**row, "routed_experts": np.concatenate([RECORD, RECORD])}, "verl", "routed_experts", "got 8 rows")
    padded = {name: value[0] for name, value in BATCH.items()}
    refused({**padded, "routed_experts": RECORD}, "verl", "routed_experts", "prompts and responses (8), got 4 rows")


def padded(routes: Any, **columns: Any) -> list[Trajectory]:
    ids = np.where(ATTENTION, np.arange(8), 0)
    loss_mask = np.zeros_like(ids)
    loss_mask[:, 4] = 1
    return from_padded(ids, ATTENTION, loss_mask, routes=routes, **columns)


def test_from_padded_cuts_routes() -> None:
    with_minus = np.where(ATTENTION[:, :, None, None] == 1, PADDED, -1)
    for routes in (PADDED, PADDED.tolist(), torch.from_numpy(PADDED), with_minus):
        one, two = padded(routes)
        assert one.routes is not None
        assert two.routes is not None
        assert (one.routes.tolist(), two.routes.tolist()) == (ROUTES.tolist(), SHORT)
    assert padded(np.zeros_like(PADDED))[0].routes is None


def test_from_padded_refuses_routes_of_another_shape() -> None:
    for routes in (PADDED[:, 1:], PADDED[0], PADDED.astype(float)):
        with pytest.raises(ValueError, match=r"^routes: expected integers of shape \[2, 8, 'layers', .*, got "):
            padded(routes)
    twice = PADDED.copy()
    twice[1, 3] = 1
    with pytest.raises(ValueError, match=r"trajectory 'b', field routes: .*an expert twice at position 0, layer 0"):
        padded(twice, id=["a", "b"])
    with pytest.raises(ValueError, match=r"^id: expected one element per trajectory \(2\), got 1"):
        padded(PADDED, id=["a"])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_padded_routes_are_the_unpadded_ones(data: Any) -> None:
    layers, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    width = 9
    lengths = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=4))
    routes = np.zeros((len(lengths), width, layers, experts), np.int64)
    attention = np.zeros((len(lengths), width), np.int64)
    expected = []
    for line, length in enumerate(lengths):
        start = data.draw(st.integers(0, width - length))
        record = random.random((length - 1, layers, 8)).argsort(-1)[..., :experts] + 1
        attention[line, start : start + length] = 1
        routes[line, start : start + length - 1] = record
        unrecorded = np.full((1, layers, experts), -1)
        expected.append(np.concatenate([np.sort(record, -1), unrecorded]).tolist() if length > 1 else None)
    done = from_padded(attention, attention, np.zeros_like(attention), routes=routes)
    assert [None if one.routes is None else one.routes.tolist() for one in done] == expected


# -- own schema, and what it costs ------------------------------------------------------------------------------------


def test_own_schema_takes_base64_too() -> None:
    row = {"group": "g", "id": "a", "token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1]}
    for routes in (npy(ROUTES), npy(RECORD), envelope(RECORD), envelope(ROUTES.astype(np.int16))):
        assert routes_of({**row, "routes": routes}) == ROUTES.tolist()
    with pytest.raises(ValueError, match=r"trajectory 'a', field routes: expected 4 rows.*got 3 rows"):
        read([{**row, "routes": npy(RECORD[:3])}])


def test_inspect_tells_what_recorded_routes_cost() -> None:
    other = RECORD.copy()
    other[1, 1] = [8, 9]  # the prompt's second token was routed differently in the second request
    rows = [vllm(RECORD, request_id="a"), vllm(other, request_id="b")]
    free = [{**row, "outputs": [{"token_ids": [4, 5]}]} for row in rows]
    sgl = [sglang(record, id=name) for record, name in ((RECORD, "a"), (other, "b"))]
    verl = [
        {"uid": name, "prompt_ids": [1, 2, 3], "response_ids": [4, 5], "routed_experts": record}
        for record, name in ((RECORD, "a"), (other, "b"))
    ]
    for recorded in (rows, sgl, verl):
        document = describe(read(recorded))
        assert document["unique_tokens"] == 9  # the first token is shared, four are not
        assert (document["sharing"], document["sharing_without_routes"]) == (10 / 9, 2.0)
    assert "sharing_without_routes" not in describe(read(free))
