// Runs a kernel on the host: every thread is a fiber, and all take turns, but for warps that sleep now and then.
// Copies end, and words arrive, later and in any order, as they may on a GPU.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
using std::min;
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static float __int_as_float(int x) { return __uint_as_float(x); }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __fdividef(x, y) ((x) / (y))
static float rsqrtf(float x) { return 1 / sqrtf(x); }

namespace emulated {
struct Gate { int arrived = 0, round = 0; };
struct Warp { Gate gate; unsigned long long values[32]; unsigned tile[32][6]; };
struct Block { std::vector<char> shared; std::vector<Warp> warps; Gate all, multiplying, looking; };
struct Fiber {
    ucontext_t start;
    jmp_buf place;  // _setjmp and _longjmp make no system call; swapcontext makes one at each turn
    std::vector<char> stack;
    unsigned thread, block;
    bool begun = false, done = false;
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber *now;
static jmp_buf scheduler;
static std::vector<std::function<void()>> later;
static std::mt19937 dice;

static void pass() {
    if (!_setjmp(now->place)) _longjmp(scheduler, 1);
    threadIdx.x = now->thread, blockIdx.x = now->block;
}
static Block &block() { return blocks[blockIdx.x]; }
static void meet(Gate &gate, int of) {
    const int round = gate.round;
    if (++gate.arrived == of) gate.arrived = 0, gate.round++;
    while (gate.round == round) pass();
}
}  // namespace emulated

static char *shared_memory() { return emulated::block().shared.data(); }
static void __syncthreads() { emulated::meet(emulated::block().all, emulated::block().warps.size() * 32); }
#define sync_multiplying_warps() emulated::meet(emulated::block().multiplying, THREADS)
#define sync_lookup_warps() emulated::meet(emulated::block().looking, LOOKUP_THREADS)
static void __syncwarp() { emulated::meet(emulated::block().warps[threadIdx.x / 32].gate, 32); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int by) {
    emulated::Warp &warp = emulated::block().warps[threadIdx.x / 32];
    memcpy(&warp.values[threadIdx.x % 32], &x, sizeof x);
    __syncwarp();
    memcpy(&x, &warp.values[threadIdx.x % 32 ^ by], sizeof x);
    __syncwarp();
    return x;
}
static unsigned largest(unsigned x) {
    for (int i = 16; i; i /= 2) x = std::max(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
static unsigned sum(unsigned x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
static bool __any_sync(unsigned, bool x) { return largest(x); }
static void __threadfence() {}
template <class T> static T atomicAdd(T *p, T by) { const T was = *p; *p += by; return was; }

struct Barrier { int bytes; short awaited; unsigned short phase; };
static void advance_phase(Barrier *b) { if (!b->awaited && !b->bytes) b->awaited = 1, b->phase ^= 1; }
static void init_barrier(unsigned long long *p) { *(Barrier *)p = {0, 1, 0}; }
static void publish_barriers() {}
static void wait_for_phase(unsigned long long *p, unsigned parity) { while (((Barrier *)p)->phase == parity) emulated::pass(); }
static void arrive(unsigned long long *p) {
    Barrier *b = (Barrier *)p;
    if (b->awaited-- <= 0) fprintf(stderr, "one arrival too many\n"), abort();
    advance_phase(b);
}
static void expect_bytes(unsigned long long *p, unsigned bytes) { ((Barrier *)p)->bytes += bytes; arrive(p); }
static void copy_to_ring(char *to, const void *from, unsigned bytes, unsigned long long *p) {
    if ((size_t)to % 16 || (size_t)from % 16 || bytes % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
    memset(to, 0xff, bytes);
    emulated::later.push_back([=] {
        memcpy(to, from, bytes);
        ((Barrier *)p)->bytes -= bytes;
        advance_phase((Barrier *)p);
    });
}
template <class T> static T load_relaxed(const T *p) { emulated::pass(); return *p; }
static void load_relaxed2(unsigned long long *v, const unsigned long long *p) { v[0] = load_relaxed(p), v[1] = load_relaxed(p + 1); }
static void load_relaxed4(unsigned *v, const unsigned *p) { for (int i = 0; i < 4; i++) v[i] = load_relaxed(p + i); }
template <class T> static void store_relaxed(T *p, T v) { emulated::later.push_back([=] { *p = v; }); }
static void add_one(unsigned *p) { emulated::later.push_back([=] { ++*p; }); }
static unsigned rounded(float x) {  // to bfloat16, to nearest even; what is no number stays so
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static unsigned pack_bf16(float first, float second) { return rounded(first) | rounded(second) << 16; }
static float half_of(unsigned two, int i) { return __uint_as_float(i ? two & 0xffff0000u : two << 16); }
static void multiply_tile(float *sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulated::Warp &warp = emulated::block().warps[threadIdx.x / 32];
    const unsigned lane = threadIdx.x % 32, given[] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp.tile[lane], given, sizeof given);
    __syncwarp();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const unsigned *row = warp.tile[lane / 4 * 4 + k % 8 / 2], *column = warp.tile[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
            sums[i] += half_of(row[i / 2 + k / 8 * 2], k % 2) * half_of(column[4 + k / 8], k % 2);
        }
    __syncwarp();
}
static long long nanoseconds() { return 0; }
static int recompute(int x, int) { return x; }
static void give_registers_away() {}
static void take_more_registers() {}

static std::function<void()> emulated_kernel;
static void emulated_thread() {
    emulated_kernel();
    emulated::now->done = true;
    _longjmp(emulated::scheduler, 1);
}
static void take_turn(emulated::Fiber &f) {
    emulated::now = &f, threadIdx.x = f.thread, blockIdx.x = f.block;
    if (_setjmp(emulated::scheduler)) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.start);
}

static void run(std::function<void()> kernel, unsigned grid, unsigned threads, size_t shared, unsigned seed) {
    using namespace emulated;
    gridDim.x = grid;
    emulated_kernel = kernel;
    dice.seed(seed);
    blocks.assign(grid, Block());
    for (Block &b : blocks) b.shared.assign(shared + 1024, 0), b.warps.resize(threads / 32);
    fibers = std::vector<Fiber>(grid * threads);
    for (unsigned i = 0; i < fibers.size(); i++) {
        Fiber &f = fibers[i];
        f.thread = i % threads, f.block = i / threads, f.stack.resize(1 << 16);
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.data(), f.start.uc_stack.ss_size = f.stack.size();
        makecontext(&f.start, emulated_thread, 0);
    }
    std::vector<int> asleep(grid * threads / 32);  // warps, some from the beginning
    for (int &turns : asleep) turns = dice() % 4 ? 0 : dice() % 3000;
    for (long turns = 0;; turns++) {
        bool alive = false;
        for (int &turns : asleep) turns = turns ? turns - 1 : dice() % 4096 ? 0 : dice() % 200;
        for (Fiber &f : fibers) {
            if (f.done) continue;
            alive = true;
            if (asleep[(&f - fibers.data()) / 32]) continue;
            take_turn(f);
        }
        for (size_t i = 0; i < later.size();)  // about half of what is under way ends
            if (dice() % 2) {
                std::swap(later[i], later.back());
                auto end = std::move(later.back());
                later.pop_back();
                end();
            } else i++;
        if (!alive && later.empty()) return;
        if (turns > 3000000) fprintf(stderr, "the blocks wait for each other\n"), abort();
    }
}
