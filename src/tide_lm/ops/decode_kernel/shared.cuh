// What a block has in shared memory besides the ring.
#pragma once

struct Held {
    Args args;
    int done;                              // units of a phase that are finished
    float squares[WARPS], row_squares[LOOKUP_THREADS / 32];
    u64 best[WARPS];
    float own[(QUERIES + 2) * HD];         // queries, key and value of this token, of one key head
    float attended[QUERIES * POSITION_WARPS * (HD + 2)];
    float rows[LARGER(K, 1) * SHARE];      // of the token's rows, what this block adds: K numbers for each of its share
    float rope_here[HD];                   // cosines and sines of this position
    u16 x[LARGER(LARGER(D, ACTIVE_NUMBERS), Q)] __attribute__((aligned(16)));  // the vector to multiply with
};
constexpr int SLOTS = (ROOM - (int)sizeof(Held)) / (SLOT + 2 * (int)sizeof(u64));
static_assert(WARPS + LIMIT <= SLOTS, "a warp must not wait for a slot that is two rounds behind");
struct Shared : Held {
    u64 full[SLOTS], empty[SLOTS];         // barriers of the ring's slots
};
extern "C" __device__ const int mail_words = WORDS, threads = ALL_THREADS;  // for the host
