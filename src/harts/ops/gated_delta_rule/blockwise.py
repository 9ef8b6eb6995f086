# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the gated delta rule that are parallel over blocks: a program a block and head, whatever the tree.

Within a block of 64 rows, with gamma the running sum of g, and the state S that the block starts from:

    A = strict lower part of  beta_i exp(gamma_i - gamma_j) k_i.k_j
    P = lower part of  c exp(gamma_i - gamma_j) q_i.k_j
    written = (I + A)^-1 (beta v - beta exp(gamma) k S) = u - w S
    o = c exp(gamma) q S + P written

(Gated Delta Networks, arXiv:2412.06464, eq. 10, in the UT form of arXiv:2406.06484, section 3.) The gradients need no
gradient of the inverse: with Y = (I + A)^-T dwritten, the right-hand side in brackets has the gradient Y and A has
-Y written^T.

Rows are read through maps of slots (see `schedule`): behind the end of a partial block q, k, v, g and beta are 0, which
writes and decays nothing; q and the gradient of the output are 0 where a row is replayed. What is kept between kernels
lies block by block and head by head, one contiguous tile each; values and states transposed, as the recurrence wants.

Shape suffixes in comments: T rows, X slots of rows that have several, E blocks, G value heads, H key heads, K key size,
V value size. All offsets that can pass 2^31 are 64-bit.
"""

import triton
import triton.language as tl

__all__ = [
    "add_copies_kernel",
    "block_gradients_kernel",
    "corrections_kernel",
    "local_gradients_kernel",
    "outputs_kernel",
    "unit_gradients_kernel",
    "unit_rows_kernel",
]

EPS = tl.constexpr(1e-6)  # of the normalisation of q and k, as in the published models


@triton.jit
def tile_offset(index, size):
    """Offset of tile `index`, 64-bit: tiles times their size can pass 2^31 elements."""
    return index.to(tl.int64) * size


@triton.jit
def _load_rows(ptr, row_C, stride, N: tl.constexpr):
    """Rows [C, N] of a matrix; 0 where the row is -1."""
    offset = tile_offset(row_C, stride)[:, None] + tl.arange(0, N)[None, :]
    return tl.load(ptr + offset, mask=(row_C >= 0)[:, None], other=0.0)


@triton.jit
def _unit(x):
    """Rows of unit length, in fp32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _decay(gamma_C, strict: tl.constexpr):
    """[C, C]: decay from behind row j to row i; 0 unless j <= i (j < i if strict)."""
    row = tl.arange(0, gamma_C.shape[0])
    if strict:
        seen = row[:, None] > row[None, :]
    else:
        seen = row[:, None] >= row[None, :]
    # The other half would overflow, and 0 * inf is not 0.
    return tl.exp(tl.where(seen, gamma_C[:, None] - gamma_C[None, :], float("-inf")))


@triton.jit
def unit_rows_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,
    q_unit_ptr,  # out [E, H, 64, K]
    k_unit_ptr,
    row_ptr,  # [E, 64]
    own_row_ptr,  # [E, 64]
    q_stride,  # of a row
    k_stride,
    H: tl.constexpr,
    K: tl.constexpr,
):
    C: tl.constexpr = 64
    pid = tl.program_id(0)
    block = pid // H
    head = pid % H
    slot = block * C + tl.arange(0, C)
    out = tile_offset(pid, C * K) + tl.arange(0, C)[:, None] * K + tl.arange(0, K)[None, :]
    dtype = q_unit_ptr.dtype.element_ty
    q = _load_rows(q_ptr + head * K, tl.load(own_row_ptr + slot), q_stride, K)
    tl.store(q_unit_ptr + out, _unit(q).to(dtype))
    k = _load_rows(k_ptr + head * K, tl.load(row_ptr + slot), k_stride, K)
    tl.store(k_unit_ptr + out, _unit(k).to(dtype))


@triton.jit
def _invert(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [64, 64] in fp32.

    The four 16 x 16 blocks D on the diagonal are inverted row by row. With N = D^-1 (the rest), N^4 = 0, and so
    (I + lower)^-1 = (I - N) (I + N^2) D^-1.
    """
    C: tl.constexpr = 64
    B: tl.constexpr = 16
    row = tl.arange(0, C)
    same = (row[:, None] // B) == (row[None, :] // B)
    part = tl.arange(0, B)
    blocks = tl.where(same, -lower, 0.0).reshape(C // B, B, C // B, B)
    blocks = tl.sum(blocks, 2)  # [4, 16, 16]: all but one of the four are 0
    inverse = blocks
    for i in range(2, B):
        is_row = (part == i)[None, :, None]
        line = tl.sum(tl.where(is_row, blocks, 0.0), 1)  # [4, 16]
        line += tl.sum(line[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, line[:, None, :], inverse)
    inverse += (part[:, None] == part[None, :]).to(tl.float32)[None, :, :]
    wide = tl.broadcast_to(inverse[:, :, None, :], (C // B, B, C // B, B)).reshape(C, C)
    diagonal = tl.where(same, wide, 0.0)
    rest = tl.dot(diagonal, tl.where(same, 0.0, lower), input_precision=PRECISION)
    square = tl.dot(rest, rest, input_precision=PRECISION)
    outer = (row[:, None] == row[None, :]).to(tl.float32) - rest
    outer = tl.dot(outer, square, outer, input_precision=PRECISION)
    return tl.dot(outer, diagonal, input_precision=PRECISION)


@triton.jit
def corrections_kernel(
    k_unit_ptr,  # [E, H, 64, K]
    v_ptr,  # [T, G, V]
    g_ptr,  # [T, G] fp32
    beta_ptr,  # [T, G]
    gamma_ptr,  # out [E, G, 64] fp32
    inverse_ptr,  # out [E, G, 64, 64]: (I + A)^-1
    w_ptr,  # out [E, G, 64, K]
    u_ptr,  # out [E, G, V, 64]
    row_ptr,
    v_stride,
    g_stride,
    beta_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    pid = tl.program_id(0)
    block = pid // G
    head = pid % G
    index = tl.arange(0, C)
    row = tl.load(row_ptr + block * C + index)
    used = row >= 0
    dtype = k_unit_ptr.dtype.element_ty

    g = tl.load(g_ptr + tile_offset(row, g_stride) + head, mask=used, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + tile_offset(row, beta_stride) + head, mask=used, other=0.0).to(tl.float32)
    gamma = tl.sum(tl.where(index[:, None] >= index[None, :], g[None, :], 0.0), 1)
    tl.store(gamma_ptr + tile_offset(pid, C) + index, gamma)

    keys = tile_offset(block * H + head // (G // H), C * K)
    k = tl.load(k_unit_ptr + keys + index[:, None] * K + tl.arange(0, K)[None, :])
    lower = tl.dot(k, tl.trans(k), input_precision=PRECISION) * _decay(gamma, True) * beta[:, None]
    inverse = _invert(lower, PRECISION).to(dtype)
    tl.store(inverse_ptr + tile_offset(pid, C * C) + index[:, None] * C + index[None, :], inverse)

    scale = beta * tl.exp(gamma)
    for part in range(K // BK):
        in_keys = index[:, None] * K + part * BK + tl.arange(0, BK)[None, :]
        k_scaled = tl.load(k_unit_ptr + keys + in_keys).to(tl.float32) * scale[:, None]
        w = tl.dot(inverse, k_scaled.to(dtype), input_precision=PRECISION)
        tl.store(w_ptr + tile_offset(pid, C * K) + in_keys, w.to(dtype))
    for part in range(V // BV):
        v = _load_rows(v_ptr + head * V + part * BV, row, v_stride, BV)
        v_scaled = (v.to(tl.float32) * beta[:, None]).to(dtype)
        u = tl.dot(tl.trans(v_scaled), tl.trans(inverse), input_precision=PRECISION)
        in_values = (part * BV + tl.arange(0, BV))[:, None] * C + index[None, :]
        tl.store(u_ptr + tile_offset(pid, V * C) + in_values, u.to(dtype))


@triton.jit
def outputs_kernel(
    q_unit_ptr,  # [E, H, 64, K]
    k_unit_ptr,
    written_ptr,  # [E, G, V, 64]
    states_ptr,  # [E, G, V, K]
    gamma_ptr,  # [E, G, 64]
    o_ptr,  # out [T, G, V]
    own_row_ptr,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    pid = tl.program_id(0)
    block = pid // G
    head = pid % G
    index = tl.arange(0, C)
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    dtype = q_unit_ptr.dtype.element_ty
    keys = tile_offset(block * H + head // (G // H), C * K) + index[:, None] * K + key[None, :]
    q = tl.load(q_unit_ptr + keys)
    k = tl.load(k_unit_ptr + keys)
    state = tl.load(states_ptr + tile_offset(pid, V * K) + value[:, None] * K + key[None, :])
    written = tl.load(written_ptr + tile_offset(pid, V * C) + value[:, None] * C + index[None, :])
    gamma = tl.load(gamma_ptr + tile_offset(pid, C) + index)

    o = tl.dot(q, tl.trans(state), input_precision=PRECISION) * tl.exp(gamma)[:, None]
    within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decay(gamma, False)
    o = tl.dot(within.to(dtype), tl.trans(written), o, input_precision=PRECISION) * scale
    row = tl.load(own_row_ptr + block * C + index)
    out = tile_offset(row, G * V)[:, None] + head * V + value[None, :]
    tl.store(o_ptr + out, o.to(o_ptr.dtype.element_ty), mask=(row >= 0)[:, None])


@triton.jit
def local_gradients_kernel(
    q_unit_ptr,  # [E, H, 64, K]
    k_unit_ptr,
    gamma_ptr,  # [E, G, 64]
    do_ptr,  # [T, G, V]
    do_scaled_ptr,  # out [E, G, V, 64]: c exp(gamma) do
    local_ptr,  # out [E, G, V, 64]: P^T do
    own_row_ptr,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    pid = tl.program_id(0)
    block = pid // G
    head = pid % G
    index = tl.arange(0, C)
    key = tl.arange(0, K)
    dtype = q_unit_ptr.dtype.element_ty
    keys = tile_offset(block * H + head // (G // H), C * K) + index[:, None] * K + key[None, :]
    q = tl.load(q_unit_ptr + keys)
    k = tl.load(k_unit_ptr + keys)
    gamma = tl.load(gamma_ptr + tile_offset(pid, C) + index)
    do = tl.trans(_load_rows(do_ptr + head * V, tl.load(own_row_ptr + block * C + index), G * V, V))

    out = tile_offset(pid, V * C) + tl.arange(0, V)[:, None] * C + index[None, :]
    do_scaled = do.to(tl.float32) * (tl.exp(gamma) * scale)[None, :]
    tl.store(do_scaled_ptr + out, do_scaled.to(dtype))
    within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (_decay(gamma, False) * scale)
    local = tl.dot(do, within.to(dtype), input_precision=PRECISION)
    tl.store(local_ptr + out, local.to(dtype))


@triton.jit
def block_gradients_kernel(
    q_unit_ptr,  # [E, H, 64, K]
    k_unit_ptr,
    v_ptr,  # [T, G, V]
    beta_ptr,  # [T, G]
    gamma_ptr,  # [E, G, 64]
    inverse_ptr,  # [E, G, 64, 64]
    written_ptr,  # [E, G, V, 64]
    states_ptr,  # [E, G, V, K]
    do_ptr,  # [T, G, V]
    dwritten_ptr,  # [E, G, V, 64]
    dstates_ptr,  # [E, G, V, K]
    dq_ptr,  # out [T, G, K]: of the unit rows, per value head
    dk_ptr,  # out [T + X, G, K]
    dv_ptr,  # out [T + X, G, V]
    dg_ptr,  # out [T + X, G] fp32
    dbeta_ptr,  # out [T + X, G] fp32
    row_ptr,
    own_row_ptr,
    target_ptr,
    v_stride,
    beta_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    pid = tl.program_id(0)
    block = pid // G
    head = pid % G
    index = tl.arange(0, C)
    value = tl.arange(0, V)
    row = tl.load(row_ptr + block * C + index)
    own_row = tl.load(own_row_ptr + block * C + index)
    target = tl.load(target_ptr + block * C + index)
    used = target >= 0
    dtype = q_unit_ptr.dtype.element_ty

    gamma = tl.load(gamma_ptr + tile_offset(pid, C) + index)
    gamma_end = tl.load(gamma_ptr + tile_offset(pid, C) + C - 1)
    beta = tl.load(beta_ptr + tile_offset(row, beta_stride) + head, mask=row >= 0, other=0.0).to(tl.float32)
    in_values = tile_offset(pid, V * C) + value[:, None] * C + index[None, :]
    inverse = tl.load(inverse_ptr + tile_offset(pid, C * C) + index[:, None] * C + index[None, :])
    written = tl.load(written_ptr + in_values)
    do = _load_rows(do_ptr + head * V, own_row, G * V, V)

    # Right-hand side: beta (v - exp(gamma) k S)
    right = tl.dot(tl.trans(inverse), tl.trans(tl.load(dwritten_ptr + in_values)), input_precision=PRECISION)
    v = _load_rows(v_ptr + head * V, row, v_stride, V).to(tl.float32)
    out = tile_offset(target, G * V)[:, None] + head * V + value[None, :]
    tl.store(dv_ptr + out, (right * beta[:, None]).to(dtype), mask=used[:, None])
    dbeta = tl.sum(right * v, 1)
    right = right.to(dtype)

    keys = tile_offset(block * H + head // (G // H), C * K) + index[:, None] * K
    k_all = tl.load(k_unit_ptr + keys + tl.arange(0, K)[None, :])
    dlower = tl.dot(right, written, input_precision=PRECISION) * -_decay(gamma, True)
    pairs = dlower * tl.dot(k_all, tl.trans(k_all), input_precision=PRECISION)
    dbeta += tl.sum(pairs, 1)
    dlower = (dlower * beta[:, None]).to(dtype)
    pairs *= beta[:, None]
    dgamma = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    dwithin = (tl.dot(do, written, input_precision=PRECISION) * (_decay(gamma, False) * scale)).to(dtype)
    dgamma_end = 0.0
    for part in range(K // BK):
        key = part * BK + tl.arange(0, BK)[None, :]
        in_state = tile_offset(pid, V * K) + value[:, None] * K + key
        q = tl.load(q_unit_ptr + keys + key)
        k = tl.load(k_unit_ptr + keys + key)
        state = tl.load(states_ptr + in_state)
        dstate = tl.load(dstates_ptr + in_state)
        k_wide = k.to(tl.float32)

        dq = tl.dot(do, state, input_precision=PRECISION) * (tl.exp(gamma) * scale)[:, None]
        dq = tl.dot(dwithin, k, dq, input_precision=PRECISION)
        dgamma += tl.sum(dq * q.to(tl.float32), 1)
        dq_offset = tile_offset(own_row, G * K)[:, None] + head * K + key
        tl.store(dq_ptr + dq_offset, dq.to(dtype), mask=(own_row >= 0)[:, None])

        # k as later rows and the state behind the block see it
        dk = tl.dot(tl.trans(written), dstate, input_precision=PRECISION) * tl.exp(gamma_end - gamma)[:, None]
        dgamma_end += tl.sum(dk * k_wide)
        dgamma_end += tl.sum(state.to(tl.float32) * dstate.to(tl.float32)) * tl.exp(gamma_end)
        dk = tl.dot(tl.trans(dwithin), q, dk, input_precision=PRECISION)
        dgamma -= tl.sum(dk * k_wide, 1)
        # k in the right-hand side, and on both sides in A
        dk_right = tl.dot(right, state, input_precision=PRECISION) * -tl.exp(gamma)[:, None]
        along = tl.sum(dk_right * k_wide, 1)
        dbeta += along
        dgamma += along * beta
        dk += dk_right * beta[:, None]
        dk = tl.dot(dlower, k, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dlower), k, dk, input_precision=PRECISION)
        dk_offset = tile_offset(target, G * K)[:, None] + head * K + key
        tl.store(dk_ptr + dk_offset, dk.to(dtype), mask=used[:, None])
    dgamma += tl.where(index == C - 1, dgamma_end, 0.0)

    dg = tl.sum(tl.where(index[:, None] >= index[None, :], dgamma[:, None], 0.0), 0)
    out = tile_offset(target, G) + head
    tl.store(dg_ptr + out, dg, mask=used)
    tl.store(dbeta_ptr + out, dbeta, mask=used)


@triton.jit
def add_copies_kernel(
    x_ptr,  # [T + X, G, N]: the copies of a row are added up into the row
    row_ptr,  # [R]
    copies_ptr,  # [R + 1]
    num_rows,  # T
    G: tl.constexpr,
    N: tl.constexpr,
):
    pid = tl.program_id(0)
    shared = pid // G
    inside = pid % G * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for copy in range(tl.load(copies_ptr + shared), tl.load(copies_ptr + shared + 1)):
        total += tl.load(x_ptr + tile_offset(num_rows + copy, G * N) + inside).to(tl.float32)
    row = tl.load(row_ptr + shared)
    tl.store(x_ptr + tile_offset(row, G * N) + inside, total.to(x_ptr.dtype.element_ty))


@triton.jit
def unit_gradients_kernel(
    x_ptr,  # [T, H, K]: q or k
    dunit_ptr,  # [T, G, K]: gradient of the unit rows, per value head
    dx_ptr,  # out [T, H, K]
    num_rows,
    x_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % H
    key = tl.arange(0, K)
    row = pid // H * ROWS + tl.arange(0, ROWS)
    row = tl.where(row < num_rows, row, -1)
    x = _load_rows(x_ptr + head * K, row, x_stride, K).to(tl.float32)
    dunit = tl.zeros([ROWS, K], tl.float32)
    for member in tl.static_range(G // H):
        dunit += _load_rows(dunit_ptr + (head * (G // H) + member) * K, row, G * K, K).to(tl.float32)
    length = tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]
    unit = x * length
    dx = (dunit - unit * tl.sum(unit * dunit, 1)[:, None]) * length
    out = tile_offset(row, H * K)[:, None] + head * K + key[None, :]
    tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=(row >= 0)[:, None])
