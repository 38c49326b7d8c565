// The head, and the most likely token.
#pragma once

struct Head : PairsPhase<V, D, NOT_COUNTED> {
    Worker &w;
    float scale = 0, most = -__int_as_float(0x7f800000);
    int which = 0;                         // the token that has most, of those of this lane
    DEVICE explicit Head(Worker &w) : w(w) {}
    DEVICE void receive() {
        scale = w.receive_normed(STATE_DONE, D, w.a.mail + STATE + (L & 1) * D, w.before + L, w.a.norm3);
    }
    DEVICE void finish(int u, int r, float total, float, int) {
        const int one = 2 * u + r;
        if (one >= V) return;
        w.a.logits[one] = total * scale;
        if (total * scale > most) most = total * scale, which = one;
    }
};

// The last block to end leaves the most likely token of all blocks, and the next position.
DEVICE void pick_token(Worker &w, const Head &head) {
    const Args &a = w.a;
    u64 best = largest(candidate(head.most, head.which));
    if (w.lane == 0) w.s.best[w.warp] = best;
    sync_multiplying_warps();
    if (w.warp) return;
    bool last = false;
    if (w.lane == 0) {
        for (int i = 1; i < WARPS; i++) best = LARGER(best, w.s.best[i]);
        a.best[w.block] = best;
        __threadfence();
        last = atomicAdd(w.counter(FINISHED), 1u) == w.tokens * w.blocks + w.blocks - 1;
        __threadfence();
    }
    if (!__any_sync(~0u, last)) return;
    best = 0;                              // all blocks are done, and none reads the token any more
    for (int i = w.lane; i < w.blocks; i += 32) best = LARGER(best, a.best[i]);
    best = largest(best);
    if (w.lane) return;
    *a.previous = *a.token;
    *a.token = 0x7fffffff - (u32)best;
    ++*a.place;
    ++*a.step;
}
