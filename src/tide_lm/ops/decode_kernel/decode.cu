// One token of one sequence in one launch: a block on every multiprocessor, all of them resident at once.
//
// In each block one thread streams the block's share of all weights, in the order in which they are needed,
// through a ring in shared memory. It waits for room, and for the oldest of the few copies under way, but for no
// other block, so that memory is read while blocks wait for each other. Warps take rows from the ring, two at a
// time, and multiply them with a vector that all blocks made together. Such vectors travel through global memory as words of a value and a tag: who
// needs one reads until its tag is right, so there is neither a barrier between blocks nor, but for the rows of
// memory and at the end, a fence. Counters tell when it is worth to look; what they say may be early. Warps that
// neither stream nor multiply look the token's rows of memory up. The last block to end picks the most likely token.
//
// docs/engine.md explains it with a picture. Files are in the order of reading.
#include "sizes.cuh"
#ifndef EMULATED
#include "device.cuh"
#endif
#include "numbers.cuh"
#include "products.cuh"
#include "shared.cuh"
#include "stream.cuh"
#include "lookup.cuh"
#include "worker.cuh"
#include "attention.cuh"
#include "ffn.cuh"
#include "head.cuh"

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode(const Args *args) {
    char *memory = shared_memory();
    Shared &s = *(Shared *)(memory + SLOTS * SLOT);
    const Args &a = s.args;
    Worker w{a, s, memory, (int)threadIdx.x, (int)threadIdx.x / 32, (int)threadIdx.x % 32, (int)blockIdx.x, (int)gridDim.x};
    if (threadIdx.x == 0) {
        s.args = *args;
        s.done = 0;
        for (int i = 0; i < SLOTS; i++) init_barrier(&s.full[i]), init_barrier(&s.empty[i]);
        publish_barriers();
    }
    __syncthreads();
    if (w.warp >= WARPS) {
        give_registers_away();
        if (threadIdx.x == THREADS) Stream{memory, s, 0}.all(a);
        if (!K || w.warp == WARPS || !a.bytes) return;
        for (int k = w.block; k < K; k += w.blocks) {
            decode_row(a, s.row_squares, threadIdx.x - THREADS - 32, k);
            __threadfence();
            sync_lookup_warps();
            if (threadIdx.x == THREADS + 32) add_one(w.counter(ROWS_DONE));
        }
        return;
    }

    take_more_registers();
    w.position = (int)*a.place, w.token = *a.token, w.tokens = *a.step, w.before = w.tokens * L;
    for (int i = w.thread; i < HD; i += THREADS) s.rope_here[i] = a.rope[(i64)w.position * HD + i];
    sync_multiplying_warps();

    for (int layer = 0; layer < L; layer++) {
        const int odd = recompute(layer & 1, 2);
        w.thread = recompute(w.thread, THREADS), w.warp = recompute(w.warp, WARPS), w.lane = recompute(w.lane, 32);
        const Layer l{
            layer,
            w.before + layer + 1,
            a.mail + STATE + odd * D,
            a.mail + STATE + (odd ^ 1) * D,
            a.mail + PROJECTED + odd * NQ,
            a.mail + PARTS + odd * KV * SPLITS * SPLIT_NUMBERS,
            a.mail + MIDDLE + odd * D,
            (u32 *)(a.mail + ATTENDED) + odd * Q,
            (u32 *)(a.mail + ACTIVE) + odd * ACTIVE_NUMBERS,
        };
        Projection projection(w, l);
        w.run(projection);
        if (GATES && layer == 0) w.await_rows();
        if (w.block < KV * SPLITS) attend(w, l);
        if (w.blocks - 1 - w.block < H) merge_splits(w, l);
        AttentionOutput output(w, l);
        w.run(output);
        if (K && !GATES && layer == 0) w.await_rows();
        GateUpAndRouter gate_up(w, l);
        w.run(gate_up);
        DownAndMemory down(w, l);
        w.run(down);
    }
    Head head(w);
    w.run(head);
    pick_token(w, head);
}
