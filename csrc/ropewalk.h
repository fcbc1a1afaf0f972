/* The C interface of the CPU kernels. No function here allocates memory, starts a thread or keeps state. The caller has checked sizes,
 * slots and block numbers. Nothing that a call reads may change before it returns. */
#ifndef ROPEWALK_H
#define ROPEWALK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets, in increasing order of speed. */
typedef enum { ROPEWALK_BASELINE, ROPEWALK_AVX2, ROPEWALK_AVX512, ROPEWALK_AVX512_BF16, ROPEWALK_LEVELS } ropewalk_level;

/* The last two, int8 and float8_e4m3fn, are for cached keys and values only. */
typedef enum { ROPEWALK_F32, ROPEWALK_F64, ROPEWALK_BF16, ROPEWALK_F16, ROPEWALK_I8, ROPEWALK_E4M3 } ropewalk_dtype;

/* Outputs of together this many bytes and more are written past the caches, since they do not stay there until they are read. */
#define ROPEWALK_LARGE (INT64_C(16) << 20)

/* The largest number of channels that k or v of one token may have, all heads together, if they are written in 8 bits. */
#define ROPEWALK_CHANNELS_OF_8_BITS INT64_C(16384)

/* Queries or keys, [batch, token, head, channel]. Strides count elements, in this order of axes. */
typedef struct {
    const void *in;
    void *out; /* a separate tensor, or `in` itself with the same strides */
    int64_t heads;
    int64_t in_stride[4], out_stride[4];
    int through_caches; /* write `out` through the caches at any size */
} ropewalk_tensor;

/* cos and sin, [batch, token, head, pair]: float32 or float64. Stride 0 repeats a table along an axis. If the head stride is 0,
 * all heads share one table; otherwise q and k must have the same number of heads. */
typedef struct {
    const void *cos, *sin;
    ropewalk_dtype dtype;
    int64_t cos_stride[4], sin_stride[4];
} ropewalk_tables;

/* Rotate each pair of channels (a, b) of every head to (a cos - b sin, a sin + b cos).
 *
 * If `interleaved`, pair i is the channels offset + 2i and offset + 2i + 1; otherwise, offset + i and offset + pairs + i. The
 * other channels are copied. Products and sums are rounded in float32 (float64 for float64 tensors), without fma, then
 * once to the dtype of the tensors. `inverse` rotates by minus the angle. */
typedef struct {
    ropewalk_tensor tensors[2]; /* q and k, which may differ in heads */
    int tensor_count;           /* 1 or 2 */
    ropewalk_dtype dtype;
    ropewalk_tables tables;
    int64_t batch, tokens, head_dim, pairs, offset;
    int interleaved, inverse;
} ropewalk_rotation;

/* The gradient of a rotation to cos and sin. `in` of each tensor is the input of the rotation, and `out` the gradient to its
 * output. d_cos and d_sin are contiguous [batch, tokens, pairs], summed over the heads. If `per_head`, they are [batch, heads,
 * tokens, pairs], and q and k have the same number of heads. Their dtype is that of the sums. */
typedef struct {
    ropewalk_rotation rotation;
    void *d_cos, *d_sin;
    int per_head;
} ropewalk_table_gradient;

/* RMSNorm of each head before the rotation: x / sqrt(mean of x^2 + eps), times weight or 1 + weight. The mean is computed in
 * float64. The products are rounded in float32 (float64 for float64 tensors), then once to the dtype of the tensors. */
typedef struct {
    const void *weight[2]; /* of q and of k, contiguous [head_dim]; both NULL to skip the norm */
    ropewalk_dtype dtype;  /* of the weights: the dtype of the tensors, or that of the products */
    double eps;
    int add_one;
} ropewalk_norm;

/* The step of a decoder layer before attention: normalize and rotate q and k, and write k and v to a cache.
 *
 * If `slots` is NULL, k is written like q, and `v` and the members that describe the cache are ignored. Otherwise `out` of k and
 * of v are caches [block, slot of the block, head, channel]. Token n is written to slot slots[n] % block_size of block
 * slots[n] / block_size, or is not written if slots[n] is negative. If `out` of v is NULL, only k is written.
 *
 * If `kept` is int8 or float8_e4m3fn, k, rounded to its dtype, and v are written in 8 bits: each head as x / scale, rounded to
 * nearest, ties to even, and its scale, max |x| / 127 or max |x| / 448, at least 2^-100, rounded to float32. A number that is not
 * finite makes the scale inf or nan. The channels of such caches are adjacent, and `out` of v is not NULL. */
typedef struct {
    ropewalk_rotation rotation; /* of q and k; not inverse, and not in place */
    ropewalk_norm norm;
    const int64_t *slots;
    int64_t slot_stride[2]; /* along batch and tokens */
    int64_t block_size;
    ropewalk_tensor v; /* as many heads as k */
    int64_t v_dim;     /* channels of a head of v */
    ropewalk_dtype kept;        /* of the caches; if not of 8 bits, it is ignored, and they have the dtype of the tensors */
    float *scale[2];            /* of k and of v, only for 8 bits: [block, slot of the block, head] */
    int64_t scale_stride[2][3];
} ropewalk_step;

/* cos and sin of position * phase step, times factor. A phase step is a 64-bit fraction of a turn. The wraparound of the
 * product is the exact reduction modulo one turn. cos and sin are contiguous [rows, pairs], float32 or float64. If tokens
 * have several positions, pair i uses the one that is `axis[i] * axis_stride` elements further. If `axis` is NULL, all pairs
 * use the same. */
typedef struct {
    const int64_t *positions;
    int64_t position_stride;
    const int64_t *axis;
    int64_t axis_stride;
    const int64_t *phase_steps;
    int64_t pairs;
    double factor;
    ropewalk_dtype dtype;
    void *cos, *sin;
} ropewalk_angles;

/* Attention of the new tokens of each row over its keys and values in a cache: softmax(scale * q k) v, computed in float32.
 *
 * Key i of row r is in slot i % block_size of block blocks[r, i / block_size]; without `blocks`, in slot i of block r. A token of
 * order n, the index of the token in the row, attends to the keys i <= n, and with a window only to those with n - i < window and
 * to the first `sinks` keys. The result of a token without keys is 0. Slots that no token attends to are not read.
 *
 * With a ring, a row has `keys` slots and any number of keys: those that do not fit overwrite others in the last `ring` slots, in
 * their order. So the key i >= keys - ring is in slot keys - ring + (i - keys + ring) % ring.
 *
 * The channels of keys, values and `out` are adjacent. dtype is float32, bfloat16 or float16. kept is the same or has 8 bits. Then
 * each head of a key and a value is multiplied by a scale. */
typedef struct {
    const void *q, *far_q;  /* [batch, token, head, channel]; far_q, if not NULL, is used for sinks */
    void *out;              /* [batch, token, head, channel] */
    const void *key, *value; /* [block, slot, kv head, channel] */
    int64_t q_stride[4], far_q_stride[4], out_stride[4], key_stride[4], value_stride[4];
    ropewalk_dtype dtype, kept;                             /* of q, far_q and out; of key and value */
    const float *key_scale, *value_scale;                   /* only for 8 bits: [block, slot, kv head] */
    int64_t key_scale_stride[3], value_scale_stride[3];
    int64_t batch, queries, heads, kv_heads; /* queries: tokens of a row; kv_heads divides heads */
    int64_t head_dim, value_dim;             /* channels of q and key; of value and out */
    int64_t keys, block_size;
    const int32_t *blocks; /* NULL, or [batch, blocks of a row] */
    int64_t block_stride;
    const int64_t *order; /* [batch, token] */
    int64_t order_stride[2];
    const int64_t *counts; /* NULL, or [batch]: how many of its keys a row has */
    int64_t window, sinks; /* window 0: no limit */
    int64_t ring;          /* 0: none; otherwise at most keys, without blocks, and at least window + queries - 1 */
    double scale;
    int64_t parts; /* into which the work is divided, at least 1 */
    float *work;   /* memory of attention_floats() numbers */
} ropewalk_attention;

/* The kernels of one instruction set. Each processes the rows [begin, end), where a row is one of batch * tokens tokens. The
 * caller may process other rows in other threads. */
typedef struct {
    const char *name;
    void (*rotate)(const ropewalk_rotation *, int64_t begin, int64_t end);
    void (*table_gradient)(const ropewalk_table_gradient *, int64_t begin, int64_t end);
    void (*angles)(const ropewalk_angles *, int64_t begin, int64_t end);
    void (*step)(const ropewalk_step *, int64_t begin, int64_t end);
    /* These are NULL if the compiler has no vector extensions. First `attend` for all parts, then `combine` for all rows of the
     * batch, each range in any thread. */
    int64_t (*attention_floats)(const ropewalk_attention *); /* the size of `work`, which depends on `parts` */
    void (*attend)(const ropewalk_attention *, int64_t begin, int64_t end);
    void (*combine)(const ropewalk_attention *, int64_t begin, int64_t end);
} ropewalk_kernels;

/* The kernels of a level, or NULL if this machine cannot run it or the library was built without it. The baseline is always
 * available. */
const ropewalk_kernels *ropewalk_get(ropewalk_level level);

/* The fastest kernels that this machine can run. */
const ropewalk_kernels *ropewalk_best(void);

#ifdef __cplusplus
}
#endif
#endif
