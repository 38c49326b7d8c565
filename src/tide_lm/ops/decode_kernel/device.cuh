// Hopper's instructions, one function each; tests replace this file with functions for the host.
#pragma once

DEVICE char *shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
DEVICE u32 address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }
DEVICE void init_barrier(u64 *bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(bar)) : "memory");
}
DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void wait_for_phase(u64 *bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            address(bar)),
        "r"(parity)
        : "memory");
}
DEVICE void arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory");
}
DEVICE void expect_bytes(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(bar)), "r"(bytes) : "memory");
}
DEVICE void copy_to_ring(char *to, const void *from, u32 bytes, u64 *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)),
                 "l"(from), "r"(bytes), "r"(address(bar))
                 : "memory");
}
DEVICE void sync_multiplying_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
DEVICE void sync_lookup_warps() { asm volatile("bar.sync 2, %0;" ::"n"(LOOKUP_THREADS) : "memory"); }
DEVICE u32 load_relaxed(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 load_relaxed(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void load_relaxed2(u64 *v, const u64 *p) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}
DEVICE void load_relaxed4(u32 *v, const u32 *p) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p)
                 : "memory");
}
DEVICE void store_relaxed(u32 *p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void store_relaxed(u64 *p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void add_one(u32 *p) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
// Adds a product of 16 rows and 8 columns of 16 numbers each; a register has two numbers (m16n8k16).
DEVICE void multiply_tile(float *sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 pack_bf16(float first, float second) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}
// Hides from the compiler that x is what it was, so that it computes what depends on x here again. Values that it kept
// from before a loop would be spilled.
DEVICE int recompute(int x, int below) {
    asm volatile("" : "+r"(x));
    __builtin_assume((u32)x < (u32)below);
    return x;
}
DEVICE u32 largest(u32 x) { return __reduce_max_sync(~0u, x); }
DEVICE u32 sum(u32 x) { return __reduce_add_sync(~0u, x); }
DEVICE void give_registers_away() {
#if WARPS == 8
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
}
DEVICE void take_more_registers() {  // all that the other warps gave away
#if WARPS == 8
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}
DEVICE i64 nanoseconds() {
    i64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
