"""What `harts inspect --explain` prints of a report of `harts.explain`."""

from rich.console import Console
from rich.text import Text

from harts.cli import output
from harts.escapes import escaped
from harts.explain import REMEDIES, Miss, Report, Sizes
from harts.formats.stability import Change, Stability

__all__ = ["render", "render_stability"]

_TEXT = 44
_NAMES = 3
_DUPLICATES = 5


def render(console: Console, report: Report, *, findings: int, groups: int) -> None:
    """Prints sizes, duplicates, what near misses cost by kind, the costliest of them, and groups.

    Args:
        console: where to.
        report: what to print.
        findings: near misses to list.
        groups: groups to list, those that lose most first.
    """
    _sizes(console, report)
    _duplicates(console, report)
    _kinds(console, report)
    if findings and report.misses:
        _findings(console, report, findings)
    if groups:
        _groups(console, report, groups)


def _sizes(console: Console, report: Report) -> None:
    shown = output.number
    table = output.table("\nTokens to run", "", "one tree", "", "a tree a group", "")
    whole, by_group = report.sizes, report.sizes_by_group
    for name, field in (
        ("A  one row a model call", "per_call"),
        ("   equal calls once", "per_distinct_call"),
        ("B  rows merged while one is a prefix of the next", "prefix"),
        ("C  tree", "tree"),
    ):
        cells = []
        for sizes in (whole, by_group):
            value = int(getattr(sizes, field))
            cells += [shown(value), f"{sizes.per_call / value:.2f}x less" if value < sizes.per_call else ""]
        table.add_row(name, *cells)
    mended = report.tree_mended
    table.add_row("   without the differences below", shown(mended), f"{whole.per_call / mended:.2f}x less", "", "")
    console.print(table)


def _duplicates(console: Console, report: Report) -> None:
    sizes = report.sizes
    console.print(
        f"\n{report.num_duplicates:,} trajectories have the tokens of an earlier one; {sizes.calls:,} model calls, "
        f"{sizes.distinct_calls:,} of them distinct. The tree runs equal ones once.",
        highlight=False,
    )
    for ids in report.duplicates[:_DUPLICATES]:
        console.print(Text("  " + _few(ids), style="dim"))
    if len(report.duplicates) > _DUPLICATES:
        console.print(f"  … and {len(report.duplicates) - _DUPLICATES} more such sets", style="dim")


def _kinds(console: Console, report: Report) -> None:
    if not report.misses:
        console.print("\nNo near misses: where rows part, they stay apart.")
    else:
        title = f"\nNear misses: {report.sizes.tree - report.tree_mended:,} rows run again over small differences"
        table = output.table(title, "difference", "rows", "of the tree", "places", "what wins them back")
        table.columns[-1].justify = "left"
        for kind, lost in report.lost_by_kind.items():
            places = sum(miss.kind == kind for miss in report.misses)
            share = f"{lost / report.sizes.tree:.2%}"
            table.add_row(kind, output.number(lost), share, output.number(places), REMEDIES[kind])  # type: ignore[index]
        console.print(table)
    if not report.decoded:
        console.print("Only token ids were compared: --tokenizer names the tokenizer whose text is to be read.")


def _findings(console: Console, report: Report, most: int) -> None:
    firsts = {miss.kind: miss for miss in reversed(report.misses)}.values()  # the costliest of each kind
    others = [miss for miss in report.misses if not any(miss is first for first in firsts)]
    listed = sorted(firsts, key=lambda miss: -miss.rows)[:most]
    listed = sorted(listed + others[: most - len(listed)], key=lambda miss: -miss.rows)
    console.print(
        Text(f"\n{len(listed)} of {len(report.misses)} places, the costliest of each kind among them", "bold")
    )
    for miss in listed:
        console.print(_finding(miss))
    console.print(
        "Costs add up in this order of mending: what parts again behind a mended difference is a place of its own.",
        style="dim",
    )


def _finding(miss: Miss) -> Text:
    example = miss.example
    line = Text(f"  {miss.rows:>8,} rows  ", style="bold")
    line.append(miss.kind, style="bold cyan")
    line.append(f" at token {example.depth:,}, {miss.variants + 1} variants, {example.run:,} equal tokens behind\n")
    if example.text_a is None or example.text_b is None:
        line.append(f"           {example.tokens_a} tokens against {example.tokens_b}\n")
    else:
        line.append(f"           …{_visible((example.before or '')[-_TEXT // 2 :])}", style="dim")
        line.append(f"[{_cut(_visible(example.text_a))}]", style="green")
        line.append(f"[{_cut(_visible(example.text_b))}]", style="red")
        line.append(f"{_visible((example.after or '')[: _TEXT // 2])}…\n", style="dim")
    line.append(f"           {escaped(example.a)}\n           {escaped(example.b)}\n", style="dim")
    line.append(f"           groups: {_few(miss.groups)}", style="dim")
    return line


def _groups(console: Console, report: Report, most: int) -> None:
    def order(sizes: Sizes, lost: int) -> tuple[int, int]:
        return -lost, -sizes.per_call

    listed = sorted(report.groups, key=lambda group: order(group.sizes, group.lost))[:most]
    title = f"\n{len(listed)} of {len(report.groups)} groups, a tree each: where rows part, and why"
    columns = (
        "rows",
        "A",
        "B",
        "C",
        "A / C",
        "equal rows",
        "first at token",
        "sampled",
        "given",
        "one of each",
        "keys",
        "lost",
    )
    table = output.table(title, "group", *columns)
    shown = output.number
    for group in listed:
        sizes, why = group.sizes, group.partings
        table.add_row(
            Text(escaped(group.name) or "-"),
            *(shown(value) for value in (group.trajectories, sizes.per_call, sizes.prefix, sizes.tree)),
            f"{sizes.per_call / sizes.tree:.2f}",
            *(shown(value) for value in (group.duplicates, group.first_parting)),
            *(shown(why.get(reason, 0)) for reason in ("sampled", "given", "sampled or given", "keys")),
            shown(group.lost),
        )
    console.print(table)


def render_stability(console: Console, found: Stability | None) -> None:
    """Prints whether a chat template keeps what it rendered, and the first text that it does not."""
    if found is None:
        return
    console.print(Text(f"\nThe chat template, on {found.conversations:,} conversations", "bold"))
    if found.history is None:
        console.print("  Earlier turns stay as they were: every turn is a token prefix of the next.", highlight=False)
    else:
        console.print(
            f"  Earlier turns are rewritten in {found.rewritten:,} of them: read with --rows turn. The first place:",
            highlight=False,
        )
        change = found.history
        console.print(_change(change, f"message {change.message}, as it was", f"as message {change.later} sees it"))
    if found.prompt is not None:
        console.print(
            f"  {found.unprompted:,} of {found.turns:,} finished messages do not begin with their generation prompt: "
            "the response starts where they part. The first place:",
            highlight=False,
        )
        console.print(_change(found.prompt, "the generation prompt", f"message {found.prompt.message}"))


def _change(change: Change, first: str, second: str) -> Text:
    line = Text(f"    {escaped(change.place)}, token {change.token:,}\n", style="dim")
    line.append(f"    …{_visible(change.before)}\n", style="dim")
    line.append(f"    {first}: ", style="dim").append(f"[{_cut(_visible(change.first))}]\n", style="green")
    line.append(f"    {second}: ", style="dim").append(f"[{_cut(_visible(change.second))}]", style="red")
    return line


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(escaped(name) or "-" for name in names[:_NAMES]) + more


def _visible(text: str) -> str:
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]} … {text[-_TEXT // 2 :]}"
