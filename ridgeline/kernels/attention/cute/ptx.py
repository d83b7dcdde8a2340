"""Single instructions that the DSL does not emit as wanted."""

from __future__ import annotations

import struct

from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c in one rounding (mul and add stay apart in PTX, and ptxas may not join them)."""
    return Float32(
        mlir_math.fma(
            Float32(a).ir_value(loc=loc, ip=ip),
            Float32(b).ir_value(loc=loc, ip=ip),
            Float32(c).ir_value(loc=loc, ip=ip),
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def exp2(a: Float32, *, loc=None, ip=None) -> Float32:
    """2 ** a on the special function unit, 2 ulp, denormal results flushed to zero."""
    return _unary(a, "ex2.approx.ftz.f32 $0, $1;", loc, ip)


EXP2_POLYNOMIALS = {
    3: (1.0, 0.6932829, 0.24221101, 0.05500895),
    4: (1.0, 0.69312418, 0.24024099, 0.05590643, 0.00958286),
}
"""By degree: 2 ** f for f in [-1/2, 1/2], exactly 1 at 0, else of least relative error, 1.0e-4 and
2.9e-6 (iteratively reweighted least squares)."""


@dsl_user_op
def exp2_by_polynomial(a: Float32, degree: int, *, loc=None, ip=None) -> Float32:
    """2 ** a for a <= 126 without the special function unit: a = n + f with n the nearest integer,
    2 ** f by a polynomial, n added to its exponent. Of -127, and what is below, exactly 0."""
    coefficients = EXP2_POLYNOMIALS[degree]
    horner = "".join(f"fma.rn.f32 p, p, f, {_float_literal(c)}; " for c in coefficients[-2::-1])
    text = (
        "{ .reg .f32 x, shifted, n, f, p; .reg .b32 bits, power; "
        f"max.f32 x, $1, {_float_literal(-127.0)}; "
        f"add.rn.f32 shifted, x, {_float_literal(1.5 * 2**23)}; "
        f"sub.rn.f32 n, shifted, {_float_literal(1.5 * 2**23)}; "
        "sub.rn.f32 f, x, n; "
        f"mov.f32 p, {_float_literal(coefficients[-1])}; {horner}"
        "mov.b32 bits, shifted; shl.b32 bits, bits, 23; mov.b32 power, p; "
        "add.s32 power, power, bits; mov.b32 $0, power; }"
    )
    return _unary(a, text, loc, ip)


@dsl_user_op
def log2(a: Float32, *, loc=None, ip=None) -> Float32:
    """log2(a) on the special function unit; log2(0) is -inf."""
    return _unary(a, "lg2.approx.ftz.f32 $0, $1;", loc, ip)


@dsl_user_op
def reciprocal(a: Float32, *, loc=None, ip=None) -> Float32:
    """1 / a on the special function unit, 1 ulp."""
    return _unary(a, "rcp.approx.ftz.f32 $0, $1;", loc, ip)


@dsl_user_op
def pack(low: Float32, high: Float32, dtype, *, loc=None, ip=None) -> Int32:
    """Two fp32 rounded to a 16-bit pair in one instruction, `low` in the low half."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{kind}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def unpack(pair: Int32, dtype, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The two 16-bit values of a register as fp32, the low half first."""
    value = Int32(pair).ir_value(loc=loc, ip=ip)
    code = (
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        if dtype is BFloat16
        else "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
    )
    both = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32(), T.f32()]),
        [value],
        code,
        "=f,=f,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    halves = (llvm.extractvalue(T.f32(), both, [i], loc=loc, ip=ip) for i in range(2))
    low, high = (Float32(half) for half in halves)
    return low, high


@dsl_user_op
def add_to_global(pointer, a, b, c, d, *, loc=None, ip=None) -> None:
    """Four fp32 added atomically to 16 aligned bytes of global memory; nothing comes back."""
    _four_to_global("red.relaxed.gpu.global.add.v4.f32", pointer, (a, b, c, d), loc, ip)


@dsl_user_op
def load_acquire(pointer, *, loc=None, ip=None) -> Int32:
    """A word of global memory; what its writer released is seen after it."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
            "ld.acquire.gpu.global.b32 $0, [$1];",
            "=r,l",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def bulk_load(target, source, num_bytes, barrier, *, loc=None, ip=None) -> None:
    """A run of bytes (16-byte aligned, a multiple of 16) from global to shared memory by the copy
    engine; one thread issues it, the mbarrier counts the bytes."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(num_bytes).ir_value(loc=loc, ip=ip),
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
    ]
    llvm.inline_asm(
        None,
        operands,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def bulk_add(target, source, num_bytes, *, loc=None, ip=None) -> None:
    """A run of fp32 in shared memory added to global memory by the copy engine; one thread issues
    it, and its bulk group counts it."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(num_bytes).ir_value(loc=loc, ip=ip),
    ]
    llvm.inline_asm(
        None,
        operands,
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def bulk_send(target, source, num_bytes, barrier, rank, *, loc=None, ip=None) -> None:
    """A run of bytes of this block's shared memory to the same address space of block `rank` of the
    cluster by the copy engine; one thread issues it, that block's mbarrier counts the bytes.
    target and barrier are this block's addresses of what lies alike in the other."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(num_bytes).ir_value(loc=loc, ip=ip),
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(rank).ir_value(loc=loc, ip=ip),
    ]
    llvm.inline_asm(
        None,
        operands,
        "{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, $0, $4; "
        "mapa.shared::cluster.u32 counter, $3, $4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[there], [$1], $2, [counter]; }",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def store_vector(pointer, a, b, c, d, *, loc=None, ip=None) -> None:
    """Four fp32 to 16 aligned bytes of global memory."""
    _four_to_global("st.global.v4.f32", pointer, (a, b, c, d), loc, ip)


@dsl_user_op
def load_vector(pointer, *, loc=None, ip=None) -> tuple[Float32, Float32, Float32, Float32]:
    """Four fp32 of 16 aligned bytes of global memory, as L2 has them: another multiprocessor may
    have written them in this launch."""
    four = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    parts = [llvm.extractvalue(T.f32(), four, [i], loc=loc, ip=ip) for i in range(4)]
    a, b, c, d = (Float32(part) for part in parts)
    return a, b, c, d


@dsl_user_op
def store_word(pointer, word, *, loc=None, ip=None) -> None:
    """A register to 4 aligned bytes of global memory."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Int32(word).ir_value(loc=loc, ip=ip),
        ],
        "st.global.b32 [$0], $1;",
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _four_to_global(instruction: str, pointer, four: tuple, loc, ip) -> None:
    """An instruction with an address and four fp32."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None,
        [address, *(Float32(x).ir_value(loc=loc, ip=ip) for x in four)],
        f"{instruction} [$0], {{$1, $2, $3, $4}};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _unary(a: Float32, text: str, loc, ip) -> Float32:
    """One fp32 out of another, without side effects."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(loc=loc, ip=ip)],
            text,
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def _float_literal(value: float) -> str:
    """PTX's spelling of an fp32 constant."""
    return f"0f{struct.pack('>f', value).hex().upper()}"
