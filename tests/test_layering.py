"""Imports go down only (docs/architecture.md): a walk over every import, nested ones too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ridgeline"

# A room may import the rooms listed; itself always.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "formats": {"core"},
    "kernels": {"formats", "core"},
    "nn": {"kernels", "formats", "core"},
    "quant": {"kernels", "formats", "core"},
    "parallel": {"nn", "quant", "kernels", "formats", "core"},
    "plan": {"core"},
    "train": {"parallel", "nn", "kernels", "core"},
    "engine": {"parallel", "nn", "quant", "kernels", "formats", "core"},
    "integrations": {"kernels", "quant", "formats", "core"},
    "report": {"core"},
    "cli": {
        "report", "integrations", "engine", "train", "plan", "parallel", "quant", "nn",
        "kernels", "formats", "core",
    },
}  # fmt: skip
NO_TORCH_ROOMS = ("plan",)
NO_TORCH_FILES = ("engine/sequence.py", "engine/blocks.py", "engine/scheduler.py")


def _imports(path: Path) -> list[str]:
    """Full names of what a file imports, anywhere in it, TYPE_CHECKING blocks left out."""
    found: list[str] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                walk(child)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text(encoding="utf-8")))
    return found


def _violations(files: list[Path], package: Path) -> list[str]:
    wrong = []
    for path in files:
        relative = path.relative_to(package)
        room = relative.parts[0] if len(relative.parts) > 1 else None
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] != "ridgeline" or len(parts) < 2 or room is None:
                continue
            target = parts[1]
            if target in MAY_IMPORT and target != room and target not in MAY_IMPORT[room]:
                wrong.append(f"{relative} imports {name}: {room} must not import {target}")
    return wrong


def test_imports_go_down_only():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    assert _violations(files, PACKAGE) == []


def test_the_walk_sees_an_upward_import(tmp_path):
    bad = tmp_path / "core" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("def f():\n    from ridgeline.kernels.attention import problem\n")
    assert _violations([bad], tmp_path) == [
        "core/bad.py imports ridgeline.kernels.attention.problem: core must not import kernels"
    ]


def test_every_room_has_a_rule():
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(MAY_IMPORT)


def test_only_env_reads_the_environment():
    readers = [
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert set(readers) <= {"core/env.py"}


def test_planners_and_schedulers_import_no_torch():
    files = [p for room in NO_TORCH_ROOMS for p in (PACKAGE / room).rglob("*.py")]
    files += [PACKAGE / name for name in NO_TORCH_FILES if (PACKAGE / name).exists()]
    for path in files:
        assert not any(name.split(".")[0] == "torch" for name in _imports(path)), path


@pytest.mark.parametrize("module", ["ridgeline", "ridgeline.kernels.attention"])
def test_import_stays_light(module):
    script = (
        f"import sys, {module}\n"
        "names = ('triton', 'cutlass', 'transformers', 'matplotlib')\n"
        "heavy = [m for m in names if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
