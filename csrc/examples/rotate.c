/* Decode as in llama2.c's loop, with ropewalk's kernels called from plain C. For each token, rotate queries and keys in place,
 * store the keys in a cache, and compute the scores of each group of query heads with the key head that it shares.
 *
 *     rotate [interleaved|half] [first position]
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ropewalk.h"

enum { HEAD_DIM = 10, PAIRS = HEAD_DIM / 2, HEADS = 4, KV_HEADS = 2, TOKENS = 3 };
static const long double BASE = 10000.0L, TWO_PI = 6.28318530717958647692528676655900577L;

/* The adjacent heads of one token. */
static ropewalk_tensor in_place(float *x, int64_t heads) {
    ropewalk_tensor tensor = {.in = x, .out = x, .heads = heads};
    const int64_t stride[4] = {heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM, 1}; /* batch, token, head, channel */
    memcpy(tensor.in_stride, stride, sizeof stride);
    memcpy(tensor.out_stride, stride, sizeof stride);
    return tensor;
}

static void print(const char *name, int64_t position, int head, const float *values, int count) {
    printf("%s %" PRId64 " %d", name, position, head);
    for (int i = 0; i < count; ++i) printf(" %.9g", values[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    const char *pairing = argc > 1 ? argv[1] : "interleaved";
    const int64_t first = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    if (strcmp(pairing, "interleaved") != 0 && strcmp(pairing, "half") != 0) {
        fprintf(stderr, "rotate: the pairing must be interleaved or half, got %s\n", pairing);
        return 2;
    }
    const ropewalk_kernels *kernels = ropewalk_best();

    /* Frequencies as 64-bit fractions of a turn. A long double may have only 53 bits, while the Python package rounds exact
     * fractions once. */
    int64_t phase_steps[PAIRS];
    for (int i = 0; i < PAIRS; ++i) phase_steps[i] = llroundl(ldexpl(powl(BASE, -2.0L * i / HEAD_DIM) / TWO_PI, 64));

    float q[HEADS * HEAD_DIM], k[KV_HEADS * HEAD_DIM], key_cache[TOKENS][KV_HEADS * HEAD_DIM], cos[PAIRS], sin[PAIRS];
    int64_t position;
    const ropewalk_angles angles = {.positions = &position, .phase_steps = phase_steps, .pairs = PAIRS, .factor = 1.0,
                                    .dtype = ROPEWALK_F32, .cos = cos, .sin = sin};
    const ropewalk_rotation rotation = {
        .tensors = {in_place(q, HEADS), in_place(k, KV_HEADS)}, .tensor_count = 2, .dtype = ROPEWALK_F32,
        .tables = {.cos = cos, .sin = sin, .dtype = ROPEWALK_F32, .cos_stride = {0, 0, 0, 1}, .sin_stride = {0, 0, 0, 1}},
        .batch = 1, .tokens = 1, .head_dim = HEAD_DIM, .pairs = PAIRS, .interleaved = strcmp(pairing, "interleaved") == 0};

    for (int token = 0; token < TOKENS; ++token) {
        position = first + token;
        /* In a model, q and k are projections of the token's hidden state. */
        for (int i = 0; i < HEADS * HEAD_DIM; ++i) q[i] = (float)((7 * i + 3 * token) % 11 - 5) / 4;
        for (int i = 0; i < KV_HEADS * HEAD_DIM; ++i) k[i] = (float)((5 * i + 2 * token) % 13 - 6) / 4;

        kernels->angles(&angles, 0, 1); /* once per token; all layers share the tables */
        kernels->rotate(&rotation, 0, 1);
        memcpy(key_cache[token], k, sizeof k);

        for (int head = 0; head < HEADS; ++head) print("q", position, head, q + head * HEAD_DIM, HEAD_DIM);
        for (int head = 0; head < KV_HEADS; ++head) print("k", position, head, k + head * HEAD_DIM, HEAD_DIM);
        for (int head = 0; head < HEADS; ++head) {
            float scores[TOKENS] = {0};
            for (int past = 0; past <= token; ++past) {
                const float *key = key_cache[past] + head / (HEADS / KV_HEADS) * HEAD_DIM;
                for (int i = 0; i < HEAD_DIM; ++i) scores[past] += q[head * HEAD_DIM + i] * key[i];
            }
            print("scores", position, head, scores, token + 1);
        }
    }
    return 0;
}
