// One or two rows of weights times a vector, by tensor cores.
#pragma once

// What one lane has of R rows of n numbers in shared memory: 8 of every 256. It is kept in registers unless it is much.
template <int R, int n> struct RowPart {
    static constexpr int CHUNKS = (n + 255) / 256, UNROLLED = n <= 4096 ? CHUNKS : 4;
    static constexpr bool HELD = R * n <= 4096;
    const u16 *from;
    int lane, rows;
    uint4 held[R][HELD ? CHUNKS : 1];
    DEVICE uint4 look(int r, int i) const {
        const int c = (i * 32 + lane) * 8;
        return (r == 0 || r < rows) && (n % 256 == 0 || c < n) ? *(const uint4 *)(from + r * n + c) : uint4{0, 0, 0, 0};
    }
    DEVICE uint4 chunk(int r, int i) const { return HELD ? held[r][i] : look(r, i); }
    DEVICE void take(const void *memory, int of_lane, int of_rows) {
        from = (const u16 *)memory, lane = of_lane, rows = of_rows;
#pragma unroll
        for (int i = 0; i < (HELD ? CHUNKS : 0); i++)
#pragma unroll
            for (int r = 0; r < R; r++) held[r][i] = look(r, i);
    }
};

// Rows times x; every lane gets a part of the sums. In a tile, what four lanes have of a row is a row of the matrix, and
// what they have of x is a column. So of all products of rows and columns those on the diagonal are wanted.
template <int R, int n>
DEVICE void multiply(const RowPart<R, n> &rows, const RowPart<1, n> &x, float *sums) {
    float found[4][4] = {};
#pragma unroll RowPart<R, n>::UNROLLED
    for (int i = 0; i < RowPart<R, n>::CHUNKS; i++) {
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
