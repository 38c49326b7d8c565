// The thread that copies the block's share of all weights into the ring, in the order in which they are needed.
#pragma once

// Its loops are not unrolled: it has too few registers for that.
struct Stream {
    char *ring;
    Shared &s;
    u32 n;                                 // units that were copied so far
    // One unit: a row, rows that follow each other, or two rows from two places.
    DEVICE void put(const u16 *first, u32 bytes, const u16 *second = 0) {
        const u32 slot = n % SLOTS, round = n / SLOTS;
        if (round) wait_for_phase(&s.empty[slot], (round - 1) & 1);
        if (n >= LIMIT) wait_for_phase(&s.full[(n - LIMIT) % SLOTS], (n - LIMIT) / SLOTS & 1);
        char *to = ring + slot * SLOT;
        expect_bytes(&s.full[slot], second ? 2 * bytes : bytes);
        copy_to_ring(to, first, bytes, &s.full[slot]);
        if (second) copy_to_ring(to + bytes, second, bytes, &s.full[slot]);
        n++;
    }
    DEVICE void pairs(const u16 *rows, int count, int width) {
#pragma unroll 1
        for (int u = first_unit(PAIRS(count), blockIdx.x); u < first_unit(PAIRS(count), blockIdx.x + 1); u++)
            put(rows + (i64)2 * u * width, width * 2 << (2 * u + 1 < count));
    }
    DEVICE void all(const Args &a) {
        for (i64 l = 0; l < L; l++) {
            pairs(a.qkv + l * QKV_ROWS * D, NQ, D);
            pairs(a.o + l * D * Q, D, Q);
            const u16 *rows = a.ffn + l * FFN_ROWS * D;
#pragma unroll 1
            for (int u = first_unit(UP_UNITS, blockIdx.x); u < first_unit(UP_UNITS, blockIdx.x + 1); u++) {
                const int f = u - PAIRS(S);
                if (f < 0) put(rows + 2 * (F + u) * D, D * 4);       // two rows of the router
                else put(rows + f * D, D * 2, rows + (F + f) * D);   // a row of gate, and one of up
            }
#pragma unroll 1
            for (int u = first_unit(D, blockIdx.x); u < first_unit(D, blockIdx.x + 1); u++) put(a.down + (l * D + u) * F, F * 2);
        }
        pairs(a.head, V, D);
    }
};
