"""What a run trains on: its trajectories, checked against the loss and the token budget, and a saved plan of them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from harts.formats import read
from harts.losses import Loss, fill_advantages
from harts.plan import Plan, check_plan
from harts.train.batches import Batches
from harts.train.config import TrainConfig
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["load_plan", "read_trajectories"]


def read_trajectories(config: TrainConfig, loss: Loss) -> list[Trajectory]:
    """The trajectories of a run, with advantages where the loss takes them.

    Raises:
        ValueError: a trajectory lacks what the loss reads, or is longer than the token budget; it is named.
    """
    trajectories = read(
        config.data,
        rows=config.rows,
        fmt=config.format,
        fields=config.fields,
        tokenizer=config.tokenizer,
        reasoning=config.reasoning,
        limit=config.limit,
    )
    if config.advantages == "group" and "advantages" in loss.requires:
        trajectories = fill_advantages(
            [dataclasses.replace(trajectory, advantages=None) for trajectory in trajectories],
            scale=config.advantage_scale,
            leave_one_out=config.leave_one_out,
            singletons=config.singletons,
        )
    for name in ("logprobs", "ref_logprobs"):
        _check_all_or_none(trajectories, name)
    given = [] if "behaviour_logprobs" in loss.requires else ["old_logprobs"]
    loss.check(trajectories, given=[*given, "ref_logprobs", "entropy"])
    longest = max(trajectories, key=len)
    if len(longest) > config.token_budget:
        raise ValueError(
            f"trajectory {longest.name}, field token_ids: expected at most the token budget "
            f"({config.token_budget}), got {len(longest)} tokens; set token_budget to {len(longest)} or more"
        )
    return trajectories


def _check_all_or_none(trajectories: Sequence[Trajectory], name: str) -> None:
    """Refuses data in which some trajectories bring recorded values and others would get computed ones."""
    trained = [trajectory for trajectory in trajectories if trajectory.num_trained]
    missing = [trajectory for trajectory in trained if getattr(trajectory, name) is None]
    if missing and len(missing) < len(trained):
        raise ValueError(
            f"trajectory {missing[0].name}, field {name}: expected values, as {len(trained) - len(missing)} other "
            f"trajectories have them, got none; record them everywhere, or nowhere to have them computed"
        )


def load_plan(config: TrainConfig, trajectories: Sequence[Trajectory], *, replicas: int) -> Plan | None:
    """The saved plan that the config names, checked against the data as they were read; None where it names none.

    Raises:
        ValueError: it is no plan, or one of other data or another number of replicas.
    """
    if config.plan is None:
        return None
    groups = Batches(trajectories, groups_per_step=config.groups_per_step, seed=config.seed).num_groups
    if config.groups_per_step < groups:
        raise ValueError(
            f"config, field groups_per_step: expected all {groups} groups of the data, as the saved plan covers "
            f"them in one step, got {config.groups_per_step}"
        )
    try:
        saved = json.loads(Path(config.plan).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{config.plan}: expected a plan written by harts plan -o ({error})") from error
    tree = PrefixTree.build(trajectories, share=config.share)
    plan = Plan.from_json(saved, tree=tree)
    if plan.num_replicas != replicas:
        raise ValueError(f"{config.plan}: is for {plan.num_replicas} replicas, this run has {replicas}; plan again")
    check_plan(tree, plan, thorough=False)  # another version may plan otherwise
    return plan
