"""Size budgets of STYLE: a file that grows two ideas is split by concept, not waived."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LINES, KERNEL_FILE_LINES = 500, 800
FUNCTION_LINES, DEVICE_FUNCTION_LINES = 60, 200
PARAMETERS = 8

# Functions that carry FlashAttention's public signature, parameter for parameter.
PUBLIC_SIGNATURES = {
    "flash_attn_func",
    "flex_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "backward",  # the contract of an attention implementation: kernels/attention/problem.py
}


def is_kernel_file(path: Path) -> bool:
    return "kernels" in path.parts and any(
        path.stem.startswith(prefix) or prefix in path.parts for prefix in ("triton", "cute")
    )


def is_device(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        "jit" in ast.unparse(d) or "kernel" in ast.unparse(d) for d in function.decorator_list
    )


def is_custom_op(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        "custom_op" in ast.unparse(d) or "register_" in ast.unparse(d)
        for d in function.decorator_list
    )


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = function.body[1].lineno if has_docstring and len(function.body) > 1 else first.lineno
    return (function.end_lineno or start) - start + 1


def over_budget(path: Path, source: str) -> list[str]:
    kernel = is_kernel_file(path)
    wrong = []
    lines = source.count("\n") + 1
    if lines > (KERNEL_FILE_LINES if kernel else FILE_LINES):
        wrong.append(f"{path}: {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        device = kernel and is_device(node)
        length = body_lines(node)
        if length > (DEVICE_FUNCTION_LINES if device else FUNCTION_LINES):
            wrong.append(f"{path}:{node.lineno} {node.name}: {length} lines")
        arguments = node.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        free = kernel or node.name in PUBLIC_SIGNATURES or is_custom_op(node)
        if not free and count > PARAMETERS:
            wrong.append(f"{path}:{node.lineno} {node.name}: {count} parameters")
    return wrong


def test_budgets_hold():
    wrong = []
    for path in sorted((ROOT / "ridgeline").rglob("*.py")):
        wrong += over_budget(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    assert wrong == []


def test_a_long_function_is_seen():
    source = "def f():\n" + "    x = 1\n" * (FUNCTION_LINES + 1)
    assert over_budget(Path("ridgeline/nn/x.py"), source) == [
        f"ridgeline/nn/x.py:1 f: {FUNCTION_LINES + 1} lines"
    ]


def test_init_files_only_reexport():
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign)
    for path in (ROOT / "ridgeline").rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert isinstance(node, allowed), f"{path}:{node.lineno} {type(node).__name__}"
