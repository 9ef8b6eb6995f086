"""Twenty small wrong edits of the source, and the tests that must notice each.

An edit replaces text that occurs exactly once in its file. `run.py` applies them one at a time to a copy.
"""

from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """A wrong edit.

    Attributes:
        name: what goes wrong.
        file: below src/harts.
        old, new: the text, and what it becomes.
        tests: arguments of pytest: the tests that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "tokens of other merge keys merge",
        "tree.py",
        "if any(each.merge_keys is not None for each in trajectories):",
        "if False:",
        ("tests/test_tree.py",),
    ),
    Mutation(
        "the child with the smallest Strahler number continues the chain",
        "chains.py",
        "(strahler[block], reach[block]) >= (strahler[rival], reach[rival])",
        "(strahler[block], reach[block]) < (strahler[rival], reach[rival])",
        ("tests/test_blocks.py",),
    ),
    Mutation(
        "a chain starts one block too early",
        "blocks.py",
        "first_block_C1[source] + first[chain] - 1 - first[source]",
        "max(first_block_C1[source] + first[chain] - 2 - first[source], 0)",
        ("tests/test_blocks.py",),
    ),
    Mutation(
        "the last shared row is not replayed",
        "blocks.py",
        "return depth // BLOCK * BLOCK",
        "return (depth + 1) // BLOCK * BLOCK",
        ("tests/cost/test_counts.py",),
    ),
    Mutation(
        "a plan's bound forgets the copies of a path",
        "plan/bound.py",
        "copies = max(copies, child[4])",
        "copies = copies + child[4]",
        ("tests/plan/test_plan_bounds.py",),
    ),
    Mutation(
        "a microbatch may exceed the budget by what it shares",
        "plan/pack.py",
        "most_rows, most_keys = self.rows + saved_rows - rows, self.keys - keys",
        "most_rows, most_keys = self.rows + 2 * saved_rows - rows, self.keys - keys",
        ("tests/plan/test_plan_laws.py",),
    ),
    Mutation(
        "a state decays after the write instead of before it",
        "ops/linear_attention/reference.py",
        "start_NGKV * end_decay_EGD1[level] + k_end_EGCK[level].mT @ v_new_NGCV",
        "(start_NGKV + k_end_EGCK[level].mT @ v_new_NGCV) * end_decay_EGD1[level]",
        ("tests/ops/test_equality.py", "-k", "gated_delta_rule"),
    ),
    Mutation(
        "every block starts from nothing",
        "ops/linear_attention/reference.py",
        "start_NGKV = end_NGKV.index_select(0, layout.parent_E[level])",
        "start_NGKV = 0 * end_NGKV.index_select(0, layout.parent_E[level])",
        ("tests/ops/test_equality.py", "-k", "gated_delta_rule"),
    ),
    Mutation(
        "a convolution reads the row in front, not the ancestor",
        "ops/causal_conv1d/layout.py",
        "ancestors.append(above[ancestors[-1]] if ancestors else packed.chains.parent_T)",
        "ancestors.append(np.maximum(ancestors[-1] - 1, -1) if ancestors else packed.chains.parent_T)",
        ("tests/ops/test_equality.py", "-k", "conv"),
    ),
    Mutation(
        "a query sees one row below it",
        "ops/attention/reference.py",
        "visible.tril(own).triu(own + 1 - window)",
        "visible.tril(own + 1).triu(own + 1 - window)",
        ("tests/ops/test_equality.py", "-k", "attention"),
    ),
    Mutation(
        "log-probs forget the temperature",
        "ops/logprobs/chunked.py",
        "return logits_RV.to(temperature_R.dtype) / temperature_R[:, None]",
        "return logits_RV.to(temperature_R.dtype)",
        ("tests/ops/test_equality.py", "-k", "chunked"),
    ),
    Mutation(
        "the gradient of an entropy has the wrong sign",
        "ops/logprobs/chunked.py",
        "grad_RV -= probs_RV * (logp_RV + entropy_U[part, None])",
        "grad_RV += probs_RV * (logp_RV + entropy_U[part, None])",
        ("tests/ops/test_equality.py", "-k", "chunked"),
    ),
    Mutation(
        "shared rows are counted once by routers",
        "ops/moe/counting.py",
        "weight_T = send(torch.from_numpy(np.bincount(rows_N[counted_N], minlength=packed.num_rows)), packed.device)",
        "weight_T = send(torch.from_numpy(np.bincount(np.unique(rows_N[counted_N]), minlength=packed.num_rows)), "
        "packed.device)",
        ("tests/ops/test_moe_statistics.py",),
    ),
    Mutation(
        "a clipped ratio keeps its gradient",
        "losses/policy.py",
        "(advantages_T > 0) & (fixed_T > high)",
        "(advantages_T < 0) & (fixed_T > high)",
        ("tests/losses/test_loss_values.py",),
    ),
    Mutation(
        "the standard deviation of a group has the divisor G",
        "losses/advantages.py",
        "rewards_G.std(ddof=1)",
        "rewards_G.std(ddof=0)",
        ("tests/losses/test_loss_advantages.py",),
    ),
    Mutation(
        "pieces do not read the values above them",
        "mixers/attention.py",
        'context.hand_on("values", v_TGV)',
        'context.hand_on("values", 0 * v_TGV)',
        ("tests/mixers/test_mixer_laws.py", "-k", "Attention or attention"),
    ),
    Mutation(
        "gradients of what pieces hand on are overwritten, not added",
        "mixers/store.py",
        "total[read.entries] += grad",
        "total[read.entries] = grad.to(total.dtype)",
        ("tests/models/test_streaming.py", "-k", "awkward_trees_in_random_pieces"),
    ),
    Mutation(
        "the learning rate of a step is not set",
        "train/step.py",
        'group["lr"] = learning_rate',
        'group["lr"] = group["lr"]',
        ("tests/train/test_train.py", "-k", "test_update"),
    ),
    Mutation(
        "a resumed run starts with a fresh optimiser",
        "train/checkpoint.py",
        '    _load_optimizer(path / "optimizer.safetensors", moments, model, optimizer)',
        "    del moments",
        ("tests/train/test_train.py", "-k", "resume_is_exact"),
    ),
    Mutation(
        "text from data reaches the page unescaped",
        "viz/page.py",
        'data = data.replace(character, f"' + '\\\\u{ord(character):04x}")',
        "data = data.replace(character, character)",
        ("tests/viz/test_viz_page.py",),
    ),
)
