from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.core import files
from ridgeline.core.errors import UserError


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a.txt"
    files.atomic_write_text(target, "old")
    with pytest.raises(RuntimeError, match="stop"), files.atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    files.atomic_write_text(target, "new")
    assert target.read_text() == "new"


def test_full_disk_leaves_the_old_file_and_says_so(tmp_path):
    target = tmp_path / "a.txt"
    files.atomic_write_text(target, "old")
    with pytest.raises(UserError, match=r"could not write .*a\.txt: No space left"):
        with files.atomic_path(target):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_is_published_whole(tmp_path):
    target = tmp_path / "model"
    with files.atomic_dir(target) as temporary:
        (temporary / "x").write_text("1")
    assert (target / "x").read_text() == "1"
    with pytest.raises(UserError, match="exists already"), files.atomic_dir(target):
        pass
    with pytest.raises(KeyboardInterrupt), files.atomic_dir(target, overwrite=True) as temporary:
        (temporary / "x").write_text("2")
        raise KeyboardInterrupt
    assert (target / "x").read_text() == "1"
    with files.atomic_dir(target, overwrite=True) as temporary:
        (temporary / "y").write_text("3")
    assert [p.name for p in target.iterdir()] == ["y"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_full_disk_in_a_folder_keeps_the_old_folder(tmp_path):
    target = tmp_path / "model"
    with files.atomic_dir(target) as temporary:
        (temporary / "x").write_text("1")
    with pytest.raises(UserError, match="No space left"):
        with files.atomic_dir(target, overwrite=True) as temporary:
            raise OSError(errno.ENOSPC, "No space left on device")
    assert (target / "x").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_permissions_follow_the_umask(tmp_path):
    files.atomic_write_text(tmp_path / "a.txt", "x")
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o666 & ~files._umask()


def test_permissions_in_a_folder_follow_the_umask(tmp_path):
    """Whatever its writer gave a file: safetensors makes its own 0600."""
    before = os.umask(0o027)
    try:
        with files.atomic_dir(tmp_path / "model") as temporary:
            save_file({"x": torch.zeros(1)}, temporary / "model.safetensors")
            (temporary / "deep").mkdir()
            (temporary / "deep" / "closed").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "model").rglob("*")}
    assert modes == {"model.safetensors": 0o640, "closed": 0o640, "deep": 0o750}
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stop_between_the_two_renames_brings_the_old_folder_back(tmp_path, monkeypatch, stop):
    target = tmp_path / "model"
    with files.atomic_dir(target) as temporary:
        (temporary / "x").write_text("1")
    rename, calls = os.replace, []

    def second_fails(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise stop
        rename(source, destination)

    monkeypatch.setattr(files.os, "replace", second_fails)
    with pytest.raises(stop), files.atomic_dir(target, overwrite=True) as temporary:
        (temporary / "x").write_text("2")
    assert (target / "x").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_place_that_cannot_hold_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for writer in (files.atomic_path, files.atomic_dir):
        with pytest.raises(UserError, match="could not write .*Not a directory"):
            with writer(tmp_path / "file" / "below" / "x"):
                pass
