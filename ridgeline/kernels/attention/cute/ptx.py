"""Single instructions that the DSL does not emit as wanted."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op

ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: adding it leaves an fp32's nearest integer in the low mantissa bits."""
EXP2_POLYNOMIAL = (0.99992807, 0.69326099, 0.24261113, 0.05517166)
"""Coefficients of 2^f on [-0.5, 0.5], lowest first."""


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
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(loc=loc, ip=ip)],
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def exp2_polynomial(a: Float32) -> Float32:
    """2 ** a without the special function unit, a <= 127; relative error 7.5e-5 (bf16: 4e-3).

    a = n + f with f in [-0.5, 0.5]: n lands in the low bits of a + 1.5 * 2^23, 2^f is a polynomial
    of degree 3 (minimax on the interval), and n is added to its exponent field. Below 2^-125 the
    argument is held there. Source of the idea: FlashAttention-4 paper, section 3.2.
    """
    a = cute.arch.fmax(a, Float32(-125.0))
    shifted = a + ROUND_TO_INTEGER
    fraction = a - (shifted - ROUND_TO_INTEGER)
    value = fma(Float32(EXP2_POLYNOMIAL[3]), fraction, Float32(EXP2_POLYNOMIAL[2]))
    value = fma(value, fraction, Float32(EXP2_POLYNOMIAL[1]))
    value = fma(value, fraction, Float32(EXP2_POLYNOMIAL[0]))
    return _add_exponent(value, shifted)


@dsl_user_op
def _add_exponent(value: Float32, shifted: Float32, *, loc=None, ip=None) -> Float32:
    """value * 2^n for the integer n in the low bits of `shifted`: one shift, one integer add."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(value).ir_value(loc=loc, ip=ip), Float32(shifted).ir_value(loc=loc, ip=ip)],
            "{ .reg .b32 v, s; mov.b32 v, $1; mov.b32 s, $2; shl.b32 s, s, 23;"
            " add.s32 v, v, s; mov.b32 $0, v; }",
            "=f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def log2(a: Float32, *, loc=None, ip=None) -> Float32:
    """log2(a) on the special function unit; log2(0) is -inf."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(loc=loc, ip=ip)],
            "lg2.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def reciprocal(a: Float32, *, loc=None, ip=None) -> Float32:
    """1 / a on the special function unit, 1 ulp."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(loc=loc, ip=ip)],
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


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
