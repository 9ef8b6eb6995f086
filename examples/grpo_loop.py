"""The GRPO loop of `grpo_loop_before.py` with HARTS: the prompt of a group runs once."""

import torch
from torch import Tensor, nn

import harts
from harts.models import tiny_model

GROUPS, GROUP_SIZE, PROMPT, ANSWER, CLIP = 2, 4, 40, 12, 0.2


def reward_of(answer_BA: Tensor) -> Tensor:
    """The share of even token ids."""
    return (answer_BA % 2 == 0).double().mean(-1)


@torch.no_grad()
def rollout(model: nn.Module, prompt_BP: Tensor) -> Tensor:
    """Samples answers token by token; returns prompts and answers, [B, P + A]."""
    ids_BL = prompt_BP
    for _ in range(ANSWER):
        logits_BV = model(input_ids=ids_BL, use_cache=False).logits[:, -1]
        ids_BL = torch.cat([ids_BL, torch.multinomial(logits_BV.softmax(-1), 1)], 1)
    return ids_BL


def answer_logprobs(model: nn.Module, ids_BL: Tensor) -> Tensor:
    """Log-probability of each token of the answers, [B, A]."""
    logprobs = harts.logprobs_padded(model, ids_BL).logprobs
    return logprobs[:, -ANSWER:]


def train(steps: int = 3, updates: int = 2, seed: int = 0) -> nn.Module:
    """Trains a tiny model and returns it."""
    torch.manual_seed(seed)
    model = harts.attach(tiny_model("tiny-qwen3.5"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        prompt_GP = torch.randint(model.config.vocab_size, (GROUPS, PROMPT))
        ids_BL = rollout(model, prompt_GP.repeat_interleave(GROUP_SIZE, 0))
        reward_GS = reward_of(ids_BL[:, PROMPT:]).view(GROUPS, GROUP_SIZE)
        centred_GS = reward_GS - reward_GS.mean(1, keepdim=True)
        advantage_B = (centred_GS / (reward_GS.std(1, keepdim=True) + 1e-4)).flatten().float()
        old = answer_logprobs(model, ids_BL).detach()
        for _ in range(updates):
            ratio = (answer_logprobs(model, ids_BL) - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantage_B[:, None], clipped * advantage_B[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"step {step}: reward {reward_GS.mean():.3f}, loss {loss.item():.6f}")
    return model


if __name__ == "__main__":
    train()
