/* The CPU kernels as C sees them. No function here allocates, starts a thread or keeps a state. */
#ifndef ROPEWALK_H
#define ROPEWALK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets, the later the faster. */
typedef enum { ROPEWALK_BASELINE, ROPEWALK_AVX2, ROPEWALK_AVX512, ROPEWALK_AVX512_BF16, ROPEWALK_LEVELS } ropewalk_level;

typedef enum { ROPEWALK_F32, ROPEWALK_F64, ROPEWALK_BF16, ROPEWALK_F16 } ropewalk_dtype;

/* Queries or keys, [batch, token, head, channel]. Strides in elements, in that order. */
typedef struct {
    const void *in;
    void *out; /* another tensor, or `in` itself with the same strides */
    int64_t heads;
    int64_t in_stride[4], out_stride[4];
} ropewalk_tensor;

/* cos and sin, [batch, token, head, pair]: float32 or float64. Stride 0 repeats a table; along the heads it means one table for
 * all of them, and any other that q and k have the same heads. */
typedef struct {
    const void *cos, *sin;
    ropewalk_dtype dtype;
    int64_t cos_stride[4], sin_stride[4];
} ropewalk_tables;

/* Turn each pair of channels (a, b) of every head to (a cos - b sin, a sin + b cos).
 *
 * Pair i is the channels offset + 2i and offset + 2i + 1 where `interleaved`, else offset + i and offset + pairs + i. The
 * other channels are copied. Products and sums are rounded in float32 (float64 for float64 tensors), without fma, then
 * once to the dtype of the tensors. `conjugate` turns back. */
typedef struct {
    ropewalk_tensor tensors[2]; /* q and k, which may differ in heads */
    int tensor_count;           /* 1 or 2 */
    ropewalk_dtype dtype;
    ropewalk_tables tables;
    int64_t batch, tokens, head_dim, pairs, offset;
    int interleaved, conjugate;
} ropewalk_rotation;

/* The gradient of such a rotation to cos and sin: `out` of each tensor holds the gradient of what was turned, `in` what came in.
 * d_cos and d_sin are contiguous [batch, tokens, pairs], summed over the heads, or [batch, heads, tokens, pairs] where `per_head`,
 * for q and k with the same heads; in the dtype that sums are made in. */
typedef struct {
    ropewalk_rotation rotation;
    void *d_cos, *d_sin;
    int per_head;
} ropewalk_table_gradient;

/* RMS-norm of each head before it is rotated: x / sqrt(mean of x^2 + eps), times weight, or 1 + weight. The mean is made in
 * float64; the products are rounded in float32 (float64 for float64 tensors), then once to the dtype of the tensors. */
typedef struct {
    const void *weight[2]; /* of q and of k, contiguous [head_dim]; both NULL: no norm */
    ropewalk_dtype dtype;  /* of the weights: that of the tensors, or the one that products are made in */
    double eps;
    int add_one;
} ropewalk_norm;

/* One layer of a decoder before its attention: q and k normed and rotated, and k and v written to a cache.
 *
 * Without `slots` only the first two: k is a tensor as in a rotation, and v and what follows do not count. With them `out` of k
 * and of v are [block, slot of the block, head, channel], and token n goes to slot slots[n] % block_size of block
 * slots[n] / block_size; nowhere where slots[n] is negative. */
typedef struct {
    ropewalk_rotation rotation; /* of q and k, not back; no tensor in place */
    ropewalk_norm norm;
    const int64_t *slots;
    int64_t slot_stride[2]; /* along batch and tokens */
    int64_t block_size;
    ropewalk_tensor v; /* as many heads as k */
    int64_t v_dim;     /* channels of a head of v */
} ropewalk_step;

/* cos and sin of position * step, times factor. A step is a 64-bit fraction of a turn; the product wraps around, which is
 * exactly reduction modulo one turn. cos and sin are contiguous [rows, pairs], float32 or float64. Where tokens have several
 * positions, pair i takes the one `axis[i] * axis_stride` further; `axis` NULL: all take the only one. */
typedef struct {
    const int64_t *positions;
    int64_t position_stride;
    const int64_t *axis;
    int64_t axis_stride;
    const int64_t *steps;
    int64_t pairs;
    double factor;
    ropewalk_dtype dtype;
    void *cos, *sin;
} ropewalk_angles;

/* One instruction set's kernels. Each does the rows [begin, end), where a row is a token: batch * tokens in all. The caller
 * may give other rows to other threads. */
typedef struct {
    const char *name;
    void (*rotate)(const ropewalk_rotation *, int64_t begin, int64_t end);
    void (*table_gradient)(const ropewalk_table_gradient *, int64_t begin, int64_t end);
    void (*angles)(const ropewalk_angles *, int64_t begin, int64_t end);
    void (*step)(const ropewalk_step *, int64_t begin, int64_t end);
} ropewalk_kernels;

/* NULL where this machine cannot run that level, or this library was built without it. The baseline is always there. */
const ropewalk_kernels *ropewalk_get(ropewalk_level level);

/* The fastest that this machine can run. */
const ropewalk_kernels *ropewalk_best(void);

#ifdef __cplusplus
}
#endif
#endif
