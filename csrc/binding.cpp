// ropewalk.rotation._cpu: raw addresses, sizes and strides from Python to the kernels. Nothing is checked here.
#include <nanobind/nanobind.h>

#include "ropewalk.h"
#include "threads.h"

namespace nb = nanobind;

namespace {

void scale(uintptr_t in, uintptr_t out, int64_t rows, int64_t columns, int64_t in_stride, int64_t out_stride, float factor,
           int level, int threads) {
    const ropewalk_kernels *kernels = ropewalk_get(static_cast<ropewalk_level>(level));
    if (!kernels) throw nb::value_error("this machine or this build has no such level");
    ropewalk_scale_args args = {reinterpret_cast<const float *>(in), reinterpret_cast<float *>(out), rows, columns, in_stride,
                                out_stride, factor};
    nb::gil_scoped_release release;
    ropewalk::share_rows(rows, threads, [&](int64_t begin, int64_t end) { kernels->scale(&args, begin, end); });
}

nb::dict levels() {
    nb::dict found;
    for (int level = 0; level < ROPEWALK_LEVELS; ++level) {
        if (const ropewalk_kernels *kernels = ropewalk_get(static_cast<ropewalk_level>(level))) found[kernels->name] = level;
    }
    return found;
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.def("levels", &levels);
    m.def("scale", &scale);
}
