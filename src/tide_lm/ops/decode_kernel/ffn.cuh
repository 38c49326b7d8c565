// The FFN, and the memory: the router beside its first half, and the mixed rows beside its second.
#pragma once

// The router, and the FFN's first half. Units of the router come first, each of two slots; a unit of the FFN is a row
// of the gate and one of up.
struct GateUpAndRouter : Phase<UP_UNITS, 2, D, ACTIVE_DONE> {
    Worker &w;
    const Layer &l;
    float scale = 0;
    DEVICE GateUpAndRouter(Worker &w, const Layer &l) : w(w), l(l) {}
    DEVICE void receive() {
        scale = w.receive_normed(MIDDLE_DONE, PAIRS(D), l.middle, l.tag, w.a.norm2 + l.number * D);
        w.mark(l, 9);
    }
    DEVICE void finish(int u, int r, float total, float other, int) {
        const float gate = total * scale, up = other * scale;
        const int f = u - PAIRS(S), slot = 2 * u + r;
        if (f >= 0 && r == 0) store_relaxed(l.active + f, tagged_bf16(gate / (1 + __expf(-gate)) * up, l.tag));
        if (f < 0 && slot < S)
            for (int at = F + slot; at < ACTIVE_NUMBERS; at += S) store_relaxed(l.active + at, tagged_bf16(gate, l.tag));
        w.stamp(l, 10);
    }
};

// The FFN's second half, and the memory: a lane has one block's row; the null bank's, and those of lanes beyond, are 0.
struct DownAndMemory : Phase<D, 1, F, STATE_DONE> {
    Worker &w;
    const Layer &l;
    DEVICE DownAndMemory(Worker &w, const Layer &l) : w(w), l(l) {}
    DEVICE float added(int u) {
        return w.lane < K ? w.s.rows[(u - first_unit(D, w.block)) * K + w.lane] : 0;
    }
    DEVICE u64 early(int u, int r) { return r == 0 ? load_relaxed(l.middle + u) : 0; }
    DEVICE void receive() {
        w.receive<ACTIVE_NUMBERS>(ACTIVE_DONE, UP_UNITS, l.active, l.tag);
        w.mark(l, 11);
    }
    DEVICE float weight() {  // alpha of this lane's block
        if (!S) return 0.0f;
        const float logit = w.lane < S ? low(w.s.x[F + w.lane]) : -1e30f;
        const float alpha = __expf(logit - float_of_key(largest(order_key(logit))));
        return __fdividef(alpha * (1 << 26), sum((u32)(alpha * (1 << 26))));  // integers are summed at once
    }
    DEVICE void finish(int u, int r, float total, float, u64 was) {
        if (r == 0) store_relaxed(l.next_state + u, tagged_float(await_value(was, l.middle + u, l.tag) + total, l.tag));
        w.stamp(l, 12);
    }
};
