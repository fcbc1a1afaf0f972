// The kernels; compiled once for each instruction set. Everything but the table at the end stays in the unnamed namespace and
// nothing of the C++ library is used: an inline function with external linkage, compiled for AVX-512, could replace the
// baseline's copy of it at link time.
#include "ropewalk.h"

#define ROPEWALK_STRING(name) #name
#define ROPEWALK_NAME(name) ROPEWALK_STRING(name)

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

void scale(const ropewalk_scale_args *args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float *in = args->in + row * args->in_stride;
        float *out = args->out + row * args->out_stride;
        for (int64_t i = 0; i < args->columns; ++i) out[i] = args->factor * in[i];
    }
}

}  // namespace

extern const ropewalk_kernels kernels;
const ropewalk_kernels kernels = {ROPEWALK_NAME(ROPEWALK_NAMESPACE), scale};

}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
