// One token of one sequence in one launch: a block on every multiprocessor, all of them resident at once.
//
// In each block one thread streams the block's share of all weights, in the order in which they are needed,
// through a ring in shared memory; it waits for room and for nothing else, so that memory is read while
// blocks wait for each other. Warps take rows from the ring, two at a time, and multiply them with a vector
// that all blocks made together. Such vectors travel through global memory as words of a value and a tag: who
// needs one reads until its tag is right, so there is neither a barrier between blocks nor, but for the rows of
// memory and at the end, a fence. Counters tell when it is worth to look; what they say may be early. Warps that
// neither stream nor multiply look the token's rows of memory up. The last block to end picks the most likely token.
//
// Sizes are macros: D hidden, F of the FFN, H heads, KV key heads, HD of a head, L layers, V vocabulary,
// K blocks of memory, MIXED of them in a layer, S slots of its router, GATES of its values, SPLITS of attention,
// WARPS that multiply, ROOM bytes of shared memory, SLOT of one place in the ring, LIMIT of copies under way, BITS
// of packed rows (0: they are not packed) and ROW_GROUP of their numbers with one scale. A vector is looked at when
// all but one in EARLY of its blocks are done. Of D numbers a block has SHARE at most.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define Q (H * HD)                         // all queries
#define NQ (Q + 2 * KV * HD + GATES)       // rows of the first product
#define QKV ((NQ + 7) / 8 * 8)             // and of its matrix
#define GROUP (H / KV)
#define THREADS (WARPS * 32)
#define LOOKING 96                         // threads that look rows up
#define ALL_THREADS (THREADS + 32 + LOOKING)
#define PAIRS(n) (((n) + 1) / 2)
#define UP (PAIRS(S) + F)                  // units of the router, which come first, and of the FFN's first half
#define ACTIVES (F + (S + 7) / 8 * 8)      // numbers that they give, the FFN's first
#define FFN (F + ACTIVES)                  // rows of the matrix of gate, up and router
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define HEADS (GROUP % 2 ? GROUP : GROUP / 2)    // of one warp in attention
#define APART (WARPS / (GROUP / HEADS))    // warps with other positions
#define PART (GROUP * (HD + 1))            // of each head the mean of its values, and the log of their weights' sum
#define LANES (HD / 8)                     // that share a position
static_assert(S <= 32 && D % 8 == 0 && F % 8 == 0 && HD % 16 == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 32, "");
static_assert(SLOT >= 4 * LARGER(D, Q) && SLOT >= 2 * F && SLOT % 16 == 0, "");

struct Args {
    const u16 *qkv, *o, *ffn, *down, *embed, *head, *norm1, *norm2, *norm3;
    const float *rope;                     // [T, HD]: half of it cosines, half sines
    float *rows;                           // [K, D]: the token's
    u16 *cache;                            // [L, 2, KV, T, HD]
    u64 *mail;
    float *logits;
    u64 *best;                             // of each block, as one number
    i64 *token, *place;                    // the last token, and its position
    u32 *step;                             // tokens that were made, whatever sequence they were of
    i64 *times;
    const unsigned char *bytes;            // rows of all tokens, on the device or the host; 0: `rows` are there already
    const i64 *which;                      // of them
    const u16 *gains;                      // [K, D], of tables as trained
    const float *levels, *columns;         // of packed rows
    i64 stride;                            // bytes of a row
    float eps, value_scale;
    int T;                                 // positions that the cache has
};

// Where words are, in words of 64 bits, each vector twice, for even and odd layers; 32 bits from ATTENDED on.
#define STATE 0
#define PROJECTED (STATE + 2 * D)
#define PARTS (PROJECTED + 2 * NQ)
#define MIDDLE (PARTS + 2 * KV * SPLITS * PART)
#define ATTENDED (MIDDLE + 2 * D)
#define ACTIVE (ATTENDED + Q)
#define COUNTERS ((ACTIVE + ACTIVES + 15) / 16 * 16)  // each in a line of its own
#define WORDS (COUNTERS + (HEAD_DONE + KV) * 16)
enum { PROJECTED_DONE, ATTENDED_DONE, MIDDLE_DONE, ACTIVE_DONE, STATE_DONE, ROWS_DONE, FINISHED, HEAD_DONE, NOT_COUNTED = -1 };

#ifndef EMULATED
__device__ __forceinline__ char *shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
__device__ __forceinline__ u32 address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }
__device__ __forceinline__ void init_barrier(u64 *bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(bar)) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wait(u64 *bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            address(bar)),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory");
}
__device__ __forceinline__ void expect(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy(char *to, const void *from, u32 bytes, u64 *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)),
                 "l"(from), "r"(bytes), "r"(address(bar))
                 : "memory");
}
__device__ __forceinline__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void sync_looking() { asm volatile("bar.sync 2, %0;" ::"n"(LOOKING) : "memory"); }
__device__ __forceinline__ u32 peek(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64 peek(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void peek2(u64 *v, const u64 *p) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void peek4(u32 *v, const u32 *p) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p)
                 : "memory");
}
__device__ __forceinline__ void poke(u32 *p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void poke(u64 *p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void count(u32 *p) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
// Adds a product of 16 rows with 8 columns, of 16 numbers each: a lane has two numbers in a register (m16n8k16).
__device__ __forceinline__ void multiply_tile(float *sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 both(float first, float second) {  // as bfloat16
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}
// What is made of it is made here: kept from before, it would be spilled.
__device__ __forceinline__ int anew(int x, int below) {
    asm volatile("" : "+r"(x));
    __builtin_assume((u32)x < (u32)below);
    return x;
}
__device__ __forceinline__ u32 largest(u32 x) { return __reduce_max_sync(~0u, x); }
__device__ __forceinline__ u32 sum(u32 x) { return __reduce_add_sync(~0u, x); }
__device__ __forceinline__ void keep_few_registers() {
#if WARPS == 8
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
}
__device__ __forceinline__ void take_more_registers() {  // all that the others left
#if WARPS == 8
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}
__device__ __forceinline__ i64 nanoseconds() {
    i64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
#endif

__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
__device__ __forceinline__ u64 word(float value, u32 tag) { return (u64)tag << 32 | __float_as_uint(value); }
__device__ __forceinline__ u32 word16(float value, u32 tag) { return tag << 16 | both(value, 0); }
__device__ __forceinline__ bool tagged(u64 seen, u32 tag) { return (u32)(seen >> 32) == tag; }
__device__ __forceinline__ float value(u64 seen) { return __uint_as_float((u32)seen); }
__device__ __forceinline__ float value(u64 seen, const u64 *p, u32 tag) {  // of a word, looked at before
    while (!tagged(seen, tag)) seen = peek(p);
    return value(seen);
}
__device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
// Eight numbers of each lane, each summed over all lanes: four lanes get the first sum, the next four the second, ...
__device__ __forceinline__ float sum_of_eight(float *x, int lane) {
#pragma unroll
    for (int step = 16, left = 4; left; step /= 2, left /= 2)
#pragma unroll
        for (int i = 0; i < left; i++) {
            const float kept = lane & step ? x[i + left] : x[i], sent = lane & step ? x[i] : x[i + left];
            x[i] = kept + __shfl_xor_sync(~0u, sent, step);
        }
    x[0] += __shfl_xor_sync(~0u, x[0], 2);
    return x[0] + __shfl_xor_sync(~0u, x[0], 1);
}
__device__ __forceinline__ u32 order(float value) {  // as numbers are ordered
    const u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ u64 ordered(float value, u32 token) {  // larger for larger values, and the first token
    return (u64)order(value) << 32 | (0x7fffffff - token);
}
__device__ __forceinline__ u64 largest(u64 x) {
#pragma unroll
    for (int i = 16; i; i /= 2) {
        const u64 other = __shfl_xor_sync(~0u, x, i);
        x = LARGER(x, other);
    }
    return x;
}
__device__ __forceinline__ int first_of(int units, u32 block) { return (u32)units * block / gridDim.x; }
__device__ __forceinline__ void unpack(uint4 eight, float *out) {
    out[0] = low(eight.x), out[1] = high(eight.x), out[2] = low(eight.y), out[3] = high(eight.y);
    out[4] = low(eight.z), out[5] = high(eight.z), out[6] = low(eight.w), out[7] = high(eight.w);
}

// R rows of n numbers in shared memory, those of a lane: eight of 256. Unless they are many, in registers.
template <int R, int n> struct Part {
    static constexpr int CHUNKS = (n + 255) / 256, UNROLLED = n <= 4096 ? CHUNKS : 4;  // a Part<1, n> may be held
    static constexpr bool HELD = R * n <= 4096;
    const u16 *from;
    int lane, rows;
    uint4 held[R][HELD ? CHUNKS : 1];
    __device__ __forceinline__ uint4 look(int r, int i) const {
        const int c = (i * 32 + lane) * 8;
        return (r == 0 || r < rows) && (n % 256 == 0 || c < n) ? *(const uint4 *)(from + r * n + c) : uint4{0, 0, 0, 0};
    }
    __device__ __forceinline__ uint4 chunk(int r, int i) const { return HELD ? held[r][i] : look(r, i); }
    __device__ __forceinline__ void take(const void *memory, int of_lane, int of_rows) {
        from = (const u16 *)memory, lane = of_lane, rows = of_rows;
#pragma unroll
        for (int i = 0; i < (HELD ? CHUNKS : 0); i++)
#pragma unroll
            for (int r = 0; r < R; r++) held[r][i] = look(r, i);
    }
};

// Rows times x: every lane has a part of the sums. Four lanes' numbers are a row of a tile, and the same numbers of x
// a column, so that the sums lie on the diagonal of what tiles give.
template <int R, int n>
__device__ __forceinline__ void multiply(const Part<R, n> &rows, const Part<1, n> &x, float *sums) {
    float found[4][4] = {};
#pragma unroll Part<R, n>::UNROLLED
    for (int i = 0; i < Part<R, n>::CHUNKS; i++) {
        const uint4 v = x.chunk(0, i), w = rows.chunk(0, i), z = R == 1 ? uint4{0, 0, 0, 0} : rows.chunk(R - 1, i);
        multiply_tile(found[i % 2], w.x, z.x, w.y, z.y, v.x, v.y);
        multiply_tile(found[2 + i % 2], w.z, z.z, w.w, z.w, v.z, v.w);
    }
    const bool on_diagonal = rows.lane % 4 == rows.lane / 8, odd = rows.lane / 4 % 2;
#pragma unroll
    for (int r = 0; r < R; r++) {
        float both_sums[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            both_sums[i] = (found[0][2 * r + i] + found[1][2 * r + i]) + (found[2][2 * r + i] + found[3][2 * r + i]);
        sums[r] = on_diagonal ? (odd ? both_sums[1] : both_sums[0]) : 0;
    }
}

template <int R, int n> struct Size {
    static constexpr int rows = R, numbers = n;
};

struct Held {
    Args args;
    int done;                              // units of a phase
    float squares[WARPS], row_squares[LOOKING / 32];
    u64 best[WARPS];
    float own[(GROUP + 2) * HD];           // queries, key and value of this token, of one key head
    float attended[GROUP * APART * (HD + 2)];
    float rows[LARGER(K, 1) * SHARE];      // what the token's rows have for this block: all of its first number, ...
    float turn[HD];                        // how far a head's numbers are turned at this position
    u16 x[LARGER(LARGER(D, ACTIVES), Q)] __attribute__((aligned(16)));
};
constexpr int SLOTS = (ROOM - (int)sizeof(Held)) / (SLOT + 2 * (int)sizeof(u64));
static_assert(WARPS + LIMIT <= SLOTS, "a warp must not wait for a slot that is two rounds behind");
struct Shared : Held {
    u64 full[SLOTS], empty[SLOTS];
};
extern "C" __device__ const int mail_words = WORDS, threads = ALL_THREADS;

struct Stream {                            // its loops are not unrolled, for which it has too few registers
    char *ring;
    Shared &s;
    u32 n;
    __device__ __forceinline__ void put(const u16 *first, u32 bytes, const u16 *second = 0) {
        const u32 slot = n % SLOTS, round = n / SLOTS;
        if (round) wait(&s.empty[slot], (round - 1) & 1);
        if (n >= LIMIT) wait(&s.full[(n - LIMIT) % SLOTS], (n - LIMIT) / SLOTS & 1);
        char *to = ring + slot * SLOT;
        expect(&s.full[slot], second ? 2 * bytes : bytes);
        copy(to, first, bytes, &s.full[slot]);
        if (second) copy(to + bytes, second, bytes, &s.full[slot]);
        n++;
    }
    __device__ __forceinline__ void pairs(const u16 *rows, int count, int width) {
#pragma unroll 1
        for (int u = first_of(PAIRS(count), blockIdx.x); u < first_of(PAIRS(count), blockIdx.x + 1); u++)
            put(rows + (i64)2 * u * width, width * 2 << (2 * u + 1 < count));
    }
    __device__ __forceinline__ void all(const Args &a) {
        for (i64 l = 0; l < L; l++) {
            pairs(a.qkv + l * QKV * D, NQ, D);
            pairs(a.o + l * D * Q, D, Q);
            const u16 *rows = a.ffn + l * FFN * D;
#pragma unroll 1
            for (int u = first_of(UP, blockIdx.x); u < first_of(UP, blockIdx.x + 1); u++) {
                const int f = u - PAIRS(S);
                if (f < 0) put(rows + 2 * (F + u) * D, D * 4);
                else put(rows + f * D, D * 2, rows + (F + f) * D);
            }
#pragma unroll 1
            for (int u = first_of(D, blockIdx.x); u < first_of(D, blockIdx.x + 1); u++) put(a.down + (l * D + u) * F, F * 2);
        }
        pairs(a.head, V, D);
    }
};

#ifdef TIMES
#define STAMP(i) a.times[((i64)layer * G + me) * 16 + (i)] = nanoseconds();
#define MARK(i) if (thread == 0) STAMP(i)
#else
#define STAMP(i)
#define MARK(i)
#endif

// One of the token's rows: of tables as trained, which are normalised, or packed in BITS. It may be far away, so that a
// thread asks for all of its share, eight numbers of every so many, before it uses any.
__device__ __forceinline__ void look_up(const Args &a, float *squares, int thread, int k) {
    constexpr int EACH = (D / 8 + LOOKING - 1) / LOOKING;
    const unsigned char *row = a.bytes + *a.which * a.stride;
    auto chunks = [&](auto use) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int d = (thread + j * LOOKING) * 8;
            if (d < D) use(j, k * D + d);
        }
    };
    float out[8];
    auto put = [&](int n) {
#pragma unroll
        for (int i = 0; i < 8; i++) a.rows[n + i] = out[i];
    };
#if BITS == 0 || BITS == 16
    uint4 raw[EACH] = {};
    chunks([&](int j, int n) { raw[j] = *(const uint4 *)((const u16 *)row + n); });
#if BITS == 16
    chunks([&](int j, int n) { unpack(raw[j], out), put(n); });
#else
    float square = 0;
    uint4 gains[EACH];
    chunks([&](int j, int n) {
        gains[j] = *(const uint4 *)(a.gains + n);
        unpack(raw[j], out);
#pragma unroll
        for (int i = 0; i < 8; i++) square += out[i] * out[i];
    });
    square = sum(square);
    if (thread % 32 == 0) squares[thread / 32] = square;
    sync_looking();
    square = 0;
#pragma unroll
    for (int i = 0; i < LOOKING / 32; i++) square += squares[i];
    const float scale = rsqrtf(square / D + a.eps);
    chunks([&](int j, int n) {
        float gain[8];
        unpack(raw[j], out), unpack(gains[j], gain);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] *= scale * gain[i];
        put(n);
    });
#endif
#else
    const int groups = (K * D + ROW_GROUP - 1) / ROW_GROUP;
    const unsigned char *scales = row + groups * ROW_GROUP * BITS / 8, *last = scales + groups;
    u64 codes[EACH] = {};
    u32 scale[EACH], of_row = 0;
    chunks([&](int j, int n) {             // eight numbers are BITS bytes, and of one group
#pragma unroll
        for (int i = 0; i < BITS; i++) codes[j] |= (u64)row[n / 8 * BITS + i] << 8 * i;
        scale[j] = scales[n / ROW_GROUP];
    });
#pragma unroll
    for (int i = 0; i < 4; i++) of_row |= (u32)last[i] << 8 * i;
    chunks([&](int j, int n) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if BITS == 3
            const int code = (codes[j] >> 2 * i & 3) + (codes[j] >> (16 + i) & 1) * 4;
#else
            const int code = codes[j] >> BITS * i & ((1 << BITS) - 1);
#endif
            out[i] = a.levels[code] * (scale[j] * __uint_as_float(of_row)) * a.columns[n + i];
        }
        put(n);
    });
#endif
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode(const Args *args) {
    char *memory = shared_memory();
    Shared &s = *(Shared *)(memory + SLOTS * SLOT);
    const Args &a = s.args;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int me = blockIdx.x, G = gridDim.x;
    if (threadIdx.x == 0) {
        s.args = *args;
        s.done = 0;
        for (int i = 0; i < SLOTS; i++) init_barrier(&s.full[i]), init_barrier(&s.empty[i]);
        publish_barriers();
    }
    __syncthreads();
    auto counter = [&](int which) { return (u32 *)(a.mail + COUNTERS + which * 16); };
    if (warp >= WARPS) {
        keep_few_registers();
        if (threadIdx.x == THREADS) Stream{memory, s, 0}.all(a);
        if (!K || warp == WARPS || !a.bytes) return;
        for (int k = me; k < K; k += G) {
            look_up(a, s.row_squares, threadIdx.x - THREADS - 32, k);
            __threadfence();
            sync_looking();
            if (threadIdx.x == THREADS + 32) count(counter(ROWS_DONE));
        }
        return;
    }

    take_more_registers();
    const int position = (int)*a.place;
    const i64 token = *a.token;
    const u32 tokens = *a.step, before = tokens * L;  // that were made, and their layers
    u32 units_before = 0;
    for (int i = thread; i < HD; i += THREADS) s.turn[i] = a.rope[(i64)position * HD + i];
    sync_warps();

    auto await_rows = [&] {
        if (a.bytes && thread == 0) {
            while ((int)(peek(counter(ROWS_DONE)) - K * (tokens + 1)) < 0) {}
            __threadfence();
        }
        sync_warps();
        const int first = first_of(D, me), mine = first_of(D, me + 1) - first;
        for (int k = warp; k < K; k += WARPS)
            for (int u = lane; u < mine; u += 32) s.rows[u * K + k] = a.rows[k * D + first + u];
        sync_warps();
    };
    auto counted = [&](int which, int blocks, u32 times) {  // waits until many of so many blocks have, so many times
        const u32 enough = (u32)min(blocks, G) * times - min(blocks, G) / EARLY;
        if (thread == 0)
            while ((int)(peek(counter(which)) - enough) < 0) {}
        sync_warps();
    };
    // A phase of so many units, each of R rows of n numbers, the last perhaps of fewer. Before the vector is received
    // the first unit is taken from the ring; four units are multiplied before their sums are made. Then four lanes
    // have the sum of one row: the first of them gets it, that of the unit's other row, and what `early` gave it.
    // To each first row's sum is added what `add` gave times what `weigh` gave, of all lanes. Blocks that are done are
    // counted.
    auto each = [&](int which, int units, auto size, auto rows_of, auto add, auto early, auto receive, auto weigh, auto finish) {
        constexpr int R = decltype(size)::rows, n = decltype(size)::numbers, BATCH = 4;
        const int first = first_of(units, me), mine = first_of(units, me + 1) - first, row = lane / 4 % 2;
        if (mine <= 0) return;
        const u32 before_it = units_before;
        int i = (warp + WARPS - before_it % WARPS) % WARPS;
        Part<R, n> rows{};  // without a first value registers are spilled
        Part<1, n> x{};
        float added[BATCH] = {};
        decltype(early(0, 0)) known{};
        auto unit = [&](int b) { return i + b * WARPS; };
        auto finishes = [&] { return lane % 4 == 0 && unit(lane / 8) < mine; };
        auto release = [&](int unit) {
            __syncwarp();
            if (lane == 0) arrive(&s.empty[(before_it + unit) % SLOTS]);
        };
        auto take = [&](int unit) {
            if (unit >= mine) return;
            const u32 n = before_it + unit, slot = n % SLOTS;
            wait(&s.full[slot], n / SLOTS & 1);
            rows.take(memory + slot * SLOT, lane, rows_of(first + unit));
            if (rows.HELD) release(unit);
        };
        auto prepare = [&] {
#pragma unroll
            for (int b = 0; b < BATCH; b++) added[b] = unit(b) < mine ? add(first + unit(b)) : 0;
            if (finishes()) known = early(first + unit(lane / 8), row);
        };
        prepare();
        take(i);
        receive();
        units_before += mine;
        if (i >= mine) return;
        x.take(s.x, lane, 1);
        const float weight = weigh();      // while x is on its way to registers
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
            const float total = sum_of_eight(sums, lane), other = __shfl_xor_sync(~0u, total, 4);
            if (finishes()) finish(first + unit(lane / 8), row, total, other, known);
            __syncwarp();
            const int done = min(BATCH, (mine - i + WARPS - 1) / WARPS);
            if (which != NOT_COUNTED && lane == 0 && atomicAdd(&s.done, done) == mine - done) {
                s.done = 0;
                count(counter(which));
            }
            i += BATCH * WARPS;
            if (i < mine) prepare();
        } while (i < mine);
    };
    auto no_addition = [](int) { return 0.0f; };
    auto no_weight = [] { return 0.0f; };
    auto nothing = [](int, int) { return 0; };
    auto pairs_of = [](auto size) { return [](int u) { return decltype(size)::rows % 2 ? min(2, decltype(size)::rows - 2 * u) : 2; }; };
    // A state times a gain as the vector to multiply with; returns what all products are yet to be multiplied with.
    auto receive_normed = [&](int which, int blocks, const u64 *from, u32 tag, const u16 *gain) {
        constexpr int EACH = (D / 2 + THREADS - 1) / THREADS;
        u32 gains[EACH];
        u64 seen[EACH][2];
        float square = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (thread + i * THREADS) * 2;
            if (d < D) gains[i] = *(const u32 *)(gain + d);
        }
        if (from) counted(which, blocks, tag);
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int d = (thread + i * THREADS) * 2;
                if (d >= D) continue;
                if (from) {
                    peek2(seen[i], from + d);
                } else {
                    const u32 two = *(const u32 *)(a.embed + token * D + d);
                    seen[i][0] = word(low(two), tag), seen[i][1] = word(high(two), tag);
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if ((thread + i * THREADS) * 2 < D) missing |= !tagged(seen[i][0], tag) || !tagged(seen[i][1], tag);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (thread + i * THREADS) * 2;
            if (d >= D) continue;
            const float first = value(seen[i][0]), second = value(seen[i][1]);
            square += first * first + second * second;
            *(u32 *)(s.x + d) = both(first * low(gains[i]), second * high(gains[i]));
        }
        square = sum(square);
        if (lane == 0) s.squares[warp] = square;
        sync_warps();
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += s.squares[i];
        return rsqrtf(total / D + a.eps);
    };
    auto receive = [&](int which, int blocks, const u32 *from, auto size, u32 tag) {
        constexpr int N = decltype(size)::numbers, EACH = (N / 4 + THREADS - 1) / THREADS;
        u32 seen[EACH][4];
        counted(which, blocks, tag);
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int d = (thread + i * THREADS) * 4;
                if (d < N) peek4(seen[i], from + d);
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
        sync_warps();
    };

    for (int layer = 0; layer < L; layer++) {
        const u32 tag = before + layer + 1;
        const int odd = anew(layer & 1, 2);
        thread = anew(thread, THREADS), warp = anew(warp, WARPS), lane = anew(lane, 32);
        u64 *state = a.mail + STATE + odd * D, *next_state = a.mail + STATE + (odd ^ 1) * D;
        u64 *projected = a.mail + PROJECTED + odd * NQ, *parts = a.mail + PARTS + odd * KV * SPLITS * PART;
        u64 *middle = a.mail + MIDDLE + odd * D;
        u32 *attended = (u32 *)(a.mail + ATTENDED) + odd * Q, *active = (u32 *)(a.mail + ACTIVE) + odd * ACTIVES;

        float scale;
        // Queries, keys, values and the gates of these.
        each(PROJECTED_DONE, PAIRS(NQ), Size<2, D>(), pairs_of(Size<NQ, 1>()), no_addition, nothing, [&] {
            scale = receive_normed(STATE_DONE, D, layer ? state : 0, tag - 1, a.norm1 + layer * D);
            MARK(0)
        }, no_weight, [&](int u, int r, float total, float, int) {
            if (2 * u + r < NQ) poke(projected + 2 * u + r, word(total * scale, tag));
            STAMP(1)
        });
        if (GATES && layer == 0) await_rows();
        if (me < KV * SPLITS) {  // attention of one key head's queries over some positions
            const int g = me % KV, split = me / KV, cached = position;
            const int some = (cached + SPLITS) / SPLITS, from = split * some, to = min(from + some, cached + 1);
            const int d0 = lane % LANES * 8, first_head = warp / APART * HEADS;
            u16 *keys = a.cache + ((i64)layer * 2 * KV + g) * a.T * HD + d0, *values = keys + (i64)KV * a.T * HD;
            constexpr int STRIDE = APART * (32 / LANES), AHEAD = HEADS > 2 ? 2 : 4, TURNED = (GROUP + 1) * (HD / 2);
            const int of_warp = warp % APART * (32 / LANES), of_lane = lane / LANES;
            uint4 ks[AHEAD], vs[AHEAD];
            auto load = [&](int start) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const int p = start + i * STRIDE + of_lane;
                    const bool there = p < to && p < cached;
                    ks[i] = there ? *(const uint4 *)(keys + (i64)p * HD) : uint4{0, 0, 0, 0};
                    vs[i] = there ? *(const uint4 *)(values + (i64)p * HD) : uint4{0, 0, 0, 0};
                }
            };
            load(from + of_warp);  // which does not depend on what is awaited
            counted(PROJECTED_DONE, PAIRS(NQ), tag);
            MARK(2)
            for (int t = thread; t < TURNED + HD; t += THREADS) {
                if (t < TURNED) {
                    const int head = t / (HD / 2), d = t % (HD / 2);
                    const float cosine = s.turn[d], sine = s.turn[HD / 2 + d];
                    const u64 *row = projected + (head < GROUP ? (g * GROUP + head) * HD : Q + g * HD) + d;
                    const u64 one = peek(row), two = peek(row + HD / 2);
                    const float x = value(one, row, tag), y = value(two, row + HD / 2, tag);
                    const float by = head < GROUP ? rsqrtf((float)HD) : 1;
                    s.own[head * HD + d] = (x * cosine - y * sine) * by;
                    s.own[head * HD + d + HD / 2] = (y * cosine + x * sine) * by;
                } else {
                    const int d = t - TURNED;
                    const u64 *row = projected + Q + (KV + g) * HD + d;
                    float v = value(peek(row), row, tag);
#pragma unroll
                    for (int e = 0; e < GATES / KV; e++) {
                        const u64 *gate = projected + Q + 2 * KV * HD + e * KV + g;
                        const float open = 2 * a.value_scale / (1 + __expf(-value(peek(gate), gate, tag)));
                        v += open * a.rows[(layer % LARGER(K, 1)) * D + (e * KV + g) * HD + d];
                    }
                    s.own[(GROUP + 1) * HD + d] = v;
                }
            }
            sync_warps();
            MARK(3)
            float q[HEADS][8], most[HEADS], total[HEADS], out[HEADS][8];
#pragma unroll
            for (int i = 0; i < HEADS; i++) {
                most[i] = -1e30f, total[i] = 0;
#pragma unroll
                for (int j = 0; j < 8; j++) q[i][j] = s.own[(first_head + i) * HD + d0 + j], out[i][j] = 0;
            }
            for (int start = from + of_warp; start < to; start += AHEAD * STRIDE) {
                if (start > from + of_warp) load(start);
#pragma unroll
                for (int step = 0; step < AHEAD; step++) {
                    if (start + step * STRIDE >= to) break;
                    const int now = start + step * STRIDE + of_lane;
                    uint4 k_now = ks[step], v_now = vs[step];
                    if (now == position) {
                        const float *k = s.own + GROUP * HD + d0, *v = k + HD;
                        k_now = {both(k[0], k[1]), both(k[2], k[3]), both(k[4], k[5]), both(k[6], k[7])};
                        v_now = {both(v[0], v[1]), both(v[2], v[3]), both(v[4], v[5]), both(v[6], v[7])};
                        if (first_head == 0) {
                            *(uint4 *)(keys + (i64)now * HD) = k_now;
                            *(uint4 *)(values + (i64)now * HD) = v_now;
                        }
                    }
                    __syncwarp();
                    float k[8], v[8];
                    unpack(k_now, k), unpack(v_now, v);
#pragma unroll
                    for (int i = 0; i < HEADS; i++) {
                        float score = 0;
#pragma unroll
                        for (int j = 0; j < 8; j++) score += q[i][j] * k[j];
#pragma unroll
                        for (int j = LANES / 2; j; j /= 2) score += __shfl_xor_sync(~0u, score, j);
                        if (now >= to) score = -1e30f;
                        const float top = fmaxf(most[i], score), shrink = __expf(most[i] - top);
                        const float weight = now < to ? __expf(score - top) : 0;
                        most[i] = top;
                        total[i] = total[i] * shrink + weight;
#pragma unroll
                        for (int j = 0; j < 8; j++) out[i][j] = out[i][j] * shrink + weight * v[j];
                    }
                }
            }
#pragma unroll
            for (int step = LANES; step < 32; step *= 2)
#pragma unroll
                for (int i = 0; i < HEADS; i++) {
                    const float other = __shfl_xor_sync(~0u, most[i], step), top = fmaxf(most[i], other);
                    const float mine = __expf(most[i] - top), its = __expf(other - top);
                    most[i] = top;
                    total[i] = total[i] * mine + __shfl_xor_sync(~0u, total[i], step) * its;
#pragma unroll
                    for (int j = 0; j < 8; j++) out[i][j] = out[i][j] * mine + __shfl_xor_sync(~0u, out[i][j], step) * its;
                }
            if (lane < LANES)
#pragma unroll
                for (int i = 0; i < HEADS; i++) {
                    float *to_merge = s.attended + ((warp % APART) * GROUP + first_head + i) * (HD + 2);
#pragma unroll
                    for (int j = 0; j < 8; j++) to_merge[d0 + j] = out[i][j];
                    if (lane == 0) to_merge[HD] = most[i], to_merge[HD + 1] = total[i];
                }
            sync_warps();
            for (int t = thread; t < GROUP * HD; t += THREADS) {
                const int head = t / HD, d = t % HD;
                float top = -1e30f, all = 0, mean = 0;
#pragma unroll
                for (int i = 0; i < APART; i++) top = fmaxf(top, s.attended[(i * GROUP + head) * (HD + 2) + HD]);
#pragma unroll
                for (int i = 0; i < APART; i++) {
                    const float *one = s.attended + (i * GROUP + head) * (HD + 2);
                    const float weight = __expf(one[HD] - top);
                    all += weight * one[HD + 1];
                    mean += weight * one[d];
                }
                u64 *part = parts + (g * SPLITS + split) * PART + head * (HD + 1);
                poke(part + d, word(all > 0 ? mean / all : 0, tag));
                if (d == 0) poke(part + HD, word(all > 0 ? top + __logf(all) : -1e30f, tag));
            }
            sync_warps();
            if (thread == 0) count(counter(HEAD_DONE + g));
            MARK(4)
        }
        if (G - 1 - me < H) {  // what the splits of a head found, together
            if (thread < H && G - 1 - me + thread * G < H)
                while ((int)(peek(counter(HEAD_DONE + (G - 1 - me + thread * G) / GROUP)) - SPLITS * tag) < 0) {}
            sync_warps();
            MARK(5)
            for (int t = thread; t < (H - 1 - (G - 1 - me)) / G * HD + HD; t += THREADS) {
                const int head = G - 1 - me + t / HD * G, d = t % HD;
                const u64 *part = parts + head / GROUP * SPLITS * PART + head % GROUP * (HD + 1);
                u64 means[SPLITS], logs[SPLITS];
                for (bool missing = true; missing;) {
                    missing = false;
#pragma unroll
                    for (int i = 0; i < SPLITS; i++) means[i] = peek(part + i * PART + d), logs[i] = peek(part + i * PART + HD);
#pragma unroll
                    for (int i = 0; i < SPLITS; i++) missing |= !tagged(means[i], tag) || !tagged(logs[i], tag);
                }
                float top = -1e30f, all = 0, mean = 0;
#pragma unroll
                for (int i = 0; i < SPLITS; i++) top = fmaxf(top, value(logs[i]));
#pragma unroll
                for (int i = 0; i < SPLITS; i++) {
                    const float weight = __expf(value(logs[i]) - top);
                    all += weight;
                    mean += weight * value(means[i]);
                }
                poke(attended + head * HD + d, word16(mean / all, tag));
            }
            sync_warps();
            if (thread == 0) count(counter(ATTENDED_DONE));
            MARK(6)
        }
        // What attention adds.
        each(MIDDLE_DONE, PAIRS(D), Size<2, Q>(), pairs_of(Size<D, 1>()), no_addition, [&](int u, int r) {
            const int d = min(2 * u + r, D - 1);
            return layer ? peek(state + d) : word(low(a.embed[token * D + d]), tag - 1);
        }, [&] {
            receive(ATTENDED_DONE, H, attended, Size<1, Q>(), tag);
            MARK(7)
        }, no_weight, [&](int u, int r, float total, float, u64 was) {
            const int d = 2 * u + r;
            if (d < D) poke(middle + d, word(value(was, state + d, tag - 1) + total, tag));
            STAMP(8)
        });
        if (K && !GATES && layer == 0) await_rows();
        // The router, and the FFN's first half.
        each(ACTIVE_DONE, UP, Size<2, D>(), [](int) { return 2; }, no_addition, nothing, [&] {
            scale = receive_normed(MIDDLE_DONE, PAIRS(D), middle, tag, a.norm2 + layer * D);
            MARK(9)
        }, no_weight, [&](int u, int r, float total, float other, int) {
            const float gate = total * scale, up = other * scale;
            const int f = u - PAIRS(S), slot = 2 * u + r;
            if (f >= 0 && r == 0) poke(active + f, word16(gate / (1 + __expf(-gate)) * up, tag));
            if (f < 0 && slot < S)
                for (int at = F + slot; at < ACTIVES; at += S) poke(active + at, word16(gate, tag));
            STAMP(10)
        });
        // Its second half, and the memory: a lane has one block's row; the null bank's, and those of lanes beyond, are 0.
        each(STATE_DONE, D, Size<1, F>(), [](int) { return 1; }, [&](int u) {
            const int block = (MIXED < K ? layer % LARGER(K, 1) : 0) + lane;
            return lane < MIXED ? s.rows[(u - first_of(D, me)) * K + block] : 0;
        }, [&](int u, int r) { return r == 0 ? peek(middle + u) : 0; }, [&] {
            receive(ACTIVE_DONE, UP, active, Size<1, ACTIVES>(), tag);
            MARK(11)
        }, [&] {
            if (!S) return 0.0f;
            const float logit = lane < S ? low(s.x[F + lane]) : -1e30f;
            const float alpha = __expf(logit - float_of(largest(order(logit))));
            return __fdividef(alpha * (1 << 26), sum((u32)(alpha * (1 << 26))));  // integers are summed at once
        }, [&](int u, int r, float total, float, u64 was) {
            if (r == 0) poke(next_state + u, word(value(was, middle + u, tag) + total, tag));
            STAMP(12)
        });
    }
    float scale, most = -__int_as_float(0x7f800000);
    int which = 0;
    each(NOT_COUNTED, PAIRS(V), Size<2, D>(), pairs_of(Size<V, 1>()), no_addition, nothing, [&] {
        scale = receive_normed(STATE_DONE, D, a.mail + STATE + (L & 1) * D, before + L, a.norm3);
    }, no_weight, [&](int u, int r, float total, float, int) {
        const int one = 2 * u + r;
        if (one >= V) return;
        a.logits[one] = total * scale;
        if (total * scale > most) most = total * scale, which = one;
    });
    u64 best = largest(ordered(most, which));
    if (lane == 0) s.best[warp] = best;
    sync_warps();
    if (warp) return;
    bool last = false;
    if (lane == 0) {
        for (int i = 1; i < WARPS; i++) best = LARGER(best, s.best[i]);
        a.best[me] = best;
        __threadfence();
        last = atomicAdd(counter(FINISHED), 1u) == tokens * G + G - 1;
        __threadfence();
    }
    if (!__any_sync(~0u, last)) return;
    best = 0;                              // all blocks are done, and none reads the token any more
    for (int i = lane; i < G; i += 32) best = LARGER(best, a.best[i]);
    best = largest(best);
    if (lane) return;
    *a.token = 0x7fffffff - (u32)best;
    ++*a.place;
    ++*a.step;
}
