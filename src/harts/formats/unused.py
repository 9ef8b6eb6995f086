"""Fields that are there and are not read: named once a file, so that none is without effect unnoticed."""

import logging
from collections.abc import Collection, Sequence

from harts.escapes import escaped
from harts.formats.rows import Row

__all__ = ["ALWAYS", "Unused"]

_LOG = logging.getLogger("harts.formats")
ALWAYS = frozenset({"id", "group", "reward", "temperature", "meta", "source"})
"""Fields that rows of every source may have."""


class Unused:
    """Says which fields of a file's rows no reader looks at; each name once, on the log `harts.formats`."""

    def __init__(self, fmt: str, read: Collection[str], choices: Sequence[Sequence[str]]) -> None:
        """Args:
        fmt: the source's name, for the message.
        read: names that are read.
        choices: of each of these, the first name that a row has is read, and no other.
        """
        self._fmt, self._read, self._choices = fmt, ALWAYS | set(read), choices
        self._said: set[str] = set()

    def look(self, row: Row) -> None:
        """Logs a warning if the row has fields that are not read and were not named before."""
        have = {str(name) for name, value in row.fields.items() if value is not None}
        read = set(self._read)
        for names in self._choices:
            present = [name for name in names if name in have]
            read -= set(names)
            read |= set(present[:1])
        self.name(row, have - read)

    def name(self, row: Row, names: Collection[str]) -> None:
        """Logs a warning with those of these fields that were not named before."""
        new = sorted(set(names) - self._said)
        if new:
            self._said.update(new)
            _LOG.warning(
                "%s: present and not used: %s (read as %s; docs/data.md has the fields that are)",
                escaped(row.place),
                escaped(", ".join(new)),
                self._fmt,
            )
