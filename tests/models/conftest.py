"""Separate rows through untouched transformers: what every model test compares with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harts.trajectory import Trajectory

Scores = tuple[Tensor, Tensor]


@pytest.fixture
def separate_rows() -> Callable[[nn.Module, list[Trajectory]], Scores]:
    """Log-probs and entropies of each trajectory, run one by one; 0 where untrained."""

    def score(model: nn.Module, trajectories: list[Trajectory]) -> Scores:
        logprobs, entropies = [], []
        for trajectory in trajectories:
            ids = torch.tensor(trajectory.token_ids, dtype=torch.int64).unsqueeze(0)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / trajectory.temperature
            logp = logits.log_softmax(-1)
            both = torch.stack([logp.gather(1, ids[0, 1:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)])
            both = torch.cat([both.new_zeros(2, 1), both], dim=1) * torch.tensor(trajectory.loss_mask)
            logprobs.append(both[0])
            entropies.append(both[1])
        return torch.cat(logprobs), torch.cat(entropies)

    return score
