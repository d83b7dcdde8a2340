"""A user's score_mod or mask_mod as Triton functions: the graph of its torch operations, printed.

    score_mod, (score, b, h, i, j) -> score          the graph that make_fx records
    its gradient                                     the graph of autograd on it
    mask_mod, (b, h, i, j) -> bool

Each operation becomes a line of a Triton function (OPERATIONS); what has none is refused by name.
Tensors that the mod indexes become arguments, with indices that wrap and are clamped to the tensor:
kernels evaluate mods also past the end of a sequence, where the result is not used. The source is
the compile key: mods that read alike share a kernel. Nothing is imported from a user's file.
Source: the idea is FlexAttention's; the printer is our own.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.core.errors import unsupported
from ridgeline.kernels.attention.mods import Mods, score_gradient
from ridgeline.kernels.attention.triton_common import tanh


@dataclass(frozen=True, slots=True)
class ModCode:
    """The compiled functions of a call's mods; `key`, the hash of their source, names them."""

    key: str
    scored: bool
    masked: bool
    functions: Any = field(repr=False, compare=False)
    """Has score, grad and mask: Triton functions, None for what is not there."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Triton functions, attributes of a compile key."""

    score: Any
    grad: Any
    mask: Any


@triton.jit
def floor_div(a, b):
    """Integer quotient towards minus infinity, as torch's."""
    q = a // b
    return tl.where((a - q * b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def remainder(a, b):
    """Of `floor_div`."""
    return a - floor_div(a, b) * b


@triton.jit
def wrapped(index, size):
    """A torch index as an offset inside [0, size)."""
    index = index.to(tl.int32)
    return tl.minimum(tl.maximum(tl.where(index < 0, index + size, index), 0), size - 1)


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "__and__": "&",
    "__or__": "|", "__xor__": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
}  # fmt: skip
_CALLS = {
    "abs": "tl.abs({0})", "neg": "(-{0})", "exp": "tl.exp({0}.to(tl.float32))",
    "exp2": "tl.exp2({0}.to(tl.float32))", "log": "tl.log({0}.to(tl.float32))",
    "log2": "tl.log2({0}.to(tl.float32))", "sqrt": "tl.sqrt({0}.to(tl.float32))",
    "rsqrt": "tl.rsqrt({0}.to(tl.float32))", "sin": "tl.sin({0}.to(tl.float32))",
    "cos": "tl.cos({0}.to(tl.float32))", "tanh": "tanh({0}.to(tl.float32))",
    "sigmoid": "tl.sigmoid({0}.to(tl.float32))", "relu": "tl.maximum({0}, 0)",
    "square": "({0} * {0})", "reciprocal": "(1.0 / {0})", "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})", "where": "tl.where({0}, {1}, {2})",
    "logical_and": "(({0} != 0) & ({1} != 0))", "logical_or": "(({0} != 0) | ({1} != 0))",
    "logical_xor": "(({0} != 0) != ({1} != 0))", "logical_not": "({0} == 0)",
    "bitwise_not": "(~{0})", "sgn": "(({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32))",
    "sign": "(({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32))",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))", "sigmoid_backward": "({0} * {1} * (1.0 - {1}))",
    "threshold_backward": "tl.where({1} > {2}, {0}, 0.0)", "clamp_min": "tl.maximum({0}, {1})",
    "clamp_max": "tl.minimum({0}, {1})", "masked_fill": "tl.where({1}, {2}, {0})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
}  # fmt: skip
_SAME = ("alias", "detach", "clone", "expand", "lift_fresh_copy", "lift_fresh", "view_as")
_CONSTANT = {"ones_like": "1", "zeros_like": "0"}
_DTYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float32", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.int64: "tl.int32", torch.int32: "tl.int32",
    torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip
_SPECIAL = ("div", "floor_divide", "remainder", "pow", "clamp", "index")
OPERATIONS = sorted(name for name in {*_BINARY, *_CALLS, *_SPECIAL} if "_back" not in name)


def _refused(what: object, must: str) -> Exception:
    do = f"use impl='ref', or write it with {', '.join(OPERATIONS)}"
    return unsupported("flex_attn_func", "a mod", must, what, do)


def _name_of(node: torch.fx.Node) -> str:
    """aten.add.Tensor -> add, aten.add_.Tensor -> add."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    return name if name.startswith("__") else name.removesuffix("_")


class _Printer:
    """One traced graph as the body of a Triton function; captured tensors are kept in `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.names: dict[Any, str] = {}
        self.lines: list[str] = []

    def text(self, value: Any) -> str:
        """An argument of an operation: a value computed before, or a literal."""
        if isinstance(value, torch.fx.Node):
            return self.names[value]
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, (bool, int)):
            return repr(value)
        raise _refused(type(value).__name__, "have tensors and numbers as operands")

    def captured(self, tensor: torch.Tensor) -> int:
        """The place of a captured tensor among the arguments."""
        for n, known in enumerate(self.tensors):
            if known is tensor:
                return n
        if tensor.requires_grad:
            raise unsupported(
                "flex_attn_func", "a captured tensor", "not need gradients", "requires_grad",
                "detach it, or give it as bias",
            )  # fmt: skip
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def indexed(self, tensor: torch.Tensor, indices: list[Any]) -> str:
        """A load of one element a place."""
        if len(indices) != tensor.dim() or any(index is None for index in indices):
            got = f"{len(indices)} indices into {tensor.dim()} dims"
            raise _refused(got, "index every dim of a captured tensor")
        n = self.captured(tensor)
        offset = "0"
        for dim, index in enumerate(indices):
            size = f"aux[{n}][1][{dim}]"
            offset = f"({offset}) * {size} + wrapped({self.text(index)}, {size})"
        return f"tl.load(aux[{n}][0] + ({offset}))"

    def operation(self, node: torch.fx.Node, constants: dict[Any, torch.Tensor]) -> str:
        """The Triton expression of a node."""
        name, args = _name_of(node), node.args
        if name == "index":
            source: Any = args[0]
            if source not in constants:
                raise _refused("an index into a computed value", "index captured tensors")
            return self.indexed(constants[source], list(args[1]))  # type: ignore[arg-type]
        texts = [self.text(a) for a in args if isinstance(a, (torch.fx.Node, bool, int, float))]
        if name in _SAME:
            return texts[0]
        if name == "_to_copy":
            dtype: Any = node.kwargs.get("dtype")
            return texts[0] if dtype is None else f"{texts[0]}.to({_DTYPES[dtype]})"
        if name in _CONSTANT:
            return _CONSTANT[name]
        if name in ("full_like", "scalar_tensor"):
            return texts[-1]
        if name == "full":
            return self.text(args[1])
        if name in _BINARY:
            alpha = node.kwargs.get("alpha", 1)
            right = texts[1] if alpha == 1 else f"{texts[1]} * {alpha}"
            return f"({texts[0]} {_BINARY[name]} {right})"
        if name == "rsub":
            return f"({texts[1]} - {texts[0]})"
        return self._special(name, texts, node)

    def _special(self, name: str, texts: list[str], node: torch.fx.Node) -> str:
        if name == "div" and node.kwargs.get("rounding_mode") == "floor":
            name = "floor_divide"
        if name in ("floor_divide", "remainder"):
            whole = not node.meta["val"].is_floating_point()
            if whole:
                helper = "floor_div" if name == "floor_divide" else "remainder"
                return f"{helper}({texts[0]}, {texts[1]})"
            if name == "floor_divide":
                return f"tl.floor({texts[0]} / {texts[1]})"
            return f"({texts[0]} - tl.floor({texts[0]} / {texts[1]}) * {texts[1]})"
        if name == "div" and node.kwargs.get("rounding_mode") is None:
            return f"({texts[0]} * 1.0 / {texts[1]})"
        if name == "pow" and isinstance(power := node.args[1], (int, float)):
            if power in (1, 2, 3, 4):
                return "(" + " * ".join([texts[0]] * int(power)) + ")"
            if power in (0.5, -0.5):
                return f"tl.{'sqrt' if power > 0 else 'rsqrt'}({texts[0]}.to(tl.float32))"
        if name == "clamp":
            found = texts[0]
            low, high = (*node.args[1:], None, None)[:2]
            if low is not None:
                found = f"tl.maximum({found}, {self.text(low)})"
            return found if high is None else f"tl.minimum({found}, {self.text(high)})"
        if name in _CALLS:
            return _CALLS[name].format(*texts)
        raise _refused(f"aten.{name}", "use operations that have a Triton form")

    def body(self, module: torch.fx.GraphModule, names: list[str]) -> str:
        """The result's expression; `lines` then computes what it needs."""
        constants: dict[Any, torch.Tensor] = {}
        inputs = iter(names)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = next(inputs)
            elif node.op == "get_attr":
                constants[node] = getattr(module, node.target)
                if constants[node].dim() == 0:
                    place = self.captured(constants[node])
                    self.names[node] = self._line(f"tl.load(aux[{place}][0])")
            elif node.op == "call_function":
                source: Any = node.args[0] if node.args else None
                if source in constants and source not in self.names and _name_of(node) in _SAME:
                    constants[node] = constants[source]
                    continue
                self.names[node] = self._line(self.operation(node, constants))
            elif node.op == "output":
                result: Any = node.args[0]
                return self.text(result[0] if isinstance(result, (tuple, list)) else result)
        raise AssertionError("a graph without a result")

    def _line(self, expression: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return name


def _traced(mod: Callable[..., torch.Tensor], examples: list[torch.Tensor]) -> torch.fx.GraphModule:
    module = make_fx(mod)(*examples)
    _propagate(module, examples)
    return module


def _propagate(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> None:
    """Each node's example value under meta["val"]: dtypes decide what // means."""

    class Kept(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            n.meta["val"] = value
            return value

    Kept(module).run(*examples)


def _examples(device: torch.device) -> list[torch.Tensor]:
    """score, b, h, i, j: shapes as the kernels' tiles broadcast, all at place 0."""
    score = torch.zeros(2, 3, device=device)
    shapes = ((1, 1), (1, 1), (2, 1), (1, 3))
    return [score, *(torch.zeros(s, dtype=torch.int32, device=device) for s in shapes)]


def _function(name: str, parameters: list[str], printer: _Printer, result: str) -> str:
    head = f"@triton.jit\ndef {name}({', '.join(parameters)}, aux):\n"
    return head + "\n".join([*printer.lines, f"    return {result}"]) + "\n"


def source_of(mods: Mods, device: torch.device) -> tuple[str, list[torch.Tensor]]:
    """(Triton source of the mods, tensors that they capture).

    Raises: NotImplementedError for an operation without a Triton form.
    """
    tensors: list[torch.Tensor] = []
    parts: list[str] = []
    score, *places = _examples(device)
    names = ["score", "b", "h", "i", "j"]
    if (mod := mods.score) is not None:

        def gradient(score, b, h, i, j, grad):
            return score_gradient(mod, score, (b, h, i, j), grad)

        printer = _Printer(tensors)
        result = printer.body(_traced(mod, [score, *places]), names)
        wide = f"({result}) + tl.zeros_like(score)"
        parts.append(_function("score_mod", names, printer, wide))
        printer = _Printer(tensors)
        graph = _traced(gradient, [score, *places, torch.ones_like(score)])
        result = printer.body(graph, [*names, "grad"])
        wide = f"({result}) + tl.zeros_like(score)"
        parts.append(_function("grad_mod", [*names, "grad"], printer, wide))
    if mods.mask is not None:
        printer = _Printer(tensors)
        result = printer.body(_traced(mods.mask, places), names[1:])
        parts.append(_function("mask_mod", names[1:], printer, f"({result}) != 0"))
    return "\n\n".join(parts), tensors


_compiled: dict[str, ModCode] = {}


def code_of(mods: Mods, device: torch.device) -> tuple[ModCode, tuple[Any, ...] | None]:
    """(functions, captured tensors as (tensor, sizes) tuples or None) of a call's mods."""
    source, tensors = source_of(mods, device)
    for tensor in tensors:
        if tensor.device != device:
            got = f"a tensor on {tensor.device}"
            must = f"capture tensors on {device}"
            raise unsupported("flex_attn_func", "a mod", must, got, "move it")
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    if key not in _compiled:
        _compiled[key] = _compile(source, key, mods)
    aux = tuple((tensor.contiguous(), (*tensor.shape, 1)) for tensor in tensors)
    return _compiled[key], aux or None


def _compile(source: str, key: str, mods: Mods) -> ModCode:
    """Triton reads a function's source through linecache: no file is written."""
    filename = f"<ridgeline mods {key}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    namespace: dict[str, Any] = {
        "__name__": f"ridgeline_mods_{key}", "triton": triton, "tl": tl, "tanh": tanh,
        "floor_div": floor_div, "remainder": remainder, "wrapped": wrapped,
    }  # fmt: skip
    exec(compile(source, filename, "exec"), namespace)
    functions = Functions(*(namespace.get(name) for name in ("score_mod", "grad_mod", "mask_mod")))
    return ModCode(key, mods.score is not None, mods.mask is not None, functions)
