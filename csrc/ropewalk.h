/* The CPU kernels as C sees them. No function here allocates, starts a thread or keeps a state. */
#ifndef ROPEWALK_H
#define ROPEWALK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets, the later the faster. */
typedef enum { ROPEWALK_BASELINE, ROPEWALK_AVX2, ROPEWALK_AVX512, ROPEWALK_AVX512_BF16, ROPEWALK_LEVELS } ropewalk_level;

/* Placeholder: out[row][i] = factor * in[row][i]. Strides in elements. */
typedef struct {
    const float *in;
    float *out;
    int64_t rows, columns;
    int64_t in_stride, out_stride;
    float factor;
} ropewalk_scale_args;

/* One instruction set's kernels. Each does the rows [begin, end); the caller may give other rows to other threads. */
typedef struct {
    const char *name;
    void (*scale)(const ropewalk_scale_args *args, int64_t begin, int64_t end);
} ropewalk_kernels;

/* NULL where this machine cannot run that level, or this library was built without it. The baseline is always there. */
const ropewalk_kernels *ropewalk_get(ropewalk_level level);

/* The fastest that this machine can run. */
const ropewalk_kernels *ropewalk_best(void);

#ifdef __cplusplus
}
#endif
#endif
