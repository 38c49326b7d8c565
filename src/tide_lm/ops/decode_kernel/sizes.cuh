// Sizes, the kernel's arguments, and where in global memory the vectors lie that blocks exchange.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

// ops/decode.py defines these for a model and a device:
//   D       hidden size                        K          blocks of memory
//   F       width of the FFN                   S          slots of the router: K and the null bank; 0 without memory
//   H, KV   heads, key heads                   GATES      gates of the rows in attention's values; 0 without
//   HD      numbers of a head                  BITS       of packed rows; 0 for tables as trained
//   L       layers                             ROW_GROUP  numbers of a packed row that share a scale
//   V       vocabulary                         PAIR_ROWS  rows for pairs of tokens, after those of tokens
//   WARPS   warps that multiply                ROOM       bytes of shared memory
//   SPLITS  parts of attention's positions     SLOT       bytes of one place in the ring
//   EARLY   see Worker::wait_for_most          LIMIT      units that are copied into the ring at once
//   SHARE   of D numbers, how many a block has at most

#define Q (H * HD)                                 // numbers of all queries
#define QUERIES (H / KV)                           // heads of queries that share a key head
#define NQ (Q + 2 * KV * HD + GATES)               // rows of the first product: queries, keys, values and gates
#define QKV_ROWS ((NQ + 7) / 8 * 8)                // rows of its matrix
#define ACTIVE_NUMBERS (F + (S + 7) / 8 * 8)       // what the FFN's first half gives, then the router's logits
#define FFN_ROWS (F + ACTIVE_NUMBERS)              // rows of the matrix of gate, up and router
#define PAIRS(n) (((n) + 1) / 2)
#define UP_UNITS (PAIRS(S) + F)                    // units of that product: the router's first, then gate and up

#define THREADS (WARPS * 32)
#define LOOKUP_THREADS 96
#define ALL_THREADS (THREADS + 32 + LOOKUP_THREADS)

#define HEADS_PER_WARP (QUERIES % 2 ? QUERIES : QUERIES / 2)
#define POSITION_WARPS (WARPS / (QUERIES / HEADS_PER_WARP))  // warps that share heads and divide positions
#define LANES (HD / 8)                             // lanes that share a position: each has 8 numbers of it
#define SPLIT_NUMBERS (QUERIES * (HD + 1))         // of each head the mean of its values, and the log of their weights

static_assert(S <= 32 && D % 8 == 0 && F % 8 == 0 && HD % 16 == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 32, "");
static_assert(SLOT >= 4 * LARGER(D, Q) && SLOT >= 2 * F && SLOT % 16 == 0, "");

struct Args {                                      // as in ops/decode.py
    const u16 *qkv, *o, *ffn, *down, *embed, *head, *norm1, *norm2, *norm3;
    const float *rope;                             // [T, HD]: cosines of half a head's numbers, then sines
    float *rows;                                   // [K, D]: the token's rows, decoded and normalised
    u16 *cache;                                    // [L, 2, KV, T, HD]: keys and values
    u64 *mail;                                     // [WORDS]: the vectors that blocks exchange, and counters
    float *logits;
    u64 *best;                                     // of each block, its most likely token
    i64 *token, *previous, *place;                 // the last two tokens and their place; the next ones afterwards
    u32 *step;                                     // how many tokens were decoded, of whatever sequence
    i64 *times;
    const unsigned char *bytes;                    // rows of all tokens, on the device or in pinned memory; or null:
                                                   // then `rows` were filled before the launch
    const i64 *which;                              // the token, or which rows of `bytes` are its own
    const u16 *gains;                              // [K, D], with tables as trained
    const float *levels, *columns;                 // with packed rows
    i64 stride;                                    // bytes of a row
    float eps, value_scale;
    int T;                                         // positions that the cache has room for
};

// The mailbox, in words of 64 bits. Each vector is there twice, for even and for odd layers, so that nobody overwrites
// what another block still reads. ATTENDED and ACTIVE have two words of 32 bits in one of 64.
#define STATE 0                                    // the residual stream between layers
#define PROJECTED (STATE + 2 * D)                  // queries, keys, values and gates
#define PARTS (PROJECTED + 2 * NQ)                 // attention over each split of the positions
#define MIDDLE (PARTS + 2 * KV * SPLITS * SPLIT_NUMBERS)  // the residual stream after attention
#define ATTENDED (MIDDLE + 2 * D)                  // attention over all positions
#define ACTIVE (ATTENDED + Q)                      // what the FFN's first half gives, and the router's logits
#define COUNTERS ((ACTIVE + ACTIVE_NUMBERS + 15) / 16 * 16)  // each in a line of 128 bytes of its own
#define WORDS (COUNTERS + (HEAD_DONE + KV) * 16)
// What is counted: blocks that have written their part of a vector. From HEAD_DONE on, one counter per key head.
enum { PROJECTED_DONE, ATTENDED_DONE, MIDDLE_DONE, ACTIVE_DONE, STATE_DONE, ROWS_DONE, FINISHED, HEAD_DONE, NOT_COUNTED = -1 };
