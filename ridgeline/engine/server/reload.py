"""New weights while requests go on: asked for over HTTP, or found in a watched folder."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.engine.errors import ReloadError, UnavailableError
from ridgeline.engine.server.errors import ApiError, invalid, must
from ridgeline.engine.server.state import ServerState, log


async def reload_weights(state: ServerState, body: Any) -> dict[str, Any]:
    """POST /admin/reload: {"folder": NAME}, a folder below the reload root; {} for the folder that
    was served first. Raises: ApiError."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_type")
    for name in body:
        if name != "folder":
            raise invalid(name[:100], f"unknown parameter: {name[:100]!r}", "unknown_parameter")
    if state.folder is None:
        raise ApiError(409, "this server was not started from a folder", code="no_folder")
    folder = state.folder
    if body.get("folder") is not None:
        folder = _below_root(state, body["folder"])
    await swap(state, folder)
    return {"status": "reloaded", "folder": folder.name, "reloads": state.engine.stats().reloads}


def _below_root(state: ServerState, name: Any) -> Path:
    """A folder by its name below the root, never by a path out of it."""
    root = state.config.reload_root or state.config.watch
    if not isinstance(name, str):
        raise must("folder", "be a string", name, "invalid_type")
    if root is None:
        raise invalid("folder", "'folder' needs a server started with --reload-root or --watch")
    root = root.resolve()
    try:
        folder = (root / name).resolve()
        found = folder.is_dir() and folder != root and folder.is_relative_to(root)
    except (OSError, ValueError):
        found = False
    if not found:
        raise must("folder", "name a folder below the reload root", name)
    return folder


async def swap(state: ServerState, folder: Path) -> None:
    """Load a folder and swap to it between two steps; one at a time. Raises: ApiError."""
    if state.reload_lock.locked():
        raise ApiError(409, "a reload is under way", code="reloading")
    async with state.reload_lock:
        try:
            await state.engine.reload(folder)
        except ReloadError as error:
            raise ApiError(409, str(error), param="folder", code="reload_refused") from error
        except (ValueError, TypeError, UserError, OSError) as error:
            raise invalid("folder", str(error), "reload_failed") from error
    log.info("reloaded %s", folder)


async def watch(state: ServerState, root: Path) -> None:
    """Load the newest model folder that appears below a root, until cancelled.

    A folder counts once it has a config.json and weights and nothing in it has changed between two
    looks: trainers of this project rename whole folders into place, others write file by file.
    """
    seen, candidate = _newest(root), None
    while True:
        await asyncio.sleep(state.config.watch_every_s)
        found = await asyncio.to_thread(_newest, root)
        if found is None or found == seen:
            candidate = None
            continue
        if found != candidate:
            candidate = found
            continue
        candidate = None
        try:
            await swap(state, found[0])
        except ApiError as error:
            if error.code == "reloading":
                continue  # another reload runs: its turn comes
            log.error("watched folder %s was not loaded: %s", found[0], error)
        except UnavailableError as error:
            log.error("watched folder %s was not loaded: %s", found[0], error)
        except Exception:  # of the loading: the next folder may be better
            log.exception("watched folder %s was not loaded", found[0])
        seen = found


def _newest(root: Path) -> tuple[Path, float, int] | None:
    """(folder, time of its last change, bytes) of the newest model folder; None without one."""
    found: list[tuple[float, Path, int]] = []
    with contextlib.suppress(OSError):
        for folder in [root, *root.iterdir()]:
            if folder.name.startswith(".") or not (folder / "config.json").is_file():
                continue
            with contextlib.suppress(OSError):
                stats = [path.stat() for path in folder.iterdir()]
                if any(path.suffix == ".safetensors" for path in folder.iterdir()):
                    changed = max(each.st_mtime for each in stats)
                    found.append((changed, folder, sum(each.st_size for each in stats)))
    if not found:
        return None
    changed, folder, size = max(found)
    return folder, changed, size
