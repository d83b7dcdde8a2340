"""PTX instructions that the W4A16 kernels use by name, as CuTe DSL operations.

Addresses are integers: 32-bit for shared memory, 64-bit for global memory. `pred` is an Int32; the
instruction is issued where it is not zero, which keeps the producer free of branches.
Source: PTX ISA 8.7, sections on mbarrier, cp.async.bulk, ldmatrix, mma, griddepcontrol.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op

DTYPE = {"bf16": BFloat16, "f16": Float16}
EVICT_FIRST = 0x12F0000000000000
"""L2 policy of data that is read once (what createpolicy.fractional.L2::evict_first returns)."""


def _asm(result, operands, text, constraints, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _pure(result, operands, text, constraints, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _i32(value, loc, ip):
    return Int32(value).ir_value(loc=loc, ip=ip)


def _i64(value, loc, ip):
    return Int64(value).ir_value(loc=loc, ip=ip)


def _f32(value, loc, ip):
    return Float32(value).ir_value(loc=loc, ip=ip)


def _ints(result, count, loc, ip):
    return [Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count)]


def _floats(result, count, loc, ip):
    return [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(count)]


def _struct(kind, count):
    return llvm.StructType.get_literal([kind] * count)


@dsl_user_op
def mbar_init(mbar, count, *, loc=None, ip=None):
    """Initialise a barrier in shared memory for `count` arrivals."""
    text = "mbarrier.init.shared::cta.b64 [$0], $1;"
    _asm(None, [_i32(mbar, loc, ip), _i32(count, loc, ip)], text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_fence(*, loc=None, ip=None):
    """Make initialised barriers visible to the asynchronous proxy."""
    _asm(None, [], "fence.mbarrier_init.release.cluster;", "~{memory}", loc, ip)


@dsl_user_op
def mbar_wait(mbar, parity, *, loc=None, ip=None):
    """Wait until the phase of that parity has completed."""
    text = (
        "{\n .reg .pred done;\n again:\n"
        " mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
        " @!done bra again;\n}"
    )
    _asm(None, [_i32(mbar, loc, ip), _i32(parity, loc, ip)], text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_arrive(mbar, pred, *, loc=None, ip=None):
    """Arrive once."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $1, 0;\n @p mbarrier.arrive.shared::cta.b64 _, [$0];\n}"
    )
    _asm(None, [_i32(mbar, loc, ip), _i32(pred, loc, ip)], text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_arrive_cluster(mbar, rank, pred, *, loc=None, ip=None):
    """Arrive once at the same barrier of a block of the cluster."""
    text = (
        "{\n .reg .pred p;\n .reg .b32 there;\n setp.ne.s32 p, $2, 0;\n"
        " mapa.shared::cluster.u32 there, $0, $1;\n"
        " @p mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
    )
    operands = [_i32(mbar, loc, ip), _i32(rank, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "r,r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_expect(mbar, num_bytes, pred, *, loc=None, ip=None):
    """Arrive once and expect that many bytes of bulk copies."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n"
        " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;\n}"
    )
    operands = [_i32(mbar, loc, ip), _i32(num_bytes, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "r,r,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_load(dst, src, num_bytes, mbar, pred, *, loc=None, ip=None):
    """Copy consecutive bytes (a multiple of 16) from global to shared memory; read once."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $4, 0;\n"
        " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $5;\n}"
    )
    operands = [
        _i32(dst, loc, ip),
        _i64(src, loc, ip),
        _i32(num_bytes, loc, ip),
        _i32(mbar, loc, ip),
        _i32(pred, loc, ip),
        _i64(EVICT_FIRST, loc, ip),
    ]
    _asm(None, operands, text, "r,l,r,r,r,l,~{memory}", loc, ip)


@dsl_user_op
def bulk_load_kept(dst, src, num_bytes, mbar, pred, *, loc=None, ip=None):
    """As `bulk_load`, for data that every block reads: no eviction hint."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $4, 0;\n"
        " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [$0], [$1], $2, [$3];\n}"
    )
    operands = [
        _i32(dst, loc, ip),
        _i64(src, loc, ip),
        _i32(num_bytes, loc, ip),
        _i32(mbar, loc, ip),
        _i32(pred, loc, ip),
    ]
    _asm(None, operands, text, "r,l,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def lds128(address, *, loc=None, ip=None):
    """Four words of shared memory."""
    text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    out = _asm(
        _struct(T.i32(), 4), [_i32(address, loc, ip)], text, "=r,=r,=r,=r,r,~{memory}", loc, ip
    )
    return _ints(out, 4, loc, ip)


@dsl_user_op
def lds64(address, *, loc=None, ip=None):
    """Two words of shared memory."""
    text = "ld.shared.v2.b32 {$0, $1}, [$2];"
    out = _asm(_struct(T.i32(), 2), [_i32(address, loc, ip)], text, "=r,=r,r,~{memory}", loc, ip)
    return _ints(out, 2, loc, ip)


@dsl_user_op
def lds32(address, *, loc=None, ip=None):
    """A word of shared memory."""
    text = "ld.shared.b32 $0, [$1];"
    return Int32(_asm(T.i32(), [_i32(address, loc, ip)], text, "=r,r,~{memory}", loc, ip))


@dsl_user_op
def lds128f(address, *, loc=None, ip=None):
    """Four floats of shared memory."""
    text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    out = _asm(
        _struct(T.f32(), 4), [_i32(address, loc, ip)], text, "=f,=f,=f,=f,r,~{memory}", loc, ip
    )
    return _floats(out, 4, loc, ip)


@dsl_user_op
def lds64f(address, *, loc=None, ip=None):
    """Two floats of shared memory."""
    text = "ld.shared.v2.f32 {$0, $1}, [$2];"
    out = _asm(_struct(T.f32(), 2), [_i32(address, loc, ip)], text, "=f,=f,r,~{memory}", loc, ip)
    return _floats(out, 2, loc, ip)


@dsl_user_op
def sts128f(address, values, *, loc=None, ip=None):
    """Store four floats to shared memory."""
    operands = [_i32(address, loc, ip)] + [_f32(v, loc, ip) for v in values]
    text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(None, operands, text, "r,f,f,f,f,~{memory}", loc, ip)


@dsl_user_op
def sts64f(address, values, pred, *, loc=None, ip=None):
    """Store two floats to shared memory."""
    operands = [_i32(address, loc, ip)] + [_f32(v, loc, ip) for v in values]
    operands += [_i32(pred, loc, ip)]
    text = "{\n .reg .pred p;\n setp.ne.s32 p, $3, 0;\n @p st.shared.v2.f32 [$0], {$1, $2};\n}"
    _asm(None, operands, text, "r,f,f,r,~{memory}", loc, ip)


@dsl_user_op
def sts128_zero(address, *, loc=None, ip=None):
    """Store 16 zero bytes to shared memory."""
    text = "{\n .reg .b32 z;\n mov.b32 z, 0;\n st.shared.v4.b32 [$0], {z, z, z, z};\n}"
    _asm(None, [_i32(address, loc, ip)], text, "r,~{memory}", loc, ip)


@dsl_user_op
def ldmatrix_x4(address, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit values, a register each."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    out = _asm(
        _struct(T.i32(), 4), [_i32(address, loc, ip)], text, "=r,=r,=r,=r,r,~{memory}", loc, ip
    )
    return _ints(out, 4, loc, ip)


@dsl_user_op
def and_or(value, mask, bits, *, loc=None, ip=None):
    """(value & mask) | bits, one LOP3."""
    operands = [_i32(value, loc, ip), _i32(mask, loc, ip), _i32(bits, loc, ip)]
    out = _pure(T.i32(), operands, "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", loc, ip)
    return Int32(out)


@dsl_user_op
def shift_right(value, count, *, loc=None, ip=None):
    """Logical shift right."""
    operands = [_i32(value, loc, ip), _i32(count, loc, ip)]
    return Int32(_pure(T.i32(), operands, "shr.u32 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def mma_16816(a, b0, b1, c, is_bf16, *, loc=None, ip=None):
    """D = A B + C on a warp: A 16 x 16 (four registers), B 16 x 8, C and D fp32."""
    kind = "bf16" if is_bf16 else "f16"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [_i32(x, loc, ip) for x in (*a, b0, b1)] + [_f32(x, loc, ip) for x in c]
    out = _pure(_struct(T.f32(), 4), operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", loc, ip)
    return _floats(out, 4, loc, ip)


@dsl_user_op
def widen_pair(word, kind, *, loc=None, ip=None):
    """Two 16-bit floats of a word as fp32; kind is "bf16" or "f16"."""
    if kind == "bf16":
        text = (
            "{\n .reg .b32 lo, hi;\n shl.b32 lo, $2, 16;\n and.b32 hi, $2, 0xFFFF0000;\n"
            " mov.b32 $0, lo;\n mov.b32 $1, hi;\n}"
        )
    else:
        text = (
            "{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, $2;\n"
            " cvt.f32.f16 $0, lo;\n cvt.f32.f16 $1, hi;\n}"
        )
    out = _pure(_struct(T.f32(), 2), [_i32(word, loc, ip)], text, "=f,=f,r", loc, ip)
    return _floats(out, 2, loc, ip)


@dsl_user_op
def store_narrow(address, value, kind, pred, *, loc=None, ip=None):
    """Round a float to bf16 or f16 and store it to global memory."""
    text = (
        "{\n .reg .pred p;\n .reg .b16 h;\n setp.ne.s32 p, $2, 0;\n"
        f" cvt.rn.{kind}.f32 h, $1;\n @p st.global.b16 [$0], h;\n}}"
    )
    operands = [_i64(address, loc, ip), _f32(value, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "l,f,r,~{memory}", loc, ip)


@dsl_user_op
def load_narrow(address, kind, pred, *, loc=None, ip=None):
    """A bf16 or f16 of global memory as fp32, 0 where not loaded."""
    convert = "cvt.f32.f16 $0, h;" if kind == "f16" else "mov.b32 $0, {z, h};"
    text = (
        "{\n .reg .pred p;\n .reg .b16 h, z;\n setp.ne.s32 p, $2, 0;\n mov.b16 h, 0;\n"
        f" mov.b16 z, 0;\n @p ld.global.b16 h, [$1];\n {convert}\n}}"
    )
    operands = [_i64(address, loc, ip), _i32(pred, loc, ip)]
    return Float32(_asm(T.f32(), operands, text, "=f,l,r,~{memory}", loc, ip))


@dsl_user_op
def silu(value, *, loc=None, ip=None):
    """x / (1 + exp(-x)) in fp32, to some 1e-6."""
    text = (
        "{\n .reg .f32 t;\n mul.f32 t, $1, 0fBFB8AA3B;\n ex2.approx.f32 t, t;\n"
        " add.f32 t, t, 0f3F800000;\n div.full.f32 $0, $1, t;\n}"
    )
    return Float32(_pure(T.f32(), [_f32(value, loc, ip)], text, "=f,f", loc, ip))


@dsl_user_op
def stg128f(address, values, *, loc=None, ip=None):
    """Store four floats to global memory (L2)."""
    operands = [_i64(address, loc, ip)] + [_f32(v, loc, ip) for v in values]
    text = "st.global.cg.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(None, operands, text, "l,f,f,f,f,~{memory}", loc, ip)


@dsl_user_op
def ldg128f(address, pred=1, *, loc=None, ip=None):
    """Load four floats from global memory, past L1; zeros where `pred` is 0."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $5, 0;\n mov.b32 $0, 0f00000000;\n"
        " mov.b32 $1, 0f00000000;\n mov.b32 $2, 0f00000000;\n mov.b32 $3, 0f00000000;\n"
        " @p ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];\n}"
    )
    operands = [_i64(address, loc, ip), _i32(pred, loc, ip)]
    out = _asm(_struct(T.f32(), 4), operands, text, "=&f,=&f,=&f,=&f,l,r,~{memory}", loc, ip)
    return _floats(out, 4, loc, ip)


@dsl_user_op
def stg128_empty(address, *, loc=None, ip=None):
    """Mark four words of global memory as not yet written (`stg128f_told`)."""
    text = "{\n .reg .b32 e;\n mov.b32 e, -1;\n st.relaxed.gpu.global.v4.b32 [$0], {e, e, e, e};\n}"
    _asm(None, [_i64(address, loc, ip)], text, "l,~{memory}", loc, ip)


@dsl_user_op
def stg128f_told(address, values, *, loc=None, ip=None):
    """Store four floats to global memory for whoever waits for the words themselves.

    All bits set, a NaN of no arithmetic, means "not there yet"; another NaN is stored for it."""
    names = [f"w{i}" for i in range(4)]
    text = (
        f"{{\n .reg .b32 {', '.join(names)};\n"
        + "".join(
            f" mov.b32 {w}, ${i + 1};\n min.u32 {w}, {w}, 0xFFFFFFFE;\n"
            for i, w in enumerate(names)
        )
        + f" st.relaxed.gpu.global.v4.b32 [$0], {{{', '.join(names)}}};\n}}"
    )
    operands = [_i64(address, loc, ip)] + [_f32(v, loc, ip) for v in values]
    _asm(None, operands, text, "l,f,f,f,f,~{memory}", loc, ip)


@dsl_user_op
def wait_told(first, stride, count, but, *, loc=None, ip=None):
    """`count` quads of floats, `stride` bytes apart, when all of them are there (`stg128f_told`);
    all are asked for at once. Zeros for number `but`."""
    floats, where = 4 * count, [f"p{i}" for i in range(count)]
    quads = [", ".join(f"${4 * i + e}" for e in range(4)) for i in range(count)]
    lines = ["{", " .reg .b32 most, word;", f" .reg .pred again, {', '.join(where)};"]
    lines += [f" setp.ne.s32 {p}, ${floats + 1}, {i};" for i, p in enumerate(where)]
    lines += [f" mov.b32 ${i}, 0f00000000;" for i in range(floats)]
    lines.append(" more:")
    for i, p in enumerate(where):
        lines.append(
            f" @{p} ld.relaxed.gpu.global.v4.f32 {{{quads[i]}}}, [${floats} + {i * stride}];"
        )
    lines.append(" mov.b32 most, 0;")
    lines += [f" mov.b32 word, ${i};\n max.u32 most, most, word;" for i in range(floats)]
    lines += [" setp.eq.u32 again, most, 0xFFFFFFFF;", " @again bra more;", "}"]
    operands = [_i64(first, loc, ip), _i32(but, loc, ip)]
    constraints = ",".join(["=&f"] * floats + ["l", "r", "~{memory}"])
    out = _asm(_struct(T.f32(), floats), operands, "\n".join(lines), constraints, loc, ip)
    words = _floats(out, floats, loc, ip)
    return [words[4 * i : 4 * i + 4] for i in range(count)]


@dsl_user_op
def tell_counter(address, limit, pred, *, loc=None, ip=None):
    """Count at a global counter that wraps to 0 after `limit`; releases what this warp wrote."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n @p red.inc.release.gpu.global.u32 [$0], $1;\n}"
    )
    operands = [_i64(address, loc, ip), _i32(limit, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "l,r,r,~{memory}", loc, ip)


@dsl_user_op
def arrive_counter(address, limit, pred, *, loc=None, ip=None):
    """Count this block at a global counter that wraps to 0 after `limit`; the old count.

    Releases what this warp wrote and acquires what earlier arrivals wrote (gpu scope).
    """
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $3, 0;\n mov.b32 $0, 0;\n"
        " @p atom.inc.acq_rel.gpu.global.u32 $0, [$1], $2;\n}"
    )
    operands = [_i64(address, loc, ip), _i32(limit, loc, ip), _i32(pred, loc, ip)]
    return Int32(_asm(T.i32(), operands, text, "=r,l,r,r,~{memory}", loc, ip))


@dsl_user_op
def wait_previous_grid(*, loc=None, ip=None):
    """Wait until the grid before this one in the stream has finished and flushed."""
    _asm(None, [], "griddepcontrol.wait;", "~{memory}", loc, ip)


@dsl_user_op
def launch_next_grid(*, loc=None, ip=None):
    """Let the next grid of the stream start when there is room."""
    _asm(None, [], "griddepcontrol.launch_dependents;", "~{memory}", loc, ip)


@dsl_user_op
def cluster_arrive(*, loc=None, ip=None):
    """Arrive at the cluster's barrier, releasing nothing but initialised barriers (`mbar_fence`).

    A releasing arrival is a fence of the whole device (MEMBAR.ALL.GPU): what blocks of a cluster
    tell each other goes by `sts128f_async`, which needs none."""
    _asm(None, [], "barrier.cluster.arrive.relaxed;", "~{memory}", loc, ip)


@dsl_user_op
def cluster_arrive_releasing(*, loc=None, ip=None):
    """Arrive at the cluster's barrier after all that this thread has read and written."""
    _asm(None, [], "barrier.cluster.arrive.release;", "~{memory}", loc, ip)


@dsl_user_op
def cluster_wait(*, loc=None, ip=None):
    """Wait until every thread of the cluster that has not ended has arrived."""
    _asm(None, [], "barrier.cluster.wait.acquire;", "~{memory}", loc, ip)


@dsl_user_op
def sts128f_async(address, mbar, rank, values, *, loc=None, ip=None):
    """Store four floats to the same shared-memory address of a block of the cluster; its barrier at
    the address `mbar` counts the 16 bytes when they are there."""
    operands = [_i32(address, loc, ip), _i32(mbar, loc, ip), _i32(rank, loc, ip)]
    operands += [_f32(v, loc, ip) for v in values]
    text = (
        "{\n .reg .b32 there, bar;\n mapa.shared::cluster.u32 there, $0, $2;\n"
        " mapa.shared::cluster.u32 bar, $1, $2;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [there], {$3, $4, $5, $6}, [bar];\n}"
    )
    _asm(None, operands, text, "r,r,r,f,f,f,f,~{memory}", loc, ip)


@dsl_user_op
def leave_counter(address, limit, pred, *, loc=None, ip=None):
    """Count at a global counter that wraps to 0 after `limit`; orders nothing."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n @p red.inc.relaxed.gpu.global.u32 [$0], $1;\n}"
    )
    operands = [_i64(address, loc, ip), _i32(limit, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "l,r,r,~{memory}", loc, ip)


@dsl_user_op
def wait_counter(address, least, pred, *, loc=None, ip=None):
    """Wait until a global counter is at least `least`; acquires what arrivals released."""
    text = (
        "{\n .reg .pred p;\n .reg .b32 seen;\n setp.eq.s32 p, $2, 0;\n @p bra done;\n again:\n"
        " ld.acquire.gpu.global.u32 seen, [$0];\n setp.lt.u32 p, seen, $1;\n @p bra again;\n"
        " done:\n}"
    )
    operands = [_i64(address, loc, ip), _i32(least, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "l,r,r,~{memory}", loc, ip)


@dsl_user_op
def settled(value, *, loc=None, ip=None):
    """A sum of WGMMA's behind the wait for it: what is made of it stays behind the wait."""
    text = "mov.b32 $0, $1;"
    return Float32(_asm(T.f32(), [_f32(value, loc, ip)], text, "=f,f", loc, ip))


@dsl_user_op
def constant(bits, *, loc=None, ip=None):
    """A register with constant bits."""
    return Int32(_pure(T.i32(), [_i32(bits, loc, ip)], "mov.b32 $0, $1;", "=r,r", loc, ip))


@dsl_user_op
def packed_sub(a, b, kind, *, loc=None, ip=None):
    """a - b on pairs of bf16 or f16."""
    suffix = "rn.bf16x2" if kind == "bf16" else "rn.f16x2"
    operands = [_i32(a, loc, ip), _i32(b, loc, ip)]
    return Int32(_pure(T.i32(), operands, f"sub.{suffix} $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def packed_mul(a, b, kind, *, loc=None, ip=None):
    """a b on pairs of bf16 or f16."""
    suffix = "rn.bf16x2" if kind == "bf16" else "rn.f16x2"
    operands = [_i32(a, loc, ip), _i32(b, loc, ip)]
    return Int32(_pure(T.i32(), operands, f"mul.{suffix} $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def packed_fma(a, b, c, kind, *, loc=None, ip=None):
    """a b + c on pairs of bf16 or f16, one rounding."""
    suffix = "rn.bf16x2" if kind == "bf16" else "rn.f16x2"
    operands = [_i32(a, loc, ip), _i32(b, loc, ip), _i32(c, loc, ip)]
    return Int32(_pure(T.i32(), operands, f"fma.{suffix} $0, $1, $2, $3;", "=r,r,r,r", loc, ip))


@dsl_user_op
def packed_twice(value, kind, *, loc=None, ip=None):
    """A float rounded to bf16 or f16, in both halves of a word."""
    text = f"cvt.rn.{kind}x2.f32 $0, $1, $1;"
    return Int32(_pure(T.i32(), [_f32(value, loc, ip)], text, "=r,f", loc, ip))


@dsl_user_op
def packed_pair(low, high, kind, *, loc=None, ip=None):
    """Two floats rounded to bf16 or f16: low in the lower half."""
    text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    operands = [_f32(low, loc, ip), _f32(high, loc, ip)]
    return Int32(_pure(T.i32(), operands, text, "=r,f,f", loc, ip))


@dsl_user_op
def repeat_half(word, high, *, loc=None, ip=None):
    """The lower (or upper) 16 bits in both halves."""
    selector = 0x3232 if high else 0x1010
    text = f"prmt.b32 $0, $1, $1, {selector};"
    return Int32(_pure(T.i32(), [_i32(word, loc, ip)], text, "=r,r", loc, ip))


@dsl_user_op
def stmatrix_x4(address, values, *, loc=None, ip=None):
    """What `ldmatrix_x4` read, to its place."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    operands = [_i32(address, loc, ip)] + [_i32(v, loc, ip) for v in values]
    _asm(None, operands, text, "r,r,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def stmatrix_x4_trans(address, values, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit values to shared memory, transposed."""
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    operands = [_i32(address, loc, ip)] + [_i32(v, loc, ip) for v in values]
    _asm(None, operands, text, "r,r,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def stg128(address, values, pred, *, loc=None, ip=None):
    """Store four words to global memory."""
    text = (
        "{\n .reg .pred p;\n setp.ne.s32 p, $5, 0;\n @p st.global.v4.b32 [$0], {$1, $2, $3, $4};\n}"
    )
    operands = [_i64(address, loc, ip)] + [_i32(v, loc, ip) for v in values]
    operands += [_i32(pred, loc, ip)]
    _asm(None, operands, text, "l,r,r,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def sts32(address, value, pred, *, loc=None, ip=None):
    """Store a word to shared memory."""
    text = "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n @p st.shared.b32 [$0], $1;\n}"
    operands = [_i32(address, loc, ip), _i32(value, loc, ip), _i32(pred, loc, ip)]
    _asm(None, operands, text, "r,r,r,~{memory}", loc, ip)


def fake_matrix(dtype, divisibility: int):
    """A matrix of any size to trace with, contiguous in its last dim, rows at multiples of so many
    elements."""
    return make_fake_tensor(
        dtype,
        (cute.sym_int(), cute.sym_int()),
        stride=(cute.sym_int64(divisibility=divisibility), 1),
        assumed_align=16,
    )
