"""A user without a home, as containers have: everything that is cached finds a place that is this user's own."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from paged_backend import folders
from paged_backend.errors import ModelLoadError
from paged_backend.folders import hub_cache, user_cache

NAMES = ("HOME", "XDG_CACHE_HOME", "PAGED_BACKEND_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user without a home; the temporary folder is ``tmp_path``."""

    def missing(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", missing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders._private_folder.cache_clear()
    yield tmp_path
    folders._private_folder.cache_clear()


def test_without_a_home_caches_go_to_a_folder_of_the_user_s_own_said_once(nobody, caplog):
    from paged_backend.kernels.cpu.build import cache_dir

    own = nobody / f"paged_backend-{os.getuid()}"
    assert user_cache() == own
    assert cache_dir() == own / "paged_backend"
    assert hub_cache() == own / "huggingface"
    assert own.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1
    assert str(own) in caplog.text


def test_a_folder_that_others_can_write_is_not_loaded_from(nobody):
    from paged_backend.kernels.cpu.build import KernelBuildError, cache_dir

    own = nobody / f"paged_backend-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(KernelBuildError, match="set PAGED_BACKEND_CACHE"):
        cache_dir()


def test_a_link_in_that_place_is_not_followed(nobody):
    elsewhere = nobody / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (nobody / f"paged_backend-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        user_cache()


def test_a_home_and_what_the_environment_names_come_first(nobody, monkeypatch):
    monkeypatch.setenv("HOME", str(nobody))
    assert user_cache() == nobody / ".cache"
    assert hub_cache() is None
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nobody / "xdg"))
    assert user_cache() == nobody / "xdg"
    assert hub_cache() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HF_HOME", str(nobody / "hf"))
    assert hub_cache() is None


def test_a_home_that_cannot_be_written_is_as_good_as_none(nobody, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/x")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    assert user_cache() == nobody / f"paged_backend-{os.getuid()}"


def test_a_name_is_looked_up_without_a_home(nobody, monkeypatch):
    from paged_backend.checkpoints.resolve import resolve_model

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="not in the local cache"):
        resolve_model("someone/some-model")
    with pytest.raises(ModelLoadError, match="there is no folder"):
        resolve_model("~/some-model")
    assert not Path("~").exists()
