// One token of one sequence in one launch: a block on every multiprocessor, all of them resident at once.
//
// In each block one thread streams the block's share of all weights, in the order in which they are needed,
// through a ring in shared memory; it waits for room and for nothing else, so that memory is read while
// blocks wait for each other. Warps take rows from the ring, two at a time, and multiply them with a vector
// that all blocks made together. Such vectors travel through global memory as words of a value and a tag: who
// needs one reads until its tag is right, so there is neither a barrier between blocks nor a fence. Counters
// tell when it is worth to look; what they say may be early.
//
// Sizes are macros: D hidden, F of the FFN, H heads, KV key heads, HD of a head, L layers, V vocabulary,
// K blocks of memory, MIXED of them in a layer, S slots of its router, GATES of its values, SPLITS of attention,
// WARPS that multiply, ROOM bytes of shared memory, SLOT of one place in the ring, LIMIT of copies under way, BITS
// of packed rows (0: they are not packed) and ROW_GROUP of their numbers with one scale.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define Q (H * HD)                         // all queries
#define NQ (Q + 2 * KV * HD + GATES)       // rows of the first product
#define GROUP (H / KV)
#define THREADS (WARPS * 32)
#define PAIRS(n) (((n) + 1) / 2)
#define UP (F + PAIRS(S))                  // units of the FFN's first half and of the router
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define HEADS (GROUP % 2 ? GROUP : GROUP / 2)    // of one warp in attention
#define APART (WARPS / (GROUP / HEADS))    // warps with other positions
#define PART (GROUP * (HD + 1))            // of each head the mean of its values, and the log of their weights' sum
#define LANES (HD / 8)                     // that share a position
static_assert(S <= 32 && D % 8 == 0 && F % 8 == 0 && HD % 16 == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 32, "");
static_assert(SLOT >= 4 * LARGER(D, Q) && SLOT >= 2 * F && SLOT % 16 == 0, "");

struct Args {
    const u16 *qkv, *o, *gate, *up, *router, *down, *embed, *head, *norm1, *norm2, *norm3;
    const float *rope;                     // [T, HD]: half of it cosines, half sines
    const float *rows;                     // [K, D]: the token's
    u16 *cache;                            // [L, 2, KV, T, HD]
    u64 *mail;
    float *logits;
    u64 *best;                             // of each block, as one number
    i64 *token, *place;                    // the last token, and its position
    u32 *step;                             // tokens that were made, whatever sequence they were of
    i64 *times;
    float eps, value_scale;
    int T;                                 // positions that the cache has
};

// Where words are, in words of 64 bits, each vector twice, for even and odd layers; 32 bits from ATTENDED on.
#define STATE 0
#define PROJECTED (STATE + 2 * D)
#define PARTS (PROJECTED + 2 * NQ)
#define MIDDLE (PARTS + 2 * KV * SPLITS * PART)
#define ROUTES (MIDDLE + 2 * D)
#define ATTENDED (ROUTES + 2 * 32)
#define ACTIVE (ATTENDED + Q)
#define COUNTERS ((ACTIVE + F + 15) / 16 * 16)  // each in a line of its own
#define WORDS (COUNTERS + (HEAD_DONE + KV) * 16)
enum { PROJECTED_DONE, ATTENDED_DONE, MIDDLE_DONE, ACTIVE_DONE, STATE_DONE, HEAD_DONE };

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
__device__ __forceinline__ u32 both(float first, float second) {  // as bfloat16
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
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
__device__ __forceinline__ float value(u64 seen, const u64 *p, u32 tag) {  // of a word, looked at before
    while ((u32)(seen >> 32) != tag) seen = peek(p);
    return __uint_as_float((u32)seen);
}
__device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
__device__ __forceinline__ u64 ordered(float value, u32 token) {  // larger for larger values, and the first token
    const u32 bits = __float_as_uint(value);
    return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | (0x7fffffff - token);
}
__device__ __forceinline__ int share(int units) {  // of this block
    return (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}
__device__ __forceinline__ void unpack(uint4 eight, float *out) {
    out[0] = low(eight.x), out[1] = high(eight.x), out[2] = low(eight.y), out[3] = high(eight.y);
    out[4] = low(eight.z), out[5] = high(eight.z), out[6] = low(eight.w), out[7] = high(eight.w);
}

// R rows of n numbers in shared memory times x: every lane has a part of the R sums.
template <int R, int n> __device__ __forceinline__ void multiply(const char *rows, const u16 *x, int lane, float *sums) {
#pragma unroll 4
    for (int c = lane * 8; c < n; c += 256) {
        float v[8], w[8];
        unpack(*(const uint4 *)(x + c), v);
#pragma unroll
        for (int r = 0; r < R; r++) {
            unpack(*(const uint4 *)(rows + (r * n + c) * 2), w);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[r] += w[i] * v[i];
        }
    }
}

template <int N> struct Constant {
    static constexpr int value = N;
};

struct Held {
    Args args;
    int done;                              // units of a phase
    float squares[2][WARPS];
    u64 best[WARPS];
    float own[(GROUP + 2) * HD];           // queries, key and value of this token, of one key head
    float attended[GROUP * LARGER(APART * (HD + 2), SPLITS)];
    u16 x[2][LARGER(LARGER(D, F), Q)] __attribute__((aligned(16)));
};
constexpr int SLOTS = (ROOM - (int)sizeof(Held)) / (SLOT + 2 * (int)sizeof(u64));
static_assert(WARPS + LIMIT <= SLOTS, "a warp must not wait for a slot that is two rounds behind");
struct Shared : Held {
    u64 full[SLOTS], empty[SLOTS];
};
extern "C" __device__ const int mail_words = WORDS;

struct Stream {
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
        for (int u = blockIdx.x; u < PAIRS(count); u += gridDim.x)
            put(rows + (i64)2 * u * width, width * 2 << (2 * u + 1 < count));
    }
    __device__ __forceinline__ void all(const Args &a) {
        for (i64 l = 0; l < L; l++) {
            pairs(a.qkv + l * NQ * D, NQ, D);
            pairs(a.o + l * D * Q, D, Q);
            for (int u = blockIdx.x; u < UP; u += gridDim.x) {
                const int slot = 2 * (u - F);
                if (u < F) put(a.gate + (l * F + u) * D, D * 2, a.up + (l * F + u) * D);
                else put(a.router + (l * S + slot) * D, D * 2 << (slot + 1 < S));
            }
            for (int u = blockIdx.x; u < D; u += gridDim.x) put(a.down + (l * D + u) * F, F * 2);
        }
        pairs(a.head, V, D);
    }
};

#ifdef TIMES
#define STAMP(i) a.times[((i64)layer * G + me) * 16 + (i)] = nanoseconds();
#define MARK(i) if (threadIdx.x == 0) STAMP(i)
#else
#define STAMP(i)
#define MARK(i)
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode(const Args *args) {
    char *memory = shared_memory();
    Shared &s = *(Shared *)(memory + SLOTS * SLOT);
    const Args &a = s.args;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, me = blockIdx.x, G = gridDim.x;
    if (threadIdx.x == 0) {
        s.args = *args;
        s.done = 0;
        for (int i = 0; i < SLOTS; i++) init_barrier(&s.full[i]), init_barrier(&s.empty[i]);
        publish_barriers();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) Stream{memory, s, 0}.all(a);
        return;
    }

    const int position = (int)*a.place;
    const i64 token = *a.token;
    const u32 before = *a.step * L;  // layers of the tokens before
    u32 units_before = 0;
    int buffer = 0;

    // Gives this warp's units of a phase to `body`: the number, the rows, and what to call when they are read.
    auto each = [&](int units, auto body) {
        const int mine = share(units);
        for (int i = (warp + WARPS - units_before % WARPS) % WARPS; i < mine; i += WARPS) {
            const u32 n = units_before + i, slot = n % SLOTS;
            wait(&s.full[slot], n / SLOTS & 1);
            body(me + i * G, memory + slot * SLOT, [&] {
                __syncwarp();
                if (lane == 0) arrive(&s.empty[slot]);
            });
        }
        units_before += mine;
        buffer ^= 1;
    };
    auto pair = [&](const char *rows, bool two, auto width, float *sums) {
        sums[0] = sums[1] = 0;
        if (two) multiply<2, decltype(width)::value>(rows, s.x[buffer], lane, sums);
        else multiply<1, decltype(width)::value>(rows, s.x[buffer], lane, sums);
    };
    auto counter = [&](int which) { return (u32 *)(a.mail + COUNTERS + which * 16); };
    auto unit_done = [&](int which, int units) {  // by one lane; the last of the block's units is counted
        if (atomicAdd(&s.done, 1) == share(units) - 1) {
            s.done = 0;
            count(counter(which));
        }
    };
    auto counted = [&](int which, int blocks, u32 times) {  // waits until so many blocks have, so many times
        if (threadIdx.x == 0)
            while ((int)(peek(counter(which)) - (u32)min(blocks, G) * times) < 0) {}
        sync_warps();
    };
    // A state times a gain as the vector to multiply with; returns what all products are yet to be multiplied with.
    auto receive_normed = [&](int which, int blocks, const u64 *from, u32 tag, const u16 *gain) {
        constexpr int EACH = (D / 2 + THREADS - 1) / THREADS;
        u32 gains[EACH];
        u64 seen[EACH][2];
        float square = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (threadIdx.x + i * THREADS) * 2;
            if (d < D) gains[i] = *(const u32 *)(gain + d);
        }
        if (from) counted(which, blocks, tag);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (threadIdx.x + i * THREADS) * 2;
            if (d >= D) continue;
            if (from) {
                peek2(seen[i], from + d);
            } else {
                const u32 two = *(const u32 *)(a.embed + token * D + d);
                seen[i][0] = word(low(two), tag), seen[i][1] = word(high(two), tag);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (threadIdx.x + i * THREADS) * 2;
            if (d >= D) continue;
            const float first = value(seen[i][0], from + d, tag), second = value(seen[i][1], from + d + 1, tag);
            square += first * first + second * second;
            *(u32 *)(s.x[buffer] + d) = both(first * low(gains[i]), second * high(gains[i]));
        }
        square = sum(square);
        if (lane == 0) s.squares[buffer][warp] = square;
        sync_warps();
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += s.squares[buffer][i];
        return rsqrtf(total / D + a.eps);
    };
    auto receive = [&](int which, int blocks, const u32 *from, auto size, u32 tag) {
        constexpr int N = decltype(size)::value, EACH = (N / 4 + THREADS - 1) / THREADS;
        u32 seen[EACH][4];
        counted(which, blocks, tag);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (threadIdx.x + i * THREADS) * 4;
            if (d < N) peek4(seen[i], from + d);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int d = (threadIdx.x + i * THREADS) * 4;
            if (d >= N) continue;
#pragma unroll
            for (int j = 0; j < 4; j++)
                while (seen[i][j] >> 16 != (tag & 0xffff)) seen[i][j] = peek(from + d + j);
            uint2 four = {(seen[i][0] & 0xffff) | seen[i][1] << 16, (seen[i][2] & 0xffff) | seen[i][3] << 16};
            *(uint2 *)(s.x[buffer] + d) = four;
        }
        sync_warps();
    };

    for (int layer = 0; layer < L; layer++) {
        const u32 tag = before + layer + 1;
        const int odd = layer & 1;
        u64 *state = a.mail + STATE + odd * D, *next_state = a.mail + STATE + (odd ^ 1) * D;
        u64 *projected = a.mail + PROJECTED + odd * NQ, *parts = a.mail + PARTS + odd * KV * SPLITS * PART;
        u64 *middle = a.mail + MIDDLE + odd * D, *routes = a.mail + ROUTES + odd * 32;
        u32 *attended = (u32 *)(a.mail + ATTENDED) + odd * Q, *active = (u32 *)(a.mail + ACTIVE) + odd * F;

        if (share(PAIRS(NQ)) > 0) {  // queries, keys, values and the gates of these
            const float scale = receive_normed(STATE_DONE, D, layer ? state : 0, tag - 1, a.norm1 + layer * D);
            MARK(0)
            each(PAIRS(NQ), [&](int u, const char *rows, auto read) {
                float sums[2];
                pair(rows, 2 * u + 1 < NQ, Constant<D>(), sums);
                read();
                sums[0] = sum(sums[0]), sums[1] = sum(sums[1]);
                if (lane < 2 && 2 * u + lane < NQ) poke(projected + 2 * u + lane, word((lane ? sums[1] : sums[0]) * scale, tag));
                __syncwarp();
                if (lane == 0) {
                    unit_done(PROJECTED_DONE, PAIRS(NQ));
                    STAMP(1)
                }
            });
        }
        if (me < KV * SPLITS) {  // attention of one key head's queries over some positions
            const int g = me % KV, split = me / KV, cached = position;
            const int some = (cached + SPLITS) / SPLITS, from = split * some, to = min(from + some, cached + 1);
            const int d0 = lane % LANES * 8, first_head = warp / APART * HEADS;
            u16 *keys = a.cache + ((i64)layer * 2 * KV + g) * a.T * HD + d0, *values = keys + (i64)KV * a.T * HD;
            // Keys and values of the first positions, and how far to turn: they do not depend on what is awaited.
            uint4 k_next = {0, 0, 0, 0}, v_next = {0, 0, 0, 0};
            int p = from + (warp % APART) * (32 / LANES) + lane / LANES;
            if (p < to && p < cached) {
                k_next = *(const uint4 *)(keys + (i64)p * HD);
                v_next = *(const uint4 *)(values + (i64)p * HD);
            }
            constexpr int TURNED = (GROUP + 1) * (HD / 2);
            counted(PROJECTED_DONE, PAIRS(NQ), tag);
            MARK(2)
            for (int t = threadIdx.x; t < TURNED + HD; t += THREADS) {
                if (t < TURNED) {
                    const int head = t / (HD / 2), d = t % (HD / 2);
                    const float cosine = a.rope[(i64)position * HD + d], sine = a.rope[(i64)position * HD + HD / 2 + d];
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
            for (int start = from + (warp % APART) * (32 / LANES); start < to; start += APART * (32 / LANES)) {
                uint4 k_now = k_next, v_now = v_next;
                const int now = p;
                p += APART * (32 / LANES);
                if (p < to && p < cached) {
                    k_next = *(const uint4 *)(keys + (i64)p * HD);
                    v_next = *(const uint4 *)(values + (i64)p * HD);
                }
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
            for (int t = threadIdx.x; t < GROUP * HD; t += THREADS) {
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
            if (threadIdx.x == 0) count(counter(HEAD_DONE + g));
            MARK(4)
        }
        if (me >= G - KV) {  // what the splits of a key head found, together
            const int g = G - 1 - me;
            counted(HEAD_DONE + g, SPLITS, tag);
            MARK(5)
            for (int start = 0; start < GROUP * HD; start += THREADS) {
                const int t = start + threadIdx.x;
                const u64 *part = parts + g * SPLITS * PART + t / HD * (HD + 1) + t % HD;
                u64 means[SPLITS];
                float top = -1e30f, all = 0, mean = 0;
#pragma unroll
                for (int i = 0; i < SPLITS; i++) means[i] = t < GROUP * HD ? peek(part + i * PART) : 0;
                if (start == 0) {
                    for (int i = threadIdx.x; i < SPLITS * GROUP; i += THREADS) {
                        const u64 *log = parts + (g * SPLITS + i / GROUP) * PART + i % GROUP * (HD + 1) + HD;
                        s.attended[i] = value(peek(log), log, tag);
                    }
                    sync_warps();
                }
                if (t >= GROUP * HD) continue;
#pragma unroll
                for (int i = 0; i < SPLITS; i++) top = fmaxf(top, s.attended[i * GROUP + t / HD]);
#pragma unroll
                for (int i = 0; i < SPLITS; i++) {
                    const float weight = __expf(s.attended[i * GROUP + t / HD] - top);
                    all += weight;
                    mean += weight * value(means[i], part + i * PART, tag);
                }
                poke(attended + g * GROUP * HD + t, word16(mean / all, tag));
            }
            sync_warps();
            if (threadIdx.x == 0) count(counter(ATTENDED_DONE));
            MARK(6)
        }
        if (share(PAIRS(D)) > 0) {  // what attention adds
            receive(ATTENDED_DONE, KV, attended, Constant<Q>(), tag);
            MARK(7)
            each(PAIRS(D), [&](int u, const char *rows, auto read) {
                const int d = 2 * u + lane;
                const bool mine = lane < 2 && d < D;
                u64 was = 0;
                if (mine) was = layer ? peek(state + d) : word(low(a.embed[token * D + d]), tag - 1);
                float sums[2];
                pair(rows, 2 * u + 1 < D, Constant<Q>(), sums);
                read();
                sums[0] = sum(sums[0]), sums[1] = sum(sums[1]);
                if (mine) poke(middle + d, word(value(was, state + d, tag - 1) + (lane ? sums[1] : sums[0]), tag));
                __syncwarp();
                if (lane == 0) {
                    unit_done(MIDDLE_DONE, PAIRS(D));
                    STAMP(8)
                }
            });
        }
        if (share(UP) > 0) {  // the FFN's first half, and the router
            const float scale = receive_normed(MIDDLE_DONE, PAIRS(D), middle, tag, a.norm2 + layer * D);
            MARK(9)
            each(UP, [&](int u, const char *rows, auto read) {
                const int slot = 2 * (u - F);
                float sums[2];
                pair(rows, u < F || slot + 1 < S, Constant<D>(), sums);
                read();
                sums[0] = sum(sums[0]) * scale, sums[1] = sum(sums[1]) * scale;
                if (u < F) {
                    if (lane == 0) poke(active + u, word16(sums[0] / (1 + __expf(-sums[0])) * sums[1], tag));
                } else if (lane < 2 && slot + lane < S) {
                    poke(routes + slot + lane, word((lane ? sums[1] : sums[0]), tag));
                }
                __syncwarp();
                if (lane == 0) {
                    unit_done(ACTIVE_DONE, UP);
                    STAMP(10)
                }
            });
        }
        if (share(D) > 0) {  // its second half, and the memory: a lane has one block's row
            const float *row = a.rows + ((MIXED < K ? layer % LARGER(K, 1) : 0) + lane) * D;
            const int first = me + (warp + WARPS - units_before % WARPS) % WARPS * G;
            float of_row = lane < MIXED && first < D ? row[first] : 0, alpha = 0;
            receive(ACTIVE_DONE, UP, active, Constant<F>(), tag);
            MARK(11)
            if (S) {
                const float logit = lane < S ? value(peek(routes + lane), routes + lane, tag) : -1e30f;
                float top = logit;
#pragma unroll
                for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
                alpha = __expf(logit - top);
                alpha /= sum(alpha);
            }
            each(D, [&](int u, const char *rows, auto read) {
                const u64 was = lane == 0 ? peek(middle + u) : 0;
                float sums[1] = {alpha * of_row};  // the null bank's row, and those of lanes beyond, are 0
                if (lane < MIXED && u + WARPS * G < D) of_row = row[u + WARPS * G];
                multiply<1, F>(rows, s.x[buffer], lane, sums);
                read();
                sums[0] = sum(sums[0]);
                if (lane == 0) {
                    poke(next_state + u, word(value(was, middle + u, tag) + sums[0], tag));
                    unit_done(STATE_DONE, D);
                    STAMP(12)
                }
            });
        }
    }
    if (share(PAIRS(V)) <= 0) return;
    const float scale = receive_normed(STATE_DONE, D, a.mail + STATE + (L & 1) * D, before + L, a.norm3);
    float most = -__int_as_float(0x7f800000);
    int which = 0;
    each(PAIRS(V), [&](int u, const char *rows, auto read) {
        float sums[2];
        pair(rows, 2 * u + 1 < V, Constant<D>(), sums);
        read();
        sums[0] = sum(sums[0]) * scale, sums[1] = sum(sums[1]) * scale;
        if (lane < 2 && 2 * u + lane < V) a.logits[2 * u + lane] = (lane ? sums[1] : sums[0]);
        if (sums[0] > most) most = sums[0], which = 2 * u;
        if (2 * u + 1 < V && sums[1] > most) most = sums[1], which = 2 * u + 1;
    });
    if (lane == 0) s.best[warp] = ordered(most, which);
    sync_warps();
    if (threadIdx.x == 0) {
        u64 best = 0;
        for (int i = 0; i < WARPS; i++) best = LARGER(best, s.best[i]);
        a.best[me] = best;
    }
}

// The most likely token, unless one was chosen, and the next place. One warp.
extern "C" __global__ void pick(const Args *args, int blocks, int chosen) {
    u64 best = 0;
    if (!chosen) {
        for (int i = threadIdx.x; i < blocks; i += 32) best = LARGER(best, args->best[i]);
#pragma unroll
        for (int i = 16; i; i /= 2) {
            const u64 other = __shfl_xor_sync(~0u, best, i);
            best = LARGER(best, other);
        }
    }
    if (threadIdx.x) return;
    if (!chosen) *args->token = 0x7fffffff - (u32)best;
    ++*args->place;
    ++*args->step;
}

#if K
struct Rows {
    const unsigned char *bytes;            // of all tokens, on the device or in the host's memory
    const i64 *which;                      // of them
    const u16 *gains;                      // [K, D], of tables as trained
    const float *levels, *columns;         // of packed rows
    i64 stride;                            // bytes
    float *out;                            // [K, D]
};

// One token's rows: of tables as trained, which are normalised, or packed in BITS. One warp a block of memory.
extern "C" __global__ void fetch(Rows rows, float eps) {
    const unsigned char *row = rows.bytes + *rows.which * rows.stride;
    const int k = blockIdx.x;
#if BITS == 0
    const u16 *raw = (const u16 *)row + k * D;
    float square = 0;
#pragma unroll 8
    for (int d = threadIdx.x * 8; d < D; d += 256) {
        float x[8];
        unpack(*(const uint4 *)(raw + d), x);
#pragma unroll
        for (int i = 0; i < 8; i++) square += x[i] * x[i];
    }
    const float scale = rsqrtf(sum(square) / D + eps);
#pragma unroll 8
    for (int d = threadIdx.x * 8; d < D; d += 256) {
        float x[8], gain[8];
        unpack(*(const uint4 *)(raw + d), x), unpack(*(const uint4 *)(rows.gains + k * D + d), gain);
#pragma unroll
        for (int i = 0; i < 8; i++) rows.out[k * D + d + i] = x[i] * scale * gain[i];
    }
#elif BITS == 16
#pragma unroll 8
    for (int d = threadIdx.x * 8; d < D; d += 256) unpack(*(const uint4 *)((const u16 *)row + k * D + d), rows.out + k * D + d);
#else
    const int groups = (K * D + ROW_GROUP - 1) / ROW_GROUP;
    const unsigned char *scales = row + groups * ROW_GROUP * BITS / 8, *last = scales + groups;
    const float row_scale = __uint_as_float(last[0] | last[1] << 8 | last[2] << 16 | (u32)last[3] << 24);
#pragma unroll 4
    for (int d = threadIdx.x * 8; d < D; d += 256) {
        const int n = k * D + d;           // eight numbers are BITS bytes, and of one group
        const float scale = scales[n / ROW_GROUP] * row_scale;
        const unsigned char *codes = row + n / 8 * BITS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if BITS == 8
            const int code = codes[i];
#elif BITS == 4
            const int code = codes[i / 2] >> i % 2 * 4 & 15;
#elif BITS == 3
            const int code = (codes[i / 4] >> i % 4 * 2 & 3) + (codes[2] >> i & 1) * 4;
#else
            const int code = codes[i / 4] >> i % 4 * 2 & 3;
#endif
            rows.out[n + i] = rows.levels[code] * scale * rows.columns[n + i];
        }
    }
#endif
}
#endif
