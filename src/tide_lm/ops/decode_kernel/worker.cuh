// A thread of the warps that multiply: how it waits for a vector, and how it takes part in a phase of products.
#pragma once

// A phase makes UNITS products, each of ROWS rows of WIDTH numbers with the same vector, and counts in DONE. Each kind of
// phase says how the vector is received (`receive`) and what becomes of a sum (`finish`); the rest has defaults.
template <int units, int rows, int width, int done> struct Phase {
    static constexpr int UNITS = units, ROWS = rows, WIDTH = width, DONE = done;
    DEVICE int rows_of(int) { return ROWS; }
    DEVICE float added(int) { return 0.0f; }    // a number of this lane, which is added to the sum of a unit's first row
    DEVICE float weight() { return 0.0f; }      // times this
    DEVICE int early(int, int) { return 0; }    // what `finish` needs and can be loaded before the products
};
// Units of two rows each; the last has one row if all_rows is odd.
template <int all_rows, int width, int done> struct PairsPhase : Phase<PAIRS(all_rows), 2, width, done> {
    DEVICE int rows_of(int u) { return all_rows % 2 ? min(2, all_rows - 2 * u) : 2; }
};

// A layer: its number, the tag of its words, and where the vectors lie that blocks exchange in it.
struct Layer {
    int number;
    u32 tag;
    u64 *state, *next_state, *projected, *parts, *middle;
    u32 *attended, *active;
};

struct Worker {
    const Args &a;
    Shared &s;
    char *ring;
    int thread, warp, lane;
    const int block, blocks;               // this block, of so many
    int position = 0;
    i64 token = 0;
    u32 tokens = 0, before = 0;            // tokens that were decoded before, and the layers of all of them
    u32 units_before = 0;                  // units that this block has taken from the ring

    DEVICE u32 *counter(int which) const { return (u32 *)(a.mail + COUNTERS + which * 16); }

#ifdef TIMES
    // For benchmarks/decode_phases.py: when this thread, or the block's first, got here.
    DEVICE void stamp(const Layer &l, int i) { a.times[((i64)l.number * blocks + block) * 16 + i] = nanoseconds(); }
    DEVICE void mark(const Layer &l, int i) {
        if (thread == 0) stamp(l, i);
    }
#else
    DEVICE void stamp(const Layer &, int) {}
    DEVICE void mark(const Layer &, int) {}
#endif

    // Waits until all blocks but one in EARLY have written their parts of a vector. Loads of words before that would find
    // little and disturb those that write.
    DEVICE void wait_for_most(int which, int parts, u32 times) {
        const int writers = min(parts, blocks);
        const u32 enough = (u32)writers * times - writers / EARLY;
        if (thread == 0)
            while ((int)(load_relaxed(counter(which)) - enough) < 0) {}
        sync_multiplying_warps();
    }

    // Waits for the token's rows of memory, and keeps what this block will add of them.
    DEVICE void await_rows() {
        if (a.bytes && thread == 0) {
            while ((int)(load_relaxed(counter(ROWS_DONE)) - K * (tokens + 1)) < 0) {}
            __threadfence();
        }
        sync_multiplying_warps();
        const int first = first_unit(D, block), mine = first_unit(D, block + 1) - first;
        for (int k = warp; k < K; k += WARPS)
            for (int u = lane; u < mine; u += 32) s.rows[u * K + k] = a.rows[k * D + first + u];
        sync_multiplying_warps();
    }

    // Warps divide the block's units. A warp takes its first unit from the ring before the vector is there. It multiplies
    // BATCH units before it sums them up over its lanes. Then lanes 0 to 3 have the sum of the first unit's first row,
    // lanes 4 to 7 that of its second row, and so on; the first of four lanes finishes it. The last warp counts.
    template <class P> DEVICE void run(P &phase) {
        constexpr int R = P::ROWS, n = P::WIDTH, BATCH = 4;
        const int first = first_unit(P::UNITS, block), mine = first_unit(P::UNITS, block + 1) - first, row = lane / 4 % 2;
        if (mine <= 0) return;
        const u32 before_it = units_before;
        int i = (warp + WARPS - before_it % WARPS) % WARPS;
        RowPart<R, n> rows{};  // without a first value registers are spilled
        RowPart<1, n> x{};
        float added[BATCH] = {};
        decltype(phase.early(0, 0)) known{};
        auto unit = [&](int b) { return i + b * WARPS; };
        auto finishes = [&] { return lane % 4 == 0 && unit(lane / 8) < mine; };
        auto release = [&](int unit) {
            __syncwarp();
            if (lane == 0) arrive(&s.empty[(before_it + unit) % SLOTS]);
        };
        auto take = [&](int unit) {
            if (unit >= mine) return;
            const u32 n = before_it + unit, slot = n % SLOTS;
            wait_for_phase(&s.full[slot], n / SLOTS & 1);
            rows.take(ring + slot * SLOT, lane, phase.rows_of(first + unit));
            if (rows.HELD) release(unit);
        };
        auto prepare = [&] {
#pragma unroll
            for (int b = 0; b < BATCH; b++) added[b] = unit(b) < mine ? phase.added(first + unit(b)) : 0;
            if (finishes()) known = phase.early(first + unit(lane / 8), row);
        };
        prepare();
        take(i);
        phase.receive();
        units_before += mine;
        if (i >= mine) return;
        x.take(s.x, lane, 1);
        const float weight = phase.weight();  // while x is on its way to registers
        do {
            float sums[2 * BATCH] = {};
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (b && unit(b) >= mine) break;
                multiply(rows, x, sums + 2 * b);
                if (!rows.HELD) release(unit(b));
                take(unit(b + 1));
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) sums[2 * b] += weight * added[b];
            const float total = sum_each_of_eight(sums, lane), other = __shfl_xor_sync(~0u, total, 4);
            if (finishes()) phase.finish(first + unit(lane / 8), row, total, other, known);
            __syncwarp();
            const int done = min(BATCH, (mine - i + WARPS - 1) / WARPS);
            if (P::DONE != NOT_COUNTED && lane == 0 && atomicAdd(&s.done, done) == mine - done) {
                s.done = 0;
                add_one(counter(P::DONE));
            }
            i += BATCH * WARPS;
            if (i < mine) prepare();
        } while (i < mine);
    }

    // Receives a state, and leaves it times the norm's gain in s.x; returns 1 / rms, which each product is yet to be
    // multiplied with. Without a mailbox to receive `from`, the state is the token's embedding.
    DEVICE float receive_normed(int which, int parts, const u64 *from, u32 tag, const u16 *gain) {
        constexpr int EACH = (D / 2 + THREADS - 1) / THREADS;
        u32 gains[EACH];
        u64 seen[EACH][2];
        float square = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (thread + i * THREADS) * 2;
            if (d < D) gains[i] = *(const u32 *)(gain + d);
        }
        if (from) wait_for_most(which, parts, tag);
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int d = (thread + i * THREADS) * 2;
                if (d >= D) continue;
                if (from) {
                    load_relaxed2(seen[i], from + d);
                } else {
                    const u32 two = *(const u32 *)(a.embed + token * D + d);
                    seen[i][0] = tagged_float(low(two), tag), seen[i][1] = tagged_float(high(two), tag);
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if ((thread + i * THREADS) * 2 < D) missing |= !has_tag(seen[i][0], tag) || !has_tag(seen[i][1], tag);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (thread + i * THREADS) * 2;
            if (d >= D) continue;
            const float first = value_of(seen[i][0]), second = value_of(seen[i][1]);
            square += first * first + second * second;
            *(u32 *)(s.x + d) = pack_bf16(first * low(gains[i]), second * high(gains[i]));
        }
        square = sum(square);
        if (lane == 0) s.squares[warp] = square;
        sync_multiplying_warps();
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += s.squares[i];
        return rsqrtf(total / D + a.eps);
    }

    // Receives N numbers in bfloat16, whose tags have 16 bits, and leaves them in s.x.
    template <int N> DEVICE void receive(int which, int parts, const u32 *from, u32 tag) {
        constexpr int EACH = (N / 4 + THREADS - 1) / THREADS;
        u32 seen[EACH][4];
        wait_for_most(which, parts, tag);
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int d = (thread + i * THREADS) * 4;
                if (d < N) load_relaxed4(seen[i], from + d);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if ((thread + i * THREADS) * 4 < N) missing |= seen[i][j] >> 16 != (tag & 0xffff);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (thread + i * THREADS) * 4;
            if (d >= N) continue;
            uint2 four = {(seen[i][0] & 0xffff) | seen[i][1] << 16, (seen[i][2] & 0xffff) | seen[i][3] << 16};
            *(uint2 *)(s.x + d) = four;
        }
        sync_multiplying_warps();
    }
};
