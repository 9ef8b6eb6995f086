"""Files that appear whole or not at all."""

import contextlib
import os
import platform
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

__all__ = ["check_target", "process_runs", "replacing", "write_text"]


def check_target(path: str | PathLike[str]) -> None:
    """Refuses a path that no file can be written to, before what would be written is computed.

    Raises:
        ValueError: the folder does not exist, or `path` is a folder.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{target}: expected a file in a folder that exists, got no folder {target.parent}; make it")
    if target.is_dir():
        raise ValueError(f"{target}: expected the name of a file, got a folder; name a file in it")


def _prefix(target: Path) -> str:
    return f".{target.name}.{platform.node()}-"


def _remove_left_over(target: Path) -> None:
    """Removes temporary files of `target` whose processes, all of this host, were killed before they could."""
    prefix = _prefix(target)
    for name in os.listdir(target.parent):
        number = name.removeprefix(prefix).removesuffix(".tmp")
        if name == f"{prefix}{number}.tmp" and number.isdecimal() and not process_runs(int(number)):
            with contextlib.suppress(OSError):
                (target.parent / name).unlink()


def process_runs(process: int) -> bool:
    """Whether a process of that number runs on this host."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's
    return True


@contextlib.contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`: what is written there takes the name `path` at the end, and goes on an error.

    Raises:
        ValueError: the folder does not exist, or `path` is a folder.
        OSError: the file cannot be written; it names `path`, not the temporary one.
    """
    check_target(path)
    target = Path(path)
    _remove_left_over(target)
    temporary = target.with_name(f"{_prefix(target)}{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        if error.filename is None or Path(error.filename) != temporary:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with contextlib.suppress(OSError):  # an error on the way out would hide the one that matters
            temporary.unlink(missing_ok=True)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Writes UTF-8 text; errors as of `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
