"""One trainer in a folder at a time."""

import contextlib
import json
import os
import platform
import weakref
from pathlib import Path
from typing import Any

from harts.files import process_runs

__all__ = ["RunLock", "check_unlocked"]

_NAME = "run.lock"


class RunLock:
    """Keeps other trainers out of a folder while it lives; one that died on this host stands in nobody's way.

    The file names the host and the process. The operating system holds it locked for as long as the process lives, so
    that a number which another process got since is not mistaken for the owner.

    Args:
        out: the folder, which exists.

    Raises:
        ValueError: another trainer has it, or had it on another host and did not say that it ended.
        OSError: the file cannot be written.
    """

    def __init__(self, out: Path) -> None:
        path = out / _NAME
        file = _open_locked(path)
        try:
            _check_content(path, _read(file))
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"host": platform.node(), "pid": os.getpid()}).encode() + b"\n", 0)
        except BaseException:
            os.close(file)
            raise
        self.release = weakref.finalize(self, _release, path, file, os.getpid())


def check_unlocked(out: Path) -> None:
    """Refuses a folder that another trainer has, without taking it.

    Raises:
        ValueError: another trainer has it, or had it on another host and did not say that it ended.
    """
    path = out / _NAME
    if not path.exists():
        return
    file = _open_locked(path)
    try:
        _check_content(path, _read(file))
    finally:
        os.close(file)


def _open_locked(path: Path) -> int:
    """The file, locked by this process; waits for nobody."""
    import fcntl

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(file)
            os.close(file)
            raise ValueError(_in_use(path, owner, "end that run, or pass another folder")) from None
        except OSError:  # a file system without locks: the number of the process has to do
            owner = _read(file)
            if owner.get("host") == platform.node() and process_runs(int(owner.get("pid", 0))):
                os.close(file)
                raise ValueError(_in_use(path, owner, "end that run, or pass another folder")) from None
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)  # its owner removed it between the two calls


def _read(file: int) -> dict[str, Any]:
    """Owner by the file's content; empty where it is not one."""
    try:
        content = json.loads(os.pread(file, 4096, 0))
        return {"host": str(content["host"]), "pid": int(content["pid"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _check_content(path: Path, owner: dict[str, Any]) -> None:
    """A locked file without a live owner of this host is stale; of another host one cannot tell."""
    if owner and owner["host"] != platform.node():
        raise ValueError(_in_use(path, owner, f"if that process no longer runs, delete {path}"))


def _in_use(path: Path, owner: dict[str, Any], action: str) -> str:
    who = f"process {owner['pid']} on host {owner['host']}" if owner else "another process"
    return f"{path.parent}: expected a folder that no other trainer writes to, got one in use by {who}; {action}"


def _release(path: Path, file: int, process: int) -> None:
    if process == os.getpid():  # not in a fork
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                path.unlink()
    os.close(file)
