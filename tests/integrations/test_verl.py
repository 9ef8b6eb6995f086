# ruff: noqa: E402
"""verl's FSDP2 engine on the tree against verl's own, on a CPU in one process: log-probs, losses, parameters."""

import copy
import importlib.util
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)
os.environ["VERL_PLATFORM"] = "cpu"

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """verl has no platform for CPUs; its plug-ins may add one."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        mem_get_info=lambda *_: (0, 1),
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        is_available=lambda: False,
    )

    def empty_cache(self) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"


from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.actor import ActorConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss, sft_loss

from harts.integrations.verl import HartsEngine
from harts.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model on disk, and a process group of one."""
    place = tmp_path_factory.mktemp("verl")
    tiny_model("tiny-qwen3.5").save_pretrained(place / "model")
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    yield place / "model"
    torch.distributed.destroy_process_group()


def engine(kind: type, folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    built = kind(
        model_config=HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            **{"enable_gradient_checkpointing": False, **(model or {})},
        ),
        engine_config=FSDPEngineConfig(
            **{
                "strategy": "fsdp2",
                "use_torch_compile": False,
                "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
                "model_dtype": "fp32",
                **changes,
            }
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def batch(*, dynamic: bool = True, temperature: float = 1.0) -> TensorDict:
    """Two groups of three: prompts, responses of several lengths with masked tokens, in verl's jagged format."""
    rng = np.random.default_rng(0)
    rows, prompts, responses, masks = [], [], [], []
    for length in (70, 21):
        prompt = rng.integers(1, 500, length).tolist()
        for count in (5, 9, 7):
            response = rng.integers(1, 500, count).tolist()
            rows.append(prompt + response)
            prompts.append(prompt)
            responses.append(response)
            masks.append([1] * (count - 3) + [0] + [1] * 2)

    def jagged(values: list[list[Any]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(each, dtype=dtype) for each in values], layout=torch.jagged)

    def floats(scale: float, mean: float) -> torch.Tensor:
        return jagged([(mean + scale * rng.standard_normal(len(each))).tolist() for each in responses], torch.float32)

    data = TensorDict(
        {
            "input_ids": jagged(rows),
            "position_ids": jagged([list(range(len(each))) for each in rows]),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(masks),
            "loss_mask": jagged([[0] * len(one) + mask for one, mask in zip(prompts, masks, strict=True)]),
            "old_log_probs": floats(0.2, -6.2),
            "advantages": floats(1.0, 0.0),
        },
        batch_size=6,
    )
    given = {"max_token_len_per_gpu": 100} if dynamic else {"micro_batch_size_per_gpu": 3}
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=dynamic,
        use_remove_padding=False,
        temperature=temperature,
        calculate_entropy=True,
        global_batch_size=6,
        **given,
    )
    return data


def trained(built: Any, data: TensorDict, loss: Any, steps: int = 2) -> SimpleNamespace:
    out = SimpleNamespace(losses=[], norms=[])
    for _ in range(steps):
        with built.train_mode():
            built.optimizer_zero_grad()
            found = built.forward_backward_batch(copy.copy(data), loss)
            out.losses.append(float(np.sum(found["loss"])))
            out.norms.append(float(built.optimizer_step()))
    out.parameters = {name: value.full_tensor().detach().clone() for name, value in built.module.named_parameters()}
    return out


def ppo(**_: Any) -> Any:
    config = ActorConfig(
        strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=3, loss_agg_mode="token-mean", entropy_coeff=0.01
    )
    return lambda **given: ppo_loss(config=config, **given)


def sft() -> Any:
    config = ActorConfig(strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=3)
    return lambda **given: sft_loss(config=config, **given)


def test_the_vendor_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "harts")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is HartsEngine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_verls(folder: Path, temperature: float) -> None:
    """At the tokens whose response is trained; verl gives others too."""
    found = []
    for kind in (FSDPEngineWithLMHead, HartsEngine):
        built = engine(kind, folder)
        data = batch(temperature=temperature)
        with built.eval_mode():
            found.append(built.forward_backward_batch(data, None, forward_only=True)["model_output"])
        assert tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=None) is True
    mask = torch.cat([each.roll(-1) for each in batch()["loss_mask"].unbind()]).bool()
    for name in ("log_probs", "entropy"):
        theirs, ours = (each[name].values() for each in found)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=2e-6)
        assert ours[mask].abs().min() > 0


@pytest.mark.parametrize("loss", [ppo, sft])
@pytest.mark.parametrize("dynamic", [True, False], ids=["budget", "micro-batches"])
def test_training_is_verls(folder: Path, loss: Any, dynamic: bool) -> None:
    model = {"enable_gradient_checkpointing": dynamic}
    theirs, ours = (
        trained(engine(kind, folder, model), batch(dynamic=dynamic), loss())
        for kind in (FSDPEngineWithLMHead, HartsEngine)
    )
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
    assert min(theirs.norms) > 1e-3
    for name, value in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("name", "model", "changes"),
    [
        ("strategy", {}, {"strategy": "fsdp"}),
        ("use_fused_kernels", {"use_fused_kernels": True}, {}),
        ("use_liger", {"use_liger": True}, {}),
        ("pad_to_length", {}, {"pad_to_length": True}),
        ("entropy_checkpointing", {}, {"entropy_checkpointing": True}),
    ],
)
def test_options_that_cannot_be_honoured_are_named(
    folder: Path, name: str, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"verl's option {name} = .* is not supported on a prefix tree"):
        engine(HartsEngine, folder, model, **changes)


def test_a_mini_batch_is_one_tree_in_pieces(folder: Path) -> None:
    """Of 315 tokens, the two prompts run once; no piece has more rows than the budget."""
    built, rows = engine(HartsEngine, folder), []
    built.module.get_input_embeddings().register_forward_hook(lambda _, given, __: rows.append(given[0].numel()))
    with built.eval_mode():
        built.forward_backward_batch(batch(), None, forward_only=True)
    assert sum(rows) == 70 + 21 + 2 * (5 + 9 + 7)
    assert max(rows) <= 100


@pytest.mark.parametrize("found", ["0.8.0", "0.10.0"])
def test_versions_outside_the_range_are_said_aloud(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: found)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "harts")
    with pytest.raises(ImportError, match=rf"expected verl from 0.9 to below 0.10.* got {found}"):
        runpy.run_module("harts.integrations.verl")
    assert "falls back to its own engine" in caplog.text


def test_outputs_that_a_tree_does_not_give_are_named(folder: Path) -> None:
    built, data = engine(HartsEngine, folder), batch()
    tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
    with built.eval_mode(), pytest.raises(ValueError, match="calculate_sum_pi_squared is not supported"):
        built.forward_backward_batch(data, None, forward_only=True)
