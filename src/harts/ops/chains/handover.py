# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""How programs of one launch hand states to one another: one sets a flag, others wait for it.

Programs take chains from a ticket counter in an order in which whatever they wait for has an earlier ticket, so
launches never hang, whatever number of programs fits the device.
"""

import triton
import triton.language as tl

__all__ = ["signal", "wait"]


@triton.jit
def wait(flag_ptr, INTERPRETED: tl.constexpr):
    """Returns 0 once the flag is set; everything written before it was set is visible then.

    The caller adds the 0 to an address that it reads, so that no compiler can move the read before the wait.
    """
    if INTERPRETED:  # programs run one after the other
        flag = tl.load(flag_ptr)
        tl.device_assert(flag == 1, "a chain ran before its source")
        return flag - 1
    return tl.inline_asm_elementwise(
        """{
        .reg .pred unset;
        WAIT:
        ld.acquire.gpu.global.u32 $0, [$1];
        setp.eq.u32 unset, $0, 0;
        @unset bra WAIT;
        sub.u32 $0, $0, 1;
        }""",
        "=r,l",
        [flag_ptr.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def signal(flag_ptr, INTERPRETED: tl.constexpr):
    """Sets the flag once all threads of the program have written what they wrote before."""
    if INTERPRETED:
        tl.store(flag_ptr, 1)
    else:  # tl.debug_barrier and tl.atomic_xchg do this too, but no loop with a barrier is pipelined
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            bar.sync 0;
            @first st.release.gpu.global.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [flag_ptr.to(tl.uint64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
