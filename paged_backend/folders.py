"""Where this user's files are kept, also in a container whose user has no home (``docker run --user``, OpenShift)."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger("paged_backend")


def user_cache() -> Path:
    """``XDG_CACHE_HOME``, else ``.cache`` in the user's home; where that cannot be, a folder in the temporary one.

    Raises OSError if somebody else made that folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base)
    home = _home()
    return home / ".cache" if home is not None and _can_be_written(home / ".cache") else _private_folder()


def hub_cache() -> Path | None:
    """``cache_dir`` for ``huggingface_hub``: None for its own choice, which needs a home or a folder that is named."""
    chosen = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
    if _home() is not None or any(os.environ.get(name) for name in chosen):
        return None
    return _private_folder() / "huggingface"


def _home() -> Path | None:
    try:
        return Path.home()
    except (RuntimeError, KeyError):  # no HOME, and no entry for the user
        return None


def _can_be_written(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _private_folder() -> Path:
    """What lies in it is loaded into this process, so nobody else may have made it or write to it."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    folder = Path(tempfile.gettempdir()) / f"paged_backend-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if user != "" and (found.st_uid != user or stat.S_IMODE(found.st_mode) & 0o022 or folder.is_symlink()):
        raise PermissionError(f"{folder} belongs to somebody else")
    logger.warning("this user has no home that can be written: what is cached goes to %s", folder)
    return folder
