"""Our own schema: every way in gives the same trajectories, writing gives them back, and bad files are refused."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from harts import Trajectory
from harts.formats import (
    check_vocabulary,
    from_lists,
    from_padded,
    iter_trajectories,
    read,
    write,
)

FIELDS = ("token_ids", "loss_mask", "logprobs", "ref_logprobs", "advantages", "merge_keys")
ROW: dict[str, Any] = {"group": "g", "id": "g/0", "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


def same(left: Sequence[Trajectory], right: Sequence[Trajectory]) -> bool:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in FIELDS:
            one, two = getattr(a, name), getattr(b, name)
            assert (one is None) == (two is None), name
            assert one is None or (one.dtype == two.dtype and np.array_equal(one, two)), name
        assert (a.group, a.id, a.reward, a.temperature) == (b.group, b.id, b.reward, b.temperature)
        assert dict(a.meta) == dict(b.meta)
    return True


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    done = []
    numbers = st.floats(-1e6, 1e6)
    for index in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 6))

        def many(values: st.SearchStrategy[Any], length: int = length) -> list[Any]:
            return draw(st.lists(values, min_size=length, max_size=length))

        maybe = st.booleans()
        done.append(
            Trajectory(
                group=draw(st.sampled_from(["a", "täsk\n"])),
                id=f"row{index}",
                token_ids=many(st.integers(0, 2**31 - 1)),
                loss_mask=[False, *many(st.booleans())[1:]],
                logprobs=many(numbers) if draw(maybe) else None,
                ref_logprobs=many(numbers) if draw(maybe) else None,
                advantages=(draw(numbers) if draw(maybe) else many(numbers)) if draw(maybe) else None,
                merge_keys=many(st.integers(-(2**63), 2**63 - 1)) if draw(maybe) else None,
                reward=draw(st.none() | numbers),
                temperature=draw(st.sampled_from([1.0, 0.7])),
                meta={"step": index} if draw(maybe) else {},
            )
        )
    return done


@settings(deadline=None, max_examples=40)
@given(batch=batches(), ending=st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst"]))
def test_what_is_written_is_read_back(
    batch: list[Trajectory], ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rt") / f"x{ending}"
    write(path, batch)
    if any(t.num_trained for t in batch):
        assert same(read(path), batch)
    else:
        with pytest.raises(ValueError, match="expected a trained token"):
            read(path)


def rollouts() -> list[Trajectory]:
    """Three trajectories with every per-token field; one has nothing trained."""
    shared: dict[str, Any] = {"group": "g", "temperature": 0.7}
    return [
        Trajectory(
            id=f"g/{index}",
            token_ids=np.arange(length) + 10,
            loss_mask=np.arange(length) > (1 if index < 2 else 99),
            logprobs=-np.arange(length) / 3,
            ref_logprobs=-np.arange(length) / 7,
            advantages=np.arange(length) - 1.5,
            merge_keys=np.arange(length) % 2,
            reward=index / 2,
            **shared,
        )
        for index, length in enumerate((5, 3, 4))
    ]


def columns(batch: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "group": [t.group for t in batch],
        "id": [t.id for t in batch],
        "reward": [t.reward for t in batch],
        "temperature": 0.7,
    }


def padded(batch: Sequence[Trajectory], sides: Sequence[tuple[int, int]], convert: Callable[[Any], Any]) -> list[Any]:
    width = max(len(t) + sum(side) for t, side in zip(batch, sides, strict=True))
    arrays = {name: np.full((len(batch), width), 3.0 if "log" in name else 1) for name in FIELDS}
    attention = np.zeros((len(batch), width), np.int64)
    for b, (t, (left, _)) in enumerate(zip(batch, sides, strict=True)):
        attention[b, left : left + len(t)] = 1
        for name in FIELDS:
            arrays[name] = arrays[name].astype(getattr(t, name).dtype)
            arrays[name][b, left : left + len(t)] = getattr(t, name)
    inputs = {name: convert(array) for name, array in arrays.items()}
    ids, mask = inputs.pop("token_ids"), inputs.pop("loss_mask")
    return from_padded(ids, convert(attention), mask, **inputs, **columns(batch))


def test_every_way_in_gives_the_same_trajectories(tmp_path: Path) -> None:
    batch = rollouts()
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst"):
        write(tmp_path / f"x.{ending}", batch)
        assert same(read(tmp_path / f"x.{ending}"), batch)
        # The first bytes tell the compression, whatever the name says.
        (tmp_path / "misnamed.jsonl").write_bytes((tmp_path / f"x.{ending}").read_bytes())
        assert same(read(tmp_path / "misnamed.jsonl"), batch)
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert same(read(tmp_path / "x.parquet"), batch)
    assert same(read(rows), batch)
    assert same(read(iter(rows)), batch)
    lists = {name: [getattr(t, name).tolist() for t in batch] for name in FIELDS}
    assert same(from_lists(lists.pop("token_ids"), lists.pop("loss_mask"), **lists, **columns(batch)), batch)
    for sides in ([(0, 0), (2, 0), (1, 0)], [(0, 3), (0, 1), (0, 0)], [(1, 2), (0, 2), (3, 0)]):
        for convert in (np.asarray, torch.as_tensor, np.ndarray.tolist):
            assert same(padded(batch, sides, convert), batch)


def test_several_files_and_a_limit(tmp_path: Path) -> None:
    batch = rollouts()
    write(tmp_path / "a.jsonl", batch[:1])
    write(tmp_path / "b.jsonl", batch[1:])
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert same(read(both), batch)
    assert same(read(both, limit=2), batch[:2])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1"):
        read([both[0], both[0]])


def test_reading_streams(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROW) + "\nnot json\n")
    rows = iter_trajectories(path)
    assert next(rows).id == "g/0"
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: broken JSON"):
        next(rows)


def test_null_is_absent_and_null_logprobs_are_zero_where_untrained() -> None:
    fields = {"advantages": None, "temperature": None, "reward": None, "meta": None, "ref_logprobs": None}
    (one,) = read([{**ROW, **fields, "logprobs": [None, -1.0, -2.0], "tools": None, "source": "here"}])
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert one.advantages is None
    assert one.reward is None
    assert one.temperature == 1.0
    assert dict(one.meta) == {"source": "here"}


def test_token_mask_stands_for_loss_mask() -> None:
    row = {"group": "g", "id": "a", "token_ids": [1, 2], "token_mask": [0, 1], "messages": [{"role": "user"}]}
    (one,) = read([row])
    assert one.loss_mask.tolist() == [False, True]


def test_a_bfloat16_tensor_is_taken() -> None:
    (one,) = from_lists([torch.tensor([1, 2])], [torch.tensor([0, 1])], logprobs=[torch.tensor([0, -0.5]).bfloat16()])
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0.0, -0.5]


BAD_ROWS = [
    ({"loss_maks": [0, 1, 1]}, "loss_maks", "did you mean loss_mask?"),
    ({"foo": 1}, "foo", "remove it, or put it into meta"),
    ({"loss_mask": None}, "loss_mask", "expected this field (or token_mask), got none"),
    ({"group": None}, "group", "got none"),
    ({"id": None}, "id", "got none"),
    ({"token_ids": None}, "token_ids", "got none"),
    ({"token_ids": [1, 2.5, 3]}, "token_ids", "expected integers"),
    ({"token_ids": [1, True, 3]}, "token_ids", "booleans among them"),
    ({"token_ids": []}, "token_ids", "at least one token"),
    ({"loss_mask": [0, 1]}, "loss_mask", "one value per token (3), got 2 values"),
    ({"logprobs": [0.0]}, "logprobs", "one value per token (3), got 1 values"),
    ({"logprobs": [None, -1.0]}, "logprobs", "got 2 values"),
    ({"logprobs": [0.0, None, -1.0]}, "logprobs", "null at position 1"),
    ({"advantages": [1.0, 2.0]}, "advantages", "one value per token (3), got 2 values"),
    ({"reward": "high"}, "reward", "expected a number"),
    ({"temperature": 0}, "temperature", "a number > 0"),
    ({"meta": [1]}, "meta", "expected an object"),
    ({"group": 1.5}, "group", "expected a string"),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD_ROWS)
def test_bad_rows_name_file_line_trajectory_and_field(
    change: dict[str, Any], field: str, message: str, tmp_path: Path
) -> None:
    bad = {**ROW, "id": "g/1", **change}
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 3: trajectory {bad['id'] or 'row1'!r}, field {field}: expected ")
    assert message in text


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"group":"g","id":"z","token_ids":[1,2],"loss_mask":[0,1],"logprobs":[0,NaN]}', "logprobs[1]"),
        ('{"group":"g","id":"z","token_ids":[1,2],"loss_mask":[0,1],"advantages":-Infinity}', "advantages"),
        ('{"group":"g","id":"z","token_ids":[1,2],"loss_mask":[0,1],"meta":{"a":[{"b":NaN}]}}', "meta.a[0].b"),
        ('{"group":"g","id":"z","token_ids":[1,2],"loss_mask":[0,1],"reward":1e999}', "reward"),
    ],
)
def test_numbers_that_json_does_not_have_are_refused(line: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 1: trajectory 'z', field {field}: expected ")


def test_the_same_id_twice() -> None:
    with pytest.raises(ValueError, match=r"row 2: trajectory 'g/0', field id: .* the id of row 1"):
        read([ROW, ROW])


BAD_FILES = [
    ("empty.jsonl", b"", "got an empty file"),
    ("blank.jsonl", b"\n \n", "at least one row, got none"),
    ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "at least one row, got none"),
    ("broken.jsonl", json.dumps(ROW).encode() + b'\n{"group": ', "broken.jsonl, line 2: broken JSON"),
    ("array.json", b'[\n{"group": "g"}\n', "line 1: broken JSON"),
    ("list.jsonl", b"[1, 2]", "element 1: expected an object with named fields, got int"),
    ("deep.jsonl", b"[" * 200_000, "line 1: broken JSON"),
    ("latin.jsonl", '{"id": "ä"}'.encode("latin-1"), "line 1: broken JSON"),
    ("short.jsonl.gz", gzip.compress(json.dumps(ROW).encode() * 50)[:-9], "gzip stream is truncated or damaged"),
    ("bad.jsonl.gz", b"\x1f\x8b" + b"\x00" * 40, "gzip stream is truncated or damaged"),
    ("short.jsonl.zst", zstandard.compress(json.dumps(ROW).encode())[:-5], "Zstandard stream is truncated"),
    ("bad.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "Zstandard stream is damaged"),
    ("table.csv", b"a,b\n", "got .csv"),
    ("short.parquet", b"PAR1 and no more", "broken Parquet"),
    ("text.parquet", b"{}", "got no 'PAR1' at its start"),
    ("other.jsonl", b'{"question": "?"}', "line 1: expected token_ids, messages"),
    ("verl.jsonl", b'{"input": "", "output": "", "score": 1}', "text that verl dumps"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_several_zstd_frames_and_gzip_members_are_one_file(tmp_path: Path) -> None:
    lines = [json.dumps({**ROW, "id": str(index)}).encode() + b"\n" for index in range(3)]
    for name, compress in (("x.jsonl.zst", zstandard.compress), ("x.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(b"".join(map(compress, lines)))
        assert [t.id for t in read(tmp_path / name)] == ["0", "1", "2"]


def test_lines_longer_than_a_chunk(tmp_path: Path) -> None:
    length = 400_000
    row = {**ROW, "token_ids": list(range(length)), "loss_mask": [0] + [1] * (length - 1)}
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(row)}\r\n{json.dumps({**ROW, 'id': 'b'})}")
    first, second = read(path)
    assert len(first) == length
    assert second.id == "b"


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="in this directory, got none"):
        read(tmp_path)
    with pytest.raises(ValueError, match="empty sequence"):
        read([])
    with pytest.raises(ValueError, match="row 2: expected an object"):
        read([ROW, 7])


@pytest.mark.parametrize("option", [{"rows": "turns"}, {"fmt": "open"}, {"reasoning": "no"}, {"limit": 0}])
def test_unknown_options_are_refused_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: expected"):
        iter_trajectories([ROW], **option)


def test_no_trained_token_anywhere() -> None:
    untrained = {**ROW, "id": "g/1", "loss_mask": [0, 0, 0]}
    assert [t.num_trained for t in read([ROW, untrained])] == [2, 0]
    with pytest.raises(ValueError, match="trained token, got none in 1 trajectories; field loss_mask"):
        read([untrained])


def test_check_vocabulary_names_trajectory_position_and_id() -> None:
    batch = read([ROW])
    check_vocabulary(batch, 4)
    with pytest.raises(ValueError, match=r"trajectory 'g/0', field token_ids: .*size 3, got 3 at position 2"):
        check_vocabulary(batch, 3)


def test_padding_between_tokens_is_refused() -> None:
    ids, ones = np.ones((2, 4), np.int64), np.array([[0, 1, 1, 1]] * 2)
    with pytest.raises(ValueError, match=r"trajectory 'row1', field attention_mask: .*hole at position 2"):
        from_padded(ids, np.array([[1, 1, 1, 1], [1, 1, 0, 1]]), ones)
    with pytest.raises(ValueError, match=r"'row0', field attention_mask: .*padding only"):
        from_padded(ids, np.zeros((2, 4)), ones)
    with pytest.raises(ValueError, match="attention_mask: expected the shape of token_ids"):
        from_padded(ids, np.ones((2, 3)), ones)
    with pytest.raises(ValueError, match=r"token_ids: expected shape \[B, L\]"):
        from_padded(ids[0], np.ones(4), ones)
    with pytest.raises(ValueError, match="attention_mask: expected 0/1"):
        from_padded(ids, 2 * np.ones((2, 4)), ones)


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward: expected one element per trajectory \(1\), got 2"):
        from_lists([[1, 2]], [[0, 1]], reward=[1.0, 2.0])
    with pytest.raises(ValueError, match="row 2: trajectory 'row1', field loss_mask"):
        from_lists([[1, 2], [1, 2]], [[0, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match="'x', field id: expected a unique name"):
        from_lists([[1, 2], [1, 2]], [[0, 1], [0, 1]], id=["x", "x"])


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    batch = rollouts()
    path = tmp_path / "x.jsonl.gz"
    write(path, batch)
    before = path.read_bytes()
    write(path, batch)
    assert path.read_bytes() == before
    unwritable = Trajectory(id="o", token_ids=[1], loss_mask=[0], meta={"a": object()})
    for bad, message in (
        ([*batch, unwritable], "'o', field meta"),
        ([*batch, batch[0]], "field id: .*the same twice"),
        ([Trajectory(token_ids=[1], loss_mask=[0])], "field id: .*got none"),
        ([], "at least one trajectory"),
    ):
        with pytest.raises(ValueError, match=message):
            write(path, bad)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]
    with pytest.raises(ValueError, match="expected an ending"):
        write(tmp_path / "x.txt", batch)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'harts\[parquet\]'"):
        read(path)
