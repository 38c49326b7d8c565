// Pairs of bfloat16, words of a value and a tag, sums over a warp, and the share of a block.
#pragma once

DEVICE float low(u32 two) { return __uint_as_float(two << 16); }
DEVICE float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
DEVICE void unpack(uint4 eight, float *out) {
    out[0] = low(eight.x), out[1] = high(eight.x), out[2] = low(eight.y), out[3] = high(eight.y);
    out[4] = low(eight.z), out[5] = high(eight.z), out[6] = low(eight.w), out[7] = high(eight.w);
}

// A word is written at once, so a tag that is right vouches for the value beside it.
DEVICE u64 tagged_float(float x, u32 tag) { return (u64)tag << 32 | __float_as_uint(x); }
DEVICE u32 tagged_bf16(float x, u32 tag) { return tag << 16 | pack_bf16(x, 0); }
DEVICE bool has_tag(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }
DEVICE float value_of(u64 word) { return __uint_as_float((u32)word); }
// The value of a word at p that was loaded before, perhaps too early.
DEVICE float await_value(u64 word, const u64 *p, u32 tag) {
    while (!has_tag(word, tag)) word = load_relaxed(p);
    return value_of(word);
}

DEVICE float sum(float x) {
#pragma unroll
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
// Sums each of eight numbers over all lanes: the first four lanes get the first sum, the next four the second, ...
DEVICE float sum_each_of_eight(float *x, int lane) {
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

// An integer that is larger for a larger number.
DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float float_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
// A logit and its token as one integer: larger for a larger logit, and among equal ones for the first token.
DEVICE u64 candidate(float logit, u32 token) { return (u64)order_key(logit) << 32 | (0x7fffffff - token); }
DEVICE u64 largest(u64 x) {
#pragma unroll
    for (int i = 16; i; i /= 2) {
        const u64 other = __shfl_xor_sync(~0u, x, i);
        x = LARGER(x, other);
    }
    return x;
}

// Units are divided evenly: a block has those from first_unit(units, block) to first_unit(units, block + 1).
DEVICE int first_unit(int units, u32 block) { return (u32)units * block / gridDim.x; }
