"""The laws of a plan, as code: tests and `harts plan --check` run all of them, the trainer the quick ones."""

import dataclasses

from harts.blocks import Blocks
from harts.plan.make import lower_bound, make_plan
from harts.plan.schedule import Microbatch, Plan
from harts.tree import PrefixTree

__all__ = ["check_microbatch", "check_plan"]


def check_plan(tree: PrefixTree, plan: Plan, *, thorough: bool = True) -> None:
    """Raises if a plan breaks a law.

    - **data**: the plan was made of this tree, with the arguments it names.
    - **coverage**: every trajectory is in exactly one microbatch, and so is each of its trained tokens.
    - **lock step**: every slot has one microbatch per replica.
    - **budget**: no microbatch exceeds the token budget or the cap on gathered keys.
    - **bound**: the makespan is not below the lower bound.
    - **claims** (thorough): each microbatch, built by itself, has the rows, replayed rows, keys and chains that it
      claims, and unique rows add up to the tree.
    - **purity** (thorough): planning again gives the same plan.

    Args:
        tree: what was planned.
        plan: of that tree.
        thorough: check claims and purity too, which build every microbatch: about the cost of building the tree.

    Raises:
        ValueError: a law is broken; the message names it and where.
    """
    plan.check_tree(tree)
    _check_coverage(tree, plan)
    for slot, row in enumerate(plan.microbatches):
        if len(row) != plan.num_replicas:
            raise _broken("lock step", f"{plan.num_replicas} microbatches", f"{len(row)}", f"slot {slot}")
    for slot, row in enumerate(plan.microbatches):
        for replica, one in enumerate(row):
            _check_budget(plan, one, f"slot {slot}, replica {replica}")
    if plan.makespan < plan.lower_bound * (1 - 1e-9):
        raise _broken("bound", f"a makespan of at least {plan.lower_bound:g}", f"{plan.makespan:g}", "the plan")
    if thorough:
        _check_claims(tree, plan)
        _check_purity(tree, plan)


def check_microbatch(microbatch: Microbatch, subtree: PrefixTree, blocks: Blocks | None = None) -> None:
    """Raises ValueError if a microbatch, built, is not what it claims.

    Args:
        microbatch: of a plan.
        subtree: `PrefixTree.subset` of its trajectories.
        blocks: of the subtree, where they are known already.
    """
    blocks = blocks or Blocks.of_tree(subtree)
    found = {
        "trajectories": subtree.num_trajectories,
        "rows": subtree.num_rows,
        "replayed rows": blocks.replayed_rows,
        "gathered keys": int(blocks.chains.length_C.sum()),
        "chains": blocks.chains.num_chains,
    }
    claimed = (
        len(microbatch.trajectories),
        microbatch.rows,
        microbatch.replayed_rows,
        microbatch.gathered_keys,
        microbatch.chains,
    )
    for (name, number), claim in zip(found.items(), claimed, strict=True):
        if number != claim:
            raise _broken("claims", f"{claim} {name}", f"{number}", f"microbatch of {microbatch.trajectories[:8]}")


def _check_coverage(tree: PrefixTree, plan: Plan) -> None:
    times = [0] * tree.num_trajectories
    for row in plan.microbatches:
        for one in row:
            for index in one.trajectories:
                if not 0 <= index < len(times):
                    raise _broken("coverage", f"an index below {len(times)}", f"{index}", "a microbatch")
                times[index] += 1
    for index, count in enumerate(times):
        if count != 1:
            name = tree.trajectories[index].name
            raise _broken("coverage", "every trajectory once", f"{count} times", f"trajectory {name} (index {index})")


def _check_budget(plan: Plan, one: Microbatch, where: str) -> None:
    if one.budget_rows > plan.token_budget:
        raise _broken("budget", f"at most {plan.token_budget} rows", f"{one.budget_rows}", where)
    if plan.key_cap is not None and one.gathered_keys > plan.key_cap:
        raise _broken("budget", f"at most {plan.key_cap} gathered keys", f"{one.gathered_keys}", where)
    if one.is_empty and one != Microbatch():
        raise _broken("claims", "nothing in an empty microbatch", f"{one}", where)


def _check_claims(tree: PrefixTree, plan: Plan) -> None:
    for row in plan.microbatches:
        for one in row:
            if not one.is_empty:
                check_microbatch(one, tree.subset(one.trajectories))
    if plan.unique_rows != tree.num_rows:
        raise _broken("claims", f"{tree.num_rows} unique rows", f"{plan.unique_rows}", "all microbatches together")


def _check_purity(tree: PrefixTree, plan: Plan) -> None:
    arguments = {name: getattr(plan, name) for name in ("token_budget", "num_replicas", "cost_model", "key_cap")}
    again = make_plan(tree, **arguments)
    if again != plan:
        changed = [
            item.name for item in dataclasses.fields(plan) if getattr(plan, item.name) != getattr(again, item.name)
        ]
        raise _broken("purity", "the same plan again", f"another (fields {changed})", "planning twice")
    assert lower_bound(tree, **arguments) <= plan.makespan * (1 + 1e-9), "the bound alone exceeds the makespan"


def _broken(law: str, expected: str, got: str, where: str) -> ValueError:
    return ValueError(f"plan breaks the law of {law}: {where}: expected {expected}, got {got}; plan this data again")
