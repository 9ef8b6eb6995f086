"""Metrics against loops, and reduced over replicas."""

import json
import math
from pathlib import Path

import loss_formulas as formulas
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harts.losses import LossConfig, LossMetrics, make_loss

CONFIG = LossConfig(clip_low=0.1, clip_high=0.2, kl_coef=0.1, entropy_coef=0.2, tis_cap=1.1)


def metrics_of(step: list[formulas.Sequence], indices: list[int]) -> LossMetrics:
    return make_loss(CONFIG)(formulas.inputs_of(step, indices), formulas.denominators_of(step)).metrics


def test_match_loops() -> None:
    step = formulas.random_step(40, 6)
    tokens = [(seq, t) for seq in step for t in seq.trained]
    ratios = [math.exp(seq.logprobs[t] - seq.old[t]) for seq, t in tokens]
    signs = [seq.advantages[t] for seq, t in tokens]
    tis = [math.exp(seq.old[t] - seq.behaviour[t]) for seq, t in tokens]
    to_ref = [seq.ref[t] - seq.logprobs[t] for seq, t in tokens]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(tokens)

    values = metrics_of(step, list(range(6))).values()
    expected = {
        "tokens": len(tokens),
        "clip_fraction_low": mean([r < 0.9 and a < 0 for r, a in zip(ratios, signs, strict=True)]),
        "clip_fraction_high": mean([r > 1.2 and a > 0 for r, a in zip(ratios, signs, strict=True)]),
        "old_kl": mean([r - 1 - math.log(r) for r in ratios]),
        "ratio_mean": mean(ratios),
        "ratio_max": max(ratios),
        "ref_kl": mean([math.exp(d) - d - 1 for d in to_ref]),
        "entropy": mean([seq.entropy[t] for seq, t in tokens]),
        "tis_fraction_truncated": mean([x > 1.1 for x in tis]),
        "tis_ratio_mean": mean(tis),
        "tis_ratio_max": max(tis),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert values["clip_fraction_low"] > 0
    assert values["clip_fraction_high"] > 0
    assert set(values) - set(expected) == {"loss", "policy_loss", "kl_loss", "entropy_loss"}
    assert values["loss"] == pytest.approx(values["policy_loss"] + values["kl_loss"] + values["entropy_loss"])
    # "token" normalization: the parts are means over tokens too.
    assert values["kl_loss"] == pytest.approx(0.1 * values["ref_kl"])
    assert values["entropy_loss"] == pytest.approx(-0.2 * values["entropy"])


def test_detached_and_scalar() -> None:
    metrics = metrics_of(formulas.random_step(41, 3), [0, 1, 2])
    for part in (metrics.totals, metrics.token_sums, metrics.maxima):
        for value in part.values():
            assert value.shape == ()
            assert value.dtype == torch.float64
            assert not value.requires_grad


def test_no_trained_token_has_no_means() -> None:
    step = formulas.random_step(42, 3)
    step[0].mask = [False] * len(step[0].mask)
    empty = metrics_of(step, [0])
    assert set(empty.values()) == {"loss", "policy_loss", "kl_loss", "entropy_loss", "tokens"}
    rest = metrics_of(step, [1, 2])
    assert (empty + rest).values() == rest.values()


def test_metrics_of_two_losses_do_not_add() -> None:
    step = formulas.random_step(43, 2)
    other = make_loss(LossConfig(algorithm="supervised"))(
        formulas.inputs_of(step, [0, 1]), formulas.denominators_of(step)
    )
    with pytest.raises(ValueError, match=r"metrics: expected the same names, got .*kl_loss"):
        _ = metrics_of(step, [0, 1]) + other.metrics


def _replica(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        step = formulas.random_step(44, 5)
        values = metrics_of(step, [[3, 0], [4, 1, 2]][rank]).all_reduce().values()
        Path(folder, f"{rank}.json").write_text(json.dumps(values))
    finally:
        dist.destroy_process_group()


def test_replicas_reduce_to_the_whole(tmp_path: Path) -> None:
    mp.spawn(_replica, args=(str(tmp_path),), nprocs=2)
    whole = metrics_of(formulas.random_step(44, 5), list(range(5))).values()
    for rank in range(2):
        values = json.loads((tmp_path / f"{rank}.json").read_text())
        assert values == pytest.approx(whole, rel=1e-12)
