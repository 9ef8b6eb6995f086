"""Layouts of the head: which rows reach it, which targets each of them has, and who reads a target."""

from torch.nn.functional import pad

from harts.layout import PackedTree
from harts.ops.rows import RowIndex

__all__ = ["head_rows", "heads_of_targets", "heads_of_tokens", "targets_of_tokens"]


def head_rows(packed: PackedTree) -> RowIndex:
    """The U head rows among the T rows."""
    return RowIndex(packed.head_row_U, packed.num_rows)


def heads_of_targets(packed: PackedTree) -> RowIndex:
    """The head row of each of the M targets, among the U."""
    return RowIndex(packed.head_of_M, len(packed.head_row_U))


def targets_of_tokens(packed: PackedTree) -> RowIndex:
    """The target of each of the N tokens, among the M; M for none."""
    return RowIndex(packed.target_of_N, len(packed.token_M))


def heads_of_tokens(packed: PackedTree) -> RowIndex:
    """The head row of each of the N tokens, among the U; U for none."""
    heads = len(packed.head_row_U)
    return RowIndex(pad(packed.head_of_M, (0, 1), value=heads)[packed.target_of_N], heads)
