// What the warps do that look up the token's rows of memory.
#pragma once

// The number of the token's row, or of the row that it shares with the token before it, as in model/pairs.py.
DEVICE i64 row_number(const Args &a, int part) {
    if (!part || a.which != a.token) return a.which[part];
    i64 mixed = *a.which + 2 * 0x9E3779B1LL;
    mixed = (i64)((u64)(mixed ^ mixed >> 15) * 0x85EBCA77ULL + (u64)*a.previous * 0xC2B2AE3DULL);
    mixed = (i64)((u64)(mixed ^ mixed >> 17) * 0x27D4EB2F165667C5ULL);
    return V + ((mixed ^ mixed >> 29) & 0x7FFFFFFF) % LARGER(PAIR_ROWS, 1);
}

// Decodes one block of the token's rows: of tables as trained, which it normalises, or packed in BITS. Rows may be in
// the host's memory, so a thread loads all of its share, 8 numbers of every 8 * LOOKUP_THREADS, before it uses any.
DEVICE void decode_row(const Args &a, float *squares, int thread, int k) {
    constexpr int EACH = (D / 8 + LOOKUP_THREADS - 1) / LOOKUP_THREADS, P = PAIR_ROWS ? 2 : 1;
    const unsigned char *row = a.bytes + row_number(a, k % P) * a.stride;
    const int skipped = (k - k / P) * D;   // numbers of other blocks, before this one of those that take turns
    auto chunks = [&](auto use) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int d = (thread + j * LOOKUP_THREADS) * 8;
            if (d < D) use(j, k / P * D + d);
        }
    };
    float out[8];
    auto put = [&](int n) {
#pragma unroll
        for (int i = 0; i < 8; i++) a.rows[skipped + n + i] = out[i];
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
        gains[j] = *(const uint4 *)(a.gains + skipped + n);
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
    const int groups = (K / P * D + ROW_GROUP - 1) / ROW_GROUP;
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
