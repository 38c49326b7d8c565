// Attention: queries, keys and values; one token's attention over all positions; and its projection.
#pragma once

// Queries, keys, values and the gates of these.
struct Projection : PairsPhase<NQ, D, PROJECTED_DONE> {
    Worker &w;
    const Layer &l;
    float scale = 0;
    DEVICE Projection(Worker &w, const Layer &l) : w(w), l(l) {}
    DEVICE void receive() {
        const u64 *from = l.number ? l.state : 0;  // the first layer's state is the token's embedding
        scale = w.receive_normed(STATE_DONE, D, from, l.tag - 1, w.a.norm1 + l.number * D);
        w.mark(l, 0);
    }
    DEVICE void finish(int u, int r, float total, float, int) {
        if (2 * u + r < NQ) store_relaxed(l.projected + 2 * u + r, tagged_float(total * scale, l.tag));
        w.stamp(l, 1);
    }
};

// One key head's queries over one split of the positions; this token's key and value join the cache.
DEVICE void attend(Worker &w, const Layer &l) {
    const Args &a = w.a;
    Shared &s = w.s;
    const int block = w.block, layer = l.number, thread = w.thread, warp = w.warp, lane = w.lane, position = w.position;
    const int g = block % KV, split = block / KV, cached = position;
    const int some = (cached + SPLITS) / SPLITS, from = split * some, to = min(from + some, cached + 1);
    const int d0 = lane % LANES * 8, first_head = warp / POSITION_WARPS * HEADS_PER_WARP;
    u16 *keys = a.cache + ((i64)layer * 2 * KV + g) * a.T * HD + d0, *values = keys + (i64)KV * a.T * HD;
    constexpr int STRIDE = POSITION_WARPS * (32 / LANES), AHEAD = HEADS_PER_WARP > 2 ? 2 : 4, TURNED = (QUERIES + 1) * (HD / 2);
    const int of_warp = warp % POSITION_WARPS * (32 / LANES), of_lane = lane / LANES;
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
    w.wait_for_most(PROJECTED_DONE, PAIRS(NQ), l.tag);
    w.mark(l, 2);
    for (int t = thread; t < TURNED + HD; t += THREADS) {
        if (t < TURNED) {
            const int head = t / (HD / 2), d = t % (HD / 2);
            const float cosine = s.rope_here[d], sine = s.rope_here[HD / 2 + d];
            const u64 *row = l.projected + (head < QUERIES ? (g * QUERIES + head) * HD : Q + g * HD) + d;
            const u64 one = load_relaxed(row), two = load_relaxed(row + HD / 2);
            const float x = await_value(one, row, l.tag), y = await_value(two, row + HD / 2, l.tag);
            const float by = head < QUERIES ? rsqrtf((float)HD) : 1;
            s.own[head * HD + d] = (x * cosine - y * sine) * by;
            s.own[head * HD + d + HD / 2] = (y * cosine + x * sine) * by;
        } else {
            const int d = t - TURNED;
            const u64 *row = l.projected + Q + (KV + g) * HD + d;
            float v = await_value(load_relaxed(row), row, l.tag);
#pragma unroll
            for (int e = 0; e < GATES / KV; e++) {
                const u64 *gate = l.projected + Q + 2 * KV * HD + e * KV + g;
                const float open = 2 * a.value_scale / (1 + __expf(-await_value(load_relaxed(gate), gate, l.tag)));
                v += open * a.rows[(layer % LARGER(K, 1)) * D + (e * KV + g) * HD + d];
            }
            s.own[(QUERIES + 1) * HD + d] = v;
        }
    }
    sync_multiplying_warps();
    w.mark(l, 3);
    float q[HEADS_PER_WARP][8], most[HEADS_PER_WARP], total[HEADS_PER_WARP], out[HEADS_PER_WARP][8];
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; i++) {
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
                const float *k = s.own + QUERIES * HD + d0, *v = k + HD;
                k_now = {pack_bf16(k[0], k[1]), pack_bf16(k[2], k[3]), pack_bf16(k[4], k[5]), pack_bf16(k[6], k[7])};
                v_now = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
                if (first_head == 0) {
                    *(uint4 *)(keys + (i64)now * HD) = k_now;
                    *(uint4 *)(values + (i64)now * HD) = v_now;
                }
            }
            __syncwarp();
            float k[8], v[8];
            unpack(k_now, k), unpack(v_now, v);
#pragma unroll
            for (int i = 0; i < HEADS_PER_WARP; i++) {
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
        for (int i = 0; i < HEADS_PER_WARP; i++) {
            const float other = __shfl_xor_sync(~0u, most[i], step), top = fmaxf(most[i], other);
            const float mine = __expf(most[i] - top), its = __expf(other - top);
            most[i] = top;
            total[i] = total[i] * mine + __shfl_xor_sync(~0u, total[i], step) * its;
#pragma unroll
            for (int j = 0; j < 8; j++) out[i][j] = out[i][j] * mine + __shfl_xor_sync(~0u, out[i][j], step) * its;
        }
    if (lane < LANES)
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; i++) {
            float *to_merge = s.attended + ((warp % POSITION_WARPS) * QUERIES + first_head + i) * (HD + 2);
#pragma unroll
            for (int j = 0; j < 8; j++) to_merge[d0 + j] = out[i][j];
            if (lane == 0) to_merge[HD] = most[i], to_merge[HD + 1] = total[i];
        }
    sync_multiplying_warps();
    for (int t = thread; t < QUERIES * HD; t += THREADS) {
        const int head = t / HD, d = t % HD;
        float top = -1e30f, all = 0, mean = 0;
#pragma unroll
        for (int i = 0; i < POSITION_WARPS; i++) top = fmaxf(top, s.attended[(i * QUERIES + head) * (HD + 2) + HD]);
#pragma unroll
        for (int i = 0; i < POSITION_WARPS; i++) {
            const float *one = s.attended + (i * QUERIES + head) * (HD + 2);
            const float weight = __expf(one[HD] - top);
            all += weight * one[HD + 1];
            mean += weight * one[d];
        }
        u64 *part = l.parts + (g * SPLITS + split) * SPLIT_NUMBERS + head * (HD + 1);
        store_relaxed(part + d, tagged_float(all > 0 ? mean / all : 0, l.tag));
        if (d == 0) store_relaxed(part + HD, tagged_float(all > 0 ? top + __logf(all) : -1e30f, l.tag));
    }
    sync_multiplying_warps();
    if (thread == 0) add_one(w.counter(HEAD_DONE + g));
    w.mark(l, 4);
}

// What the splits of a head found, together.
DEVICE void merge_splits(Worker &w, const Layer &l) {
    const int block = w.block, blocks = w.blocks, thread = w.thread;
    if (thread < H && blocks - 1 - block + thread * blocks < H)
        while ((int)(load_relaxed(w.counter(HEAD_DONE + (blocks - 1 - block + thread * blocks) / QUERIES)) - SPLITS * l.tag) < 0) {}
    sync_multiplying_warps();
    w.mark(l, 5);
    for (int t = thread; t < (H - 1 - (blocks - 1 - block)) / blocks * HD + HD; t += THREADS) {
        const int head = blocks - 1 - block + t / HD * blocks, d = t % HD;
        const u64 *part = l.parts + head / QUERIES * SPLITS * SPLIT_NUMBERS + head % QUERIES * (HD + 1);
        u64 means[SPLITS], logs[SPLITS];
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < SPLITS; i++) means[i] = load_relaxed(part + i * SPLIT_NUMBERS + d), logs[i] = load_relaxed(part + i * SPLIT_NUMBERS + HD);
#pragma unroll
            for (int i = 0; i < SPLITS; i++) missing |= !has_tag(means[i], l.tag) || !has_tag(logs[i], l.tag);
        }
        float top = -1e30f, all = 0, mean = 0;
#pragma unroll
        for (int i = 0; i < SPLITS; i++) top = fmaxf(top, value_of(logs[i]));
#pragma unroll
        for (int i = 0; i < SPLITS; i++) {
            const float weight = __expf(value_of(logs[i]) - top);
            all += weight;
            mean += weight * value_of(means[i]);
        }
        store_relaxed(l.attended + head * HD + d, tagged_bf16(mean / all, l.tag));
    }
    sync_multiplying_warps();
    if (thread == 0) add_one(w.counter(ATTENDED_DONE));
    w.mark(l, 6);
}

// What attention adds to the state.
struct AttentionOutput : PairsPhase<D, Q, MIDDLE_DONE> {
    Worker &w;
    const Layer &l;
    DEVICE AttentionOutput(Worker &w, const Layer &l) : w(w), l(l) {}
    DEVICE u64 early(int u, int r) {
        const int d = min(2 * u + r, D - 1);
        return l.number ? load_relaxed(l.state + d) : tagged_float(low(w.a.embed[w.token * D + d]), l.tag - 1);
    }
    DEVICE void receive() {
        w.receive<Q>(ATTENDED_DONE, H, l.attended, l.tag);
        w.mark(l, 7);
    }
    DEVICE void finish(int u, int r, float total, float, u64 was) {
        const int d = 2 * u + r;
        if (d < D) store_relaxed(l.middle + d, tagged_float(await_value(was, l.state + d, l.tag - 1) + total, l.tag));
        w.stamp(l, 8);
    }
};
