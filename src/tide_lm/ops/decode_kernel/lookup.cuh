// What the warps do that look up the token's rows of memory.
#pragma once

// Decodes one of the token's rows: of tables as trained, which it normalises, or packed in BITS. The row may be in the
// host's memory, so a thread loads all of its share, 8 numbers of every 8 * LOOKUP_THREADS, before it uses any of it.
DEVICE void decode_row(const Args &a, float *squares, int thread, int k) {
    constexpr int EACH = (D / 8 + LOOKUP_THREADS - 1) / LOOKUP_THREADS;
    const unsigned char *row = a.bytes + *a.which * a.stride;
    auto chunks = [&](auto use) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int d = (thread + j * LOOKUP_THREADS) * 8;
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
    sync_lookup_warps();
    square = 0;
#pragma unroll
    for (int i = 0; i < LOOKUP_THREADS / 32; i++) square += squares[i];
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
    chunks([&](int j, int n) {  // eight numbers are BITS bytes, and share a scale
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
