"""For racecheck: a kernel that reads shared memory of other threads without waiting for them.

Triton places its barriers itself and cannot be told to leave one out, hence PTX.
"""

import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

NUM_THREADS = 256
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry race_kernel(.param .u64 out)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 tile[1024];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, tile;
    add.s32 %r4, %r3, %r2;
    st.shared.u32 [%r4], %r1;
    sub.s32 %r5, 1020, %r2;
    add.s32 %r5, %r3, %r5;
    ld.shared.u32 %r5, [%r5];
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r5;
    ret;
}
"""

if __name__ == "__main__":
    out = torch.empty(NUM_THREADS, dtype=torch.int32, device="cuda")
    Device(torch.cuda.current_device()).set_current()
    race = ObjectCode.from_ptx(PTX, name="planted_race").get_kernel("race_kernel")
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    launch(stream, LaunchConfig(grid=1, block=NUM_THREADS), race, out.data_ptr())
    torch.cuda.synchronize()
