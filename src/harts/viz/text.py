"""The prefix tree as lines of a terminal.

A line is a run: a segment and those that continue it alone, as where trajectories end one behind the other. Long trees
are cut, and every cut says what it leaves out.
"""

from dataclasses import dataclass

import numpy as np
from rich.text import Text

from harts.escapes import escaped
from harts.formats.decoding import Decoder
from harts.tree import PrefixTree

__all__ = ["draw_tree"]

_SNIPPET_TOKENS = 64
_MAX_LEVEL = 32
_BAR = 8
_IDS = 2


@dataclass(frozen=True)
class _Run:
    """Consecutive segments without a branch between them.

    Attributes:
        segments: from the first to the last.
        level: runs above it.
        guide: what is drawn before it.
    """

    segments: list[int]
    level: int
    guide: str


def draw_tree(tree: PrefixTree, *, decoder: Decoder | None = None, max_lines: int = 60, width: int = 120) -> list[Text]:
    """Lines that show segments to the length of their names: tokens, multiplicity, trained share, how the text starts.

    Args:
        tree: what to draw; siblings come with the most trajectories first.
        decoder: makes the text; None shows token ids.
        max_lines: lines at most, not counting those that say what was left out; 0 for all.
        width: columns; text is cut to fit.

    Raises:
        ValueError: `max_lines` is negative or `width` below 40.
    """
    if max_lines < 0 or width < 40:
        raise ValueError(
            f"max_lines: expected 0 or more, and width 40 or more, got {max_lines} and {width}; pass larger numbers"
        )
    return _Drawing(tree, decoder, max_lines or tree.num_segments, width).lines


class _Drawing:
    def __init__(self, tree: PrefixTree, decoder: Decoder | None, max_lines: int, width: int) -> None:
        self.tree, self.decoder, self.width = tree, decoder, width
        self.children: list[list[int]] = [[] for _ in range(tree.num_segments + 1)]  # of -1: the last
        for segment, parent in enumerate(tree.parent_S.tolist()):
            self.children[parent].append(segment)
        weight = tree.multiplicity_S.tolist()
        for some in self.children:
            some.sort(key=lambda segment: -weight[segment])
        self.ending: dict[int, list[str]] = {}
        for trajectory, segment in zip(tree.trajectories, tree.end_segment_B.tolist(), strict=True):
            self.ending.setdefault(segment, []).append(trajectory.id)
        self.trained_T1 = np.append(0, np.cumsum(tree.trained_T))
        self.rows_below = tree.sum_over_subtrees(tree.length_S)
        self.segments_below = tree.sum_over_subtrees(np.ones(tree.num_segments, np.int64))
        self.lines: list[Text] = []
        self._draw(max_lines)

    def _draw(self, max_lines: int) -> None:
        stack: list[_Run | Text] = []
        self._push(stack, self.children[-1], 0, "", root=True)
        drawn = 0
        left_out = 0
        while stack:
            item = stack.pop()
            if isinstance(item, Text):
                self.lines.append(item)
                continue
            if drawn >= max_lines:
                left_out += int(self.segments_below[item.segments[0]])
                continue
            drawn += 1
            self.lines.append(self._line(item))
            below = self.children[item.segments[-1]]
            guide = item.guide.replace("├─ ", "│  ").replace("└─ ", "   ")
            if below and item.level + 1 >= _MAX_LEVEL:
                stack.append(self._left_out(guide, below, "deeper"))
            else:
                self._push(stack, below, item.level + 1, guide)
        if left_out:
            self.lines.append(Text(f"… {left_out:,} more segments; --max-lines 0 draws all", style="dim italic"))

    def _push(
        self, stack: list["_Run | Text"], segments: list[int], level: int, guide: str, root: bool = False
    ) -> None:
        """Puts siblings on the stack, the first on top."""
        runs: list[_Run | Text] = []
        for place, segment in enumerate(segments):
            run = [segment]
            while len(self.children[run[-1]]) == 1:
                run.append(self.children[run[-1]][0])
            corner = "" if root else "└─ " if place + 1 == len(segments) else "├─ "
            runs.append(_Run(run, level, guide + corner))
        stack.extend(reversed(runs))

    def _left_out(self, guide: str, segments: list[int], where: str) -> Text:
        count, rows = (
            int(sum(below[segment] for segment in segments)) for below in (self.segments_below, self.rows_below)
        )
        return Text(f"{guide}└─ … {count:,} segments {where}, {rows:,} tokens", style="dim italic")

    def _line(self, run: _Run) -> Text:
        tree = self.tree
        first, last = run.segments[0], run.segments[-1]
        start = int(tree.start_S[first])
        stop = int(tree.start_S[last] + tree.length_S[last])
        weights = int(tree.multiplicity_S[first]), int(tree.multiplicity_S[last])
        share = float(self.trained_T1[stop] - self.trained_T1[start]) / (stop - start)
        line = Text(run.guide, style="dim", no_wrap=True, overflow="ellipsis")
        line.append(f"{stop - start:,}", style="bold cyan")
        line.append(f" x{weights[0]}" if weights[0] == weights[1] else f" x{weights[0]}-{weights[1]}", style="magenta")
        filled = round(share * _BAR)
        line.append(" " + "▰" * filled, style="green")
        line.append("▱" * (_BAR - filled), style="dim")
        if len(run.segments) > 1:
            line.append(f" {len(run.segments)} ends" if weights[0] > 1 else "", style="dim")
        ids = [name for segment in run.segments for name in self.ending.get(segment, [])]
        if ids:
            more = f" +{len(ids) - _IDS}" if len(ids) > _IDS else ""
            line.append(" " + ", ".join(_short(escaped(name)) for name in ids[:_IDS]) + more, style="yellow")
        room = self.width - line.cell_len - 1
        if room > 8:
            line.append(" " + self._snippet(start, stop)[:room])
        line.truncate(self.width, overflow="ellipsis")
        return line

    def _snippet(self, start: int, stop: int) -> str:
        ids = self.tree.token_ids_T[start : min(stop, start + _SNIPPET_TOKENS)]
        if self.decoder is None:
            return " ".join(map(str, ids[:24].tolist()))
        text = " ".join(self.decoder.text(ids).split())
        return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]
