// ropewalk.kernels._cpu: raw addresses, shapes and strides from Python to the kernels. Nothing is checked here:
// kernels/cpu.py hands over what rotation/checks.py has seen.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "pages.h"
#include "ropewalk.h"
#include "threads.h"

namespace nb = nanobind;

namespace {

const ropewalk_kernels *kernels = ropewalk_best();

// Elements that are worth another thread.
constexpr int64_t GRAIN = 32768;

int threads_for(int64_t elements, int64_t threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min(threads, elements / GRAIN)));
}

// Batch, token, head and channel among the axes of each layout, in the order of _checks.LAYOUTS; -1: there is none.
constexpr int AXES[][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {1, 0, 2, 3}, {-1, 0, 1, 2}};

int64_t entry(nb::handle tuple, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i)); }

void strides_of(nb::handle strides, const int *axes, int64_t *to) {
    for (int i = 0; i < 4; ++i) to[i] = axes[i] < 0 ? 0 : entry(strides, axes[i]);
}

// A table [pairs], [token, pairs] or [batch, token, pairs].
void table_strides(nb::handle shape, nb::handle strides, int64_t *to) {
    int last = static_cast<int>(PyTuple_GET_SIZE(shape.ptr())) - 1;
    to[0] = last > 1 && entry(shape, 0) > 1 ? entry(strides, 0) : 0;
    to[1] = last > 0 ? entry(strides, last - 1) : 0;
    to[2] = entry(strides, last);
}

// (address in, address out, shape, strides in, strides out) for q and k.
using Tensors = nb::tuple;

ropewalk_rotation described(const Tensors &tensors, uintptr_t cos, uintptr_t sin, const nb::tuple &table_shape,
                            const nb::tuple &cos_strides, const nb::tuple &sin_strides, int dtype, int table_dtype, int layout,
                            bool interleaved, int64_t offset, bool conjugate) {
    ropewalk_rotation r{};
    const int *axes = AXES[layout];
    r.tensor_count = static_cast<int>(tensors.size()) / 5;
    for (int n = 0; n < r.tensor_count; ++n) {
        auto at = [&](int i) { return nb::handle(PyTuple_GET_ITEM(tensors.ptr(), 5 * n + i)); };
        ropewalk_tensor &x = r.tensors[n];
        x.in = PyLong_AsVoidPtr(at(0).ptr()), x.out = PyLong_AsVoidPtr(at(1).ptr());
        x.heads = entry(at(2), axes[2]);
        strides_of(at(3), axes, x.in_stride), strides_of(at(4), axes, x.out_stride);
        r.batch = axes[0] < 0 ? 1 : entry(at(2), axes[0]);
        r.tokens = entry(at(2), axes[1]), r.head_dim = entry(at(2), axes[3]);
    }
    r.dtype = static_cast<ropewalk_dtype>(dtype);
    r.tables.cos = reinterpret_cast<const void *>(cos), r.tables.sin = reinterpret_cast<const void *>(sin);
    r.tables.dtype = static_cast<ropewalk_dtype>(table_dtype);
    table_strides(table_shape, cos_strides, r.tables.cos_stride), table_strides(table_shape, sin_strides, r.tables.sin_stride);
    r.pairs = entry(table_shape, static_cast<int>(table_shape.size()) - 1);
    r.offset = offset, r.interleaved = interleaved, r.conjugate = conjugate;
    return r;
}

int64_t elements_of(const ropewalk_rotation &r) {
    int64_t heads = 0;
    for (int n = 0; n < r.tensor_count; ++n) heads += r.tensors[n].heads;
    return r.batch * r.tokens * heads * r.head_dim;
}

void rotate(const Tensors &tensors, uintptr_t cos, uintptr_t sin, const nb::tuple &table_shape, const nb::tuple &cos_strides,
            const nb::tuple &sin_strides, int dtype, int table_dtype, int layout, bool interleaved, int64_t offset,
            bool conjugate, int64_t threads) {
    ropewalk_rotation r = described(tensors, cos, sin, table_shape, cos_strides, sin_strides, dtype, table_dtype, layout,
                                    interleaved, offset, conjugate);
    int64_t elements = elements_of(r);
    nb::gil_scoped_release release;
    for (int n = 0; n < r.tensor_count; ++n) {
        const ropewalk_tensor &x = r.tensors[n];
        int64_t size = dtype == ROPEWALK_F64 ? 8 : dtype == ROPEWALK_F32 ? 4 : 2;
        if (x.out != x.in) ropewalk::ask_for_large_pages(x.out, r.batch * r.tokens * x.heads * r.head_dim * size);
    }
    ropewalk::share_rows(r.batch * r.tokens, threads_for(elements, threads),
                         [&](int64_t begin, int64_t end) { kernels->rotate(&r, begin, end); });
}

void table_gradient(const Tensors &tensors, uintptr_t d_cos, uintptr_t d_sin, const nb::tuple &table_shape, int dtype,
                    int layout, bool interleaved, int64_t offset, int64_t threads) {
    ropewalk_table_gradient g{};
    g.rotation = described(tensors, 0, 0, table_shape, table_shape, table_shape, dtype, 0, layout, interleaved, offset, false);
    g.d_cos = reinterpret_cast<void *>(d_cos), g.d_sin = reinterpret_cast<void *>(d_sin);
    int64_t elements = elements_of(g.rotation);
    nb::gil_scoped_release release;
    ropewalk::share_rows(g.rotation.batch * g.rotation.tokens, threads_for(elements, threads),
                         [&](int64_t begin, int64_t end) { kernels->table_gradient(&g, begin, end); });
}

void angles(uintptr_t positions, int64_t rows, uintptr_t steps, int64_t pairs, double factor, int dtype, uintptr_t cos,
            uintptr_t sin, int64_t threads) {
    ropewalk_angles a{};
    a.positions = reinterpret_cast<const int64_t *>(positions), a.position_stride = 1;
    a.steps = reinterpret_cast<const int64_t *>(steps), a.pairs = pairs, a.factor = factor;
    a.dtype = static_cast<ropewalk_dtype>(dtype);
    a.cos = reinterpret_cast<void *>(cos), a.sin = reinterpret_cast<void *>(sin);
    nb::gil_scoped_release release;
    ropewalk::share_rows(rows, threads_for(8 * rows * pairs, threads),
                         [&](int64_t begin, int64_t end) { kernels->angles(&a, begin, end); });
}

nb::list levels() {
    nb::list names;
    for (int level = 0; level < ROPEWALK_LEVELS; ++level) {
        if (const ropewalk_kernels *found = ropewalk_get(static_cast<ropewalk_level>(level))) names.append(found->name);
    }
    return names;
}

void use_level(const std::string &name) {
    for (int level = 0; level < ROPEWALK_LEVELS; ++level) {
        const ropewalk_kernels *found = ropewalk_get(static_cast<ropewalk_level>(level));
        if (found && name == found->name) return void(kernels = found);
    }
    throw nb::value_error("this machine or this build has no such level");
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.def("levels", &levels);
    m.def("use_level", &use_level);
    m.def("rotate", &rotate);
    m.def("table_gradient", &table_gradient);
    m.def("angles", &angles);
}
