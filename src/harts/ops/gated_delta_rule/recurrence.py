# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the recurrence: states block by block along chains, and their gradients in the other direction.

Both hold one tile of the state, [V tile, K] in fp32, in registers along a chain. Values come transposed ([V, 64] a
block), so that the state and the values are left operands straight from registers and only k, q and w pass through
shared memory. At boundaries (ends of blocks at which other chains start) states change hands in fp32, unrounded, so
that a chain goes on exactly as if it had never been cut. Programs take chains from a ticket counter and wait for their
sources; a program only ever waits for earlier tickets, so launches never hang, whatever number of programs fits the
device.

Shape suffixes in comments: E blocks, G value heads, H key heads, K key size, V value size, J boundaries.
"""

import triton
import triton.language as tl

from harts.ops.chains.handover import signal, wait

__all__ = ["state_gradients_kernel", "states_kernel"]


@triton.jit
def states_kernel(
    k_ptr,  # [E, H, 64, K]
    w_ptr,  # [E, G, 64, K]
    u_ptr,  # [E, G, V, 64]
    gamma_ptr,  # [E, G, 64] fp32
    states_ptr,  # out [E, G, V, K]: state at the start of each block
    written_ptr,  # out [E, G, V, 64]: values as written to the state
    handed_ptr,  # out [J, G, V, K] fp32: state at each boundary
    flags_ptr,  # [J, G, V / BV]: 1 once the state is there
    ticket_ptr,
    order_ptr,
    first_block_ptr,
    boundary_ptr,
    source_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    TILES: tl.constexpr = V // BV
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    chain = tl.load(order_ptr + ticket // (G * TILES))
    head = ticket // TILES % G
    tile = ticket % TILES
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = tile * BV + tl.arange(0, BV)
    in_state = value[:, None] * K + key[None, :]
    in_keys = row[:, None] * K + key[None, :]
    in_values = value[:, None] * C + row[None, :]
    dtype = k_ptr.dtype.element_ty

    state = tl.zeros([BV, K], tl.float32)
    source = tl.load(source_ptr + chain)
    if source >= 0:
        place = source.to(tl.int64) * G + head
        zero = wait(flags_ptr + place * TILES + tile, INTERPRETED)
        state = tl.load(handed_ptr + place * (V * K) + in_state + zero)

    first = tl.load(first_block_ptr + chain)
    for step in tl.range(0, tl.load(first_block_ptr + chain + 1) - first, num_stages=STAGES):
        block = first + step
        place = block.to(tl.int64) * G + head
        k = tl.load(k_ptr + (block.to(tl.int64) * H + head // (G // H)) * (C * K) + in_keys)
        w = tl.load(w_ptr + place * (C * K) + in_keys)
        u = tl.load(u_ptr + place * (V * C) + in_values)
        gamma = tl.load(gamma_ptr + place * C + row)
        gamma_end = tl.load(gamma_ptr + place * C + C - 1)

        rounded = state.to(dtype)
        tl.store(states_ptr + place * (V * K) + in_state, rounded)
        written = u.to(tl.float32) - tl.dot(rounded, tl.trans(w), input_precision=PRECISION)
        tl.store(written_ptr + place * (V * C) + in_values, written.to(dtype))
        written *= tl.exp(gamma_end - gamma)[None, :]
        state = tl.dot(written.to(dtype), k, state * tl.exp(gamma_end), input_precision=PRECISION)

        boundary = tl.load(boundary_ptr + block)
        if boundary >= 0:
            place = boundary.to(tl.int64) * G + head
            tl.store(handed_ptr + place * (V * K) + in_state, state)
            signal(flags_ptr + place * TILES + tile, INTERPRETED)


@triton.jit
def state_gradients_kernel(
    q_ptr,  # [E, H, 64, K]
    k_ptr,  # [E, H, 64, K]
    w_ptr,  # [E, G, 64, K]
    gamma_ptr,  # [E, G, 64] fp32
    do_ptr,  # [E, G, V, 64]: gradient of the outputs, scaled by K**-0.5 exp(gamma)
    local_ptr,  # [E, G, V, 64]: gradient of the written values through the outputs of their block
    dstates_ptr,  # out [E, G, V, K]: gradient of the state at the end of each block
    dwritten_ptr,  # out [E, G, V, 64]: gradient of the written values
    handed_ptr,  # out [C, G, V, K] fp32: gradient of the state that each chain starts from
    flags_ptr,  # [J, G, V / BV]: 1 once the sum of a boundary is there (in the place of its first chain)
    arrived_ptr,  # [J, G, V / BV]: chains of the boundary that are done
    ticket_ptr,
    order_ptr,
    first_block_ptr,
    boundary_ptr,
    source_ptr,
    children_ptr,
    child_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    TILES: tl.constexpr = V // BV
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    chain = tl.load(order_ptr + ticket // (G * TILES))
    head = ticket // TILES % G
    tile = ticket % TILES
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = tile * BV + tl.arange(0, BV)
    in_state = value[:, None] * K + key[None, :]
    in_keys = row[:, None] * K + key[None, :]
    in_values = value[:, None] * C + row[None, :]
    dtype = k_ptr.dtype.element_ty

    dstate = tl.zeros([BV, K], tl.float32)
    first = tl.load(first_block_ptr + chain)
    last = tl.load(first_block_ptr + chain + 1) - 1
    for step in tl.range(0, last - first + 1, num_stages=STAGES):
        block = last - step
        place = block.to(tl.int64) * G + head
        key_place = block.to(tl.int64) * H + head // (G // H)
        k = tl.load(k_ptr + key_place * (C * K) + in_keys)
        q = tl.load(q_ptr + key_place * (C * K) + in_keys)
        w = tl.load(w_ptr + place * (C * K) + in_keys)
        do = tl.load(do_ptr + place * (V * C) + in_values)
        local = tl.load(local_ptr + place * (V * C) + in_values)
        gamma = tl.load(gamma_ptr + place * C + row)
        gamma_end = tl.load(gamma_ptr + place * C + C - 1)

        boundary = tl.load(boundary_ptr + block)
        if boundary >= 0:
            zero = wait(flags_ptr + (boundary.to(tl.int64) * G + head) * TILES + tile, INTERPRETED)
            child = tl.load(child_ptr + tl.load(children_ptr + boundary))
            dstate += tl.load(handed_ptr + (child.to(tl.int64) * G + head) * (V * K) + in_state + zero)

        rounded = dstate.to(dtype)
        tl.store(dstates_ptr + place * (V * K) + in_state, rounded)
        dwritten = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * tl.exp(gamma_end - gamma)[None, :]
        dwritten = (dwritten + local.to(tl.float32)).to(dtype)
        tl.store(dwritten_ptr + place * (V * C) + in_values, dwritten)
        dstate = tl.dot(do, q, dstate * tl.exp(gamma_end), input_precision=PRECISION)
        dstate = tl.dot(-dwritten, w, dstate, input_precision=PRECISION)

    source = tl.load(source_ptr + chain)
    if source >= 0:
        tl.store(handed_ptr + (chain.to(tl.int64) * G + head) * (V * K) + in_state, dstate)
        tl.debug_barrier()
        place = (source.to(tl.int64) * G + head) * TILES + tile
        begin = tl.load(children_ptr + source)
        end = tl.load(children_ptr + source + 1)
        arrived = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel")
        if arrived == end - begin - 1:  # the last one adds them all up, in the same order whoever it is
            tl.debug_barrier()
            child = tl.load(child_ptr + begin).to(tl.int64)
            total_ptr = handed_ptr + (child * G + head) * (V * K) + in_state
            if end - begin > 1:
                total = tl.load(total_ptr, cache_modifier=".cg")
                for index in range(begin + 1, end):
                    child = tl.load(child_ptr + index).to(tl.int64)
                    total += tl.load(handed_ptr + (child * G + head) * (V * K) + in_state, cache_modifier=".cg")
                tl.store(total_ptr, total)
            signal(flags_ptr + place, INTERPRETED)
