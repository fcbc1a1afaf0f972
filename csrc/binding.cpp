// The module ropewalk.kernels._cpu, which calls the kernels with views of tensors. It compares all sizes, because a wrong size would
// access memory outside of a tensor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <vector>

#include "pages.h"
#include "plain.h"
#include "ropewalk.h"
#include "threads.h"

namespace nb = nanobind;

namespace {

const ropewalk_kernels *kernels = ropewalk_best();

// The number of elements that justifies another thread.
constexpr int64_t GRAIN = 32768;

int threads_for(int64_t elements, int64_t threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min(threads, elements / GRAIN)));
}

// Python's stable ABI has functions for this, but no macros.
int64_t entry(nb::handle tuple, int i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), i)); }

// Raises RopeError unless `holds`.
void require(bool holds, const char *must, const char *got, const char *fix = "Use a Rotation, which checks its tensors.") {
    if (holds) return;
    nb::object error = nb::module_::import_("ropewalk._checks").attr("error");
    nb::object raised = error("ropewalk.kernels._cpu", must, got, fix);
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(raised.ptr())), raised.ptr());
    throw nb::python_error();
}

// FSDP resizes unused storages to 0. PyTorch's own kernels would read address 0.
void require_memory(bool holds) {
    require(holds, "a tensor must have memory", "one whose storage was resized to 0", "Restore its storage first.");
}

// The indices of batch (-1 without batch), token, head and channel among the axes of a tensor.
struct Axes {
    int at[4];
    int count() const { return at[3] + 1; }
    void strides(const int64_t *of, int64_t *to) const {
        for (int i = 0; i < 4; ++i) to[i] = at[i] < 0 ? 0 : of[at[i]];
    }
};

// Convert an `Axes` of _layout.py: (batch or None, tokens, heads, number of axes). The axes must be distinct, and none of them may
// be the last axis, head_dim.
Axes axes_from(const nb::tuple &layout) {
    constexpr const char *must = "the axes of a layout must be those of _layout.py";
    require(layout.size() == 4, must, "another number");
    PyObject *batch = PyTuple_GetItem(layout.ptr(), 0);
    int64_t count = entry(layout, 3), seen = 0;
    require(count == (batch == Py_None ? 3 : 4), must, "others");
    Axes axes{};
    axes.at[0] = -1, axes.at[3] = static_cast<int>(count) - 1;
    for (int i = batch == Py_None ? 1 : 0; i < 3; ++i) {
        int64_t at = entry(layout, i);
        require(at >= 0 && at < count - 1 && !(seen >> at & 1), must, "others");
        axes.at[i] = static_cast<int>(at), seen |= int64_t{1} << at;
    }
    return axes;
}

int64_t elements_of(const ropewalk_rotation &r) {
    int64_t heads = 0;
    for (int n = 0; n < r.tensor_count; ++n) heads += r.tensors[n].heads;
    return r.batch * r.tokens * heads * r.head_dim;
}

void ask_for_large_pages(const ropewalk::TensorView &output) {
    ropewalk::ask_for_large_pages(output.first(), output.elements() * output.element_size());
}

void run(ropewalk_rotation &r, int64_t size, int64_t elements, int threads) {
    for (int n = 0; n < r.tensor_count; ++n) {
        ropewalk_tensor &x = r.tensors[n];
        const int64_t bytes = r.batch * r.tokens * x.heads * r.head_dim * size;
        if (x.out == x.in) continue;
        ropewalk::ask_for_large_pages(x.out, bytes);
        x.through_caches = elements * size >= ROPEWALK_LARGE && ropewalk::is_better_through_caches(x.out, bytes);
    }
    ropewalk::share_rows(r.batch * r.tokens, threads_for(elements, threads),
                         [&](int64_t begin, int64_t end) { kernels->rotate(&r, begin, end); });
}

// Set the addresses of the functions in `OpenMP`. Before this is called, only the calling thread rotates.
void use_openmp(uintptr_t parallel, uintptr_t thread_num, uintptr_t num_threads) {
#ifdef ROPEWALK_THREADS
    ropewalk::openmp = {reinterpret_cast<decltype(ropewalk::OpenMP::parallel)>(parallel),
                        reinterpret_cast<decltype(ropewalk::OpenMP::thread_num)>(thread_num),
                        reinterpret_cast<decltype(ropewalk::OpenMP::num_threads)>(num_threads)};
#else
    (void)parallel, (void)thread_num, (void)num_threads;
#endif
}

ropewalk::Torch torch;

struct Layout {
    PyObject *name;
    Axes axes;
};
std::vector<Layout> layouts;  // all of _layout.py

// The axes of a layout, or null if the object is not the name of one.
const Axes *axes_of(PyObject *name) {
    for (const Layout &layout : layouts) {
        if (layout.name == name) return &layout.axes;
    }
    for (const Layout &layout : layouts) {
        if (PyUnicode_CheckExact(name) && PyUnicode_Compare(layout.name, name) == 0) return &layout.axes;
    }
    return nullptr;
}

int threads_of_torch() {
    PyObject *result = PyObject_CallNoArgs(torch.num_threads);
    if (!result) throw nb::python_error();
    long threads = PyLong_AsLong(result);
    Py_DECREF(result);
    return static_cast<int>(threads);
}

// Look up the functions and attributes of torch that the functions below use. Returns false if this torch has no exchange API.
bool use_torch(nb::module_ torch_module, nb::dict axes, nb::tuple observers) {
    nb::object type = torch_module.attr("Tensor"), c = torch_module.attr("_C");
    auto keep = [](nb::object object) { return object.release().ptr(); };
    torch.tensor_type = keep(type), torch.parameter_type = keep(torch_module.attr("nn").attr("Parameter"));
    for (auto [name, of] : axes) layouts.push_back({nb::borrow(name).release().ptr(), axes_from(nb::borrow<nb::tuple>(of))});
    torch.observers = keep(observers);
    torch.forward_ad = keep(torch_module.attr("autograd").attr("forward_ad"));
    torch.grad_enabled = keep(c.attr("is_grad_enabled")), torch.inference_enabled = keep(c.attr("is_inference_mode_enabled"));
    torch.is_neg = keep(type.attr("is_neg"));
    torch.empty_like = keep(torch_module.attr("empty_like")), torch.num_threads = keep(torch_module.attr("get_num_threads"));
    torch.increment_version = keep(c.attr("_increment_version")), torch.empty = keep(torch_module.attr("empty"));
    torch.dtype_keyword = keep(nb::make_tuple("dtype")), torch.float32 = keep(torch_module.attr("float32"));
    torch.requires_grad.find(torch.tensor_type, "requires_grad"), torch.version.find(torch.tensor_type, "_version");
    torch.current_level = PyUnicode_InternFromString("_current_level");
    torch.api = ropewalk::exchange_api_of(torch.tensor_type);
    return torch.api != nullptr;
}

int dtype_of(const ropewalk::TensorView &x) {
    if (x.is_float(32)) return ROPEWALK_F32;
    if (x.is_bfloat()) return ROPEWALK_BF16;
    if (x.is_float(16)) return ROPEWALK_F16;
    return x.is_float(64) ? ROPEWALK_F64 : -1;
}

// The same for keys and values, which may have 8 bits.
int kept_dtype_of(const ropewalk::TensorView &x) {
    return x.is_int(8) ? ROPEWALK_I8 : x.is_e4m3fn() ? ROPEWALK_E4M3 : dtype_of(x);
}

// Returns whether the elements of a tensor follow each other in memory.
bool is_contiguous(const ropewalk::TensorView &x) {
    int64_t expected = 1;
    for (int i = x.axes - 1; i >= 0; --i) {
        if (x.shape[i] != 1 && x.strides[i] != expected) return false;
        expected *= x.shape[i];
    }
    return true;
}

// The tensors of a call and how they are rotated.
struct Call {
    bool ok = false, grad = false;  // ok: whether all match; grad: whether PyTorch records gradients
    int count = 0;
    PyObject *tensors[2];
    ropewalk::TensorView views[2], cos, sin;
    Axes at;
    int64_t size;  // of an element
    ropewalk_rotation r{};  // complete except for the outputs

    // Complete `r`, given the views. Returns false if a size or dtype does not match.
    bool match(const Axes &axes, int64_t head_dim, int64_t rotary_dim, bool interleaved, int64_t offset, bool per_head) {
        const int dtype = dtype_of(views[0]), table_dtype = dtype_of(cos), table_axes = cos.axes;
        if (dtype < 0 || (table_dtype != ROPEWALK_F32 && table_dtype != ROPEWALK_F64) || dtype_of(sin) != table_dtype) return false;
        // [pairs], [token, pairs] or [batch, token, pairs], and with a table for each head, an axis of heads before that of tokens.
        const int at_token = table_axes - 2, at_head = per_head ? table_axes - 3 : -1;
        const bool has_batch = table_axes == (per_head ? 4 : 3);
        if (table_axes < (per_head ? 3 : 1) || table_axes > (per_head ? 4 : 3) || sin.axes != table_axes) return false;
        for (int i = 0; i < table_axes; ++i) {
            if (cos.shape[i] != sin.shape[i]) return false;
        }
        if (rotary_dim < 2 || 2 * cos.shape[table_axes - 1] != rotary_dim || offset < 0 || offset + rotary_dim > head_dim) return false;

        at = axes;
        r.tensor_count = count, r.dtype = static_cast<ropewalk_dtype>(dtype);
        r.head_dim = head_dim, r.pairs = rotary_dim / 2, r.offset = offset, r.interleaved = interleaved;
        r.batch = at.at[0] < 0 ? 1 : 0;
        for (int n = 0; n < count; ++n) {
            const ropewalk::TensorView &x = views[n];
            if (x.axes != at.count() || dtype_of(x) != dtype || x.shape[at.at[3]] != head_dim) return false;
            if (n == 0) r.tokens = at_token < 0 ? x.shape[at.at[1]] : cos.shape[at_token];
            if (x.shape[at.at[1]] != r.tokens || x.elements() == 0) return false;
            if (per_head && x.shape[at.at[2]] != cos.shape[at_head]) return false;
            if (at.at[0] >= 0 && n == 0) r.batch = x.shape[at.at[0]];
            if (at.at[0] >= 0 && x.shape[at.at[0]] != r.batch) return false;
            ropewalk_tensor &to = r.tensors[n];
            to.in = to.out = x.first(), to.heads = x.shape[at.at[2]];
            at.strides(x.strides, to.in_stride), at.strides(x.strides, to.out_stride);
        }
        if (has_batch && cos.shape[0] != 1 && cos.shape[0] != r.batch) return false;
        r.tables.cos = cos.first(), r.tables.sin = sin.first(), r.tables.dtype = static_cast<ropewalk_dtype>(table_dtype);
        for (auto [view, strides] : {std::pair{&cos, r.tables.cos_stride}, std::pair{&sin, r.tables.sin_stride}}) {
            strides[0] = has_batch && view->shape[0] > 1 ? view->strides[0] : 0;
            strides[1] = at_token < 0 ? 0 : view->strides[at_token];
            strides[2] = per_head ? view->strides[at_head] : 0;
            strides[3] = view->strides[table_axes - 1];
        }
        size = views[0].element_size();
        return true;
    }
};

// Read a call with plain tensors. `ok` is false if they are not plain or do not match; Python then handles the call.
Call read_plain(nb::handle q, nb::handle k, nb::handle cos, nb::handle sin, nb::handle layout, int64_t head_dim, int64_t rotary_dim,
                bool interleaved, int64_t offset, bool per_head, bool profiled = false) {
    Call call;
    const Axes *axes = axes_of(layout.ptr());
    if (!axes || torch.is_observed(profiled)) return call;
    call.count = k.is_none() ? 1 : 2, call.tensors[0] = q.ptr(), call.tensors[1] = k.ptr();
    for (int n = 0; n < call.count; ++n) {
        if (!torch.view(call.tensors[n], call.views[n])) return call;
    }
    if (!torch.view(cos.ptr(), call.cos) || !torch.view(sin.ptr(), call.sin)) return call;
    if (axes->at[0] < 0 && call.cos.axes > (per_head ? 3 : 2)) return call;  // rows of a batch for tensors without one
    if (!call.match(*axes, head_dim, rotary_dim, interleaved, offset, per_head)) return call;
    call.grad = ropewalk::Torch::is_true(torch.grad_enabled);
    if (call.grad) {
        if (torch.requires_gradient(cos.ptr()) || torch.requires_gradient(sin.ptr())) return call;
        for (int n = 0; n < call.count; ++n) {
            if (torch.requires_gradient(call.tensors[n])) return call;
        }
    }
    call.ok = true;
    return call;
}

// Read a call of an operator of PyTorch, which may be recorded. rotation/checks.py has checked it, so what does not match raises. A
// table for each head has an axis of batch. Tensors without elements are left out, so `count` may be 0.
Call read_checked(const nb::list &tensors, const nb::list &outputs, nb::handle cos, nb::handle sin, const nb::tuple &layout,
                  bool interleaved, int64_t offset) {
    Call call;
    const Axes axes = axes_from(layout);
    ropewalk::TensorView of_outputs[2];
    require(tensors.size() <= 2 && outputs.size() == tensors.size(), "there must be one or two tensors", "another number");
    for (size_t i = 0; i < tensors.size(); ++i) {
        ropewalk::TensorView &x = call.views[call.count], &y = of_outputs[call.count];
        if (torch.api->view_of(nb::object(tensors[i]).ptr(), &x) != 0) throw nb::python_error();
        if (x.elements() == 0) continue;
        require_memory(x.data && torch.memory_of(nb::object(outputs[i]).ptr(), y));
        bool matches = y.axes == x.axes && dtype_of(y) == dtype_of(x);
        for (int n = 0; matches && n < x.axes; ++n) matches = y.shape[n] == x.shape[n];
        require(matches, "an output must have the size and dtype of its tensor", "another");
        ++call.count;
    }
    if (call.count == 0) return call;
    require_memory(torch.memory_of(cos.ptr(), call.cos) && torch.memory_of(sin.ptr(), call.sin));
    const ropewalk::TensorView &x = call.views[0], &table = call.cos;
    call.ok = x.axes > 0 && table.axes > 0 &&
              call.match(axes, x.shape[x.axes - 1], 2 * table.shape[table.axes - 1], interleaved, offset, table.axes == 4);
    require(call.ok, "the tensors must match in sizes and dtypes", "others");
    for (int n = 0; n < call.count; ++n) {
        call.r.tensors[n].out = of_outputs[n].first(), axes.strides(of_outputs[n].strides, call.r.tensors[n].out_stride);
    }
    return call;
}

// Rotate q, or q and k, into the outputs.
void rotate(const nb::list &tensors, const nb::list &outputs, nb::handle cos, nb::handle sin, const nb::tuple &layout,
            bool interleaved, int64_t offset, bool inverse) {
    Call call = read_checked(tensors, outputs, cos, sin, layout, interleaved, offset);
    if (call.count == 0) return;
    call.r.inverse = inverse;
    const int threads = threads_of_torch();
    nb::gil_scoped_release release;
    run(call.r, call.size, elements_of(call.r), threads);
}

// Returns whether a tensor may be written: no two elements share memory, and autograd can count the change, unless `inference` mode
// is enabled.
bool writable(PyObject *object, const ropewalk::TensorView &x, bool inference) {
    return ropewalk::is_nested(x) && (inference || torch.counts_changes(object));
}

// Returns whether inference mode is enabled. If gradients are recorded inside it, the result is false, and writing an inference
// tensor is left to Python.
bool is_inference(const Call &call) { return !call.grad && ropewalk::Torch::is_true(torch.inference_enabled); }

// Creates the output of the n-th tensor. Returns null if the new tensor is not plain.
nb::object new_output(Call &call, int n) {
    nb::object output = nb::steal(ropewalk::call(torch.empty_like, call.tensors[n]));
    if (!output.ptr()) throw nb::python_error();
    ropewalk::TensorView out;
    if (!torch.new_view(output.ptr(), out)) return nb::object();
    call.r.tensors[n].out = out.first();
    call.at.strides(out.strides, call.r.tensors[n].out_stride);
    return output;
}

// Tell autograd that these tensors have changed, so that a backward pass that saved them raises.
void count_change(const nb::tuple &changed) {
    PyObject *counted = ropewalk::call(torch.increment_version, changed.ptr());
    if (!counted) throw nb::python_error();
    Py_DECREF(counted);
}

// Rotate q, or q and k. Returns the result of Rotation.__call__, or True if the tensors were rotated in place. Returns None,
// without any effect, if the call is left to Python.
nb::object rotate_plain(nb::handle q, nb::handle k, nb::handle cos, nb::handle sin, nb::handle layout, int64_t head_dim,
                        int64_t rotary_dim, bool interleaved, int64_t offset, bool per_head, bool in_place) {
    const nb::object left_to_python = nb::none();
    Call call = read_plain(q, k, cos, sin, layout, head_dim, rotary_dim, interleaved, offset, per_head);
    if (!call.ok) return left_to_python;
    nb::object outputs[2];
    if (in_place) {
        const bool inference = is_inference(call);
        for (int n = 0; n < call.count; ++n) {
            if (!writable(call.tensors[n], call.views[n], inference)) return left_to_python;
        }
        if (call.count == 2 && !ropewalk::certainly_disjoint(call.views[0], call.views[1])) {
            return left_to_python;
        }
    } else {
        for (int n = 0; n < call.count; ++n) {
            if (!(outputs[n] = new_output(call, n)).ptr()) return left_to_python;
        }
    }
    const int64_t elements = elements_of(call.r);
    if (elements < 2 * GRAIN) {
        run(call.r, call.size, elements, 1);
    } else {
        const int threads = threads_of_torch();
        nb::gil_scoped_release release;
        run(call.r, call.size, elements, threads);
    }
    if (!in_place) return call.count == 1 ? outputs[0] : nb::object(nb::make_tuple(outputs[0], outputs[1]));
    count_change(call.count == 1 ? nb::make_tuple(q) : nb::make_tuple(q, k));
    return nb::bool_(true);
}

// Read a weight of a norm. It must be contiguous [head_dim], in the dtype of the tensors or that of their computation. Returns
// false if it is not.
bool read_weight(nb::handle weight, bool grad, const ropewalk_rotation &r, ropewalk_norm &norm, int n) {
    ropewalk::TensorView view;
    if (!torch.weight_view(weight.ptr(), view) || view.axes != 1 || view.shape[0] != r.head_dim || view.strides[0] != 1) return false;
    const int dtype = dtype_of(view), real = r.dtype == ROPEWALK_F64 ? ROPEWALK_F64 : ROPEWALK_F32;
    if ((dtype != r.dtype && dtype != real) || (n == 1 && dtype != norm.dtype)) return false;
    if (grad && torch.requires_gradient(weight.ptr())) return false;
    norm.weight[n] = view.first(), norm.dtype = static_cast<ropewalk_dtype>(dtype);
    return true;
}

bool has_8_bits(int dtype) { return dtype == ROPEWALK_I8 || dtype == ROPEWALK_E4M3; }

// Returns whether a view has the scales of a cache [block, slot, head, channel] of 8 bits, float32 [block, slot, head].
bool are_scales(const ropewalk::TensorView &view, const ropewalk::TensorView &cache) {
    if (!view.is_float(32) || view.axes != 3) return false;
    for (int i = 0; i < 3; ++i) {
        if (view.shape[i] != cache.shape[i]) return false;
    }
    return true;
}

// The caches [block, slot, head, channel] that a step writes, and their scales if they have 8 bits.
struct Written {
    int count = 0;
    PyObject *tensors[4];
    ropewalk::TensorView views[4];

    // Returns a view, or null if the tensor is not plain, cannot be written or may share elements with another.
    const ropewalk::TensorView *add(nb::handle tensor, const Call &call, bool inference) {
        ropewalk::TensorView &view = views[count];
        if (!torch.view(tensor.ptr(), view) || view.elements() == 0 || !writable(tensor.ptr(), view, inference)) return nullptr;
        if (call.grad && torch.requires_gradient(tensor.ptr())) return nullptr;
        for (int i = 0; i < count; ++i) {
            if (!ropewalk::certainly_disjoint(view, views[i])) return nullptr;
        }
        tensors[count++] = tensor.ptr();
        return &view;
    }
    bool shares(const ropewalk::TensorView &x) const {
        for (int i = 0; i < count; ++i) {
            if (!ropewalk::certainly_disjoint(x, views[i])) return true;
        }
        return false;
    }
    void count_changes() const {
        nb::list changed;
        for (int i = 0; i < count; ++i) changed.append(nb::handle(tensors[i]));
        count_change(nb::tuple(changed));
    }
};

// Read where a step writes k and, if it is passed, v. Returns false if something does not match.
bool read_store(Call &call, ropewalk_step &s, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle slots,
                nb::handle k_scales, nb::handle v_scales, Written &written) {
    const Axes &at = call.at;
    ropewalk::TensorView of_v{}, of_slots;
    const ropewalk::TensorView &of_k = call.views[1];
    const bool inference = is_inference(call), has_v = !v.is_none();
    if (has_v) {
        if (!torch.view(v.ptr(), of_v) || of_v.axes != at.count() || of_v.elements() == 0) return false;
        if (dtype_of(of_v) != call.r.dtype || (call.grad && torch.requires_gradient(v.ptr()))) return false;
        for (int i = 0; i < at.at[3]; ++i) {
            if (of_v.shape[i] != of_k.shape[i]) return false;
        }
        s.v.in = of_v.first(), s.v.heads = call.r.tensors[1].heads, s.v_dim = of_v.shape[at.at[3]];
        at.strides(of_v.strides, s.v.in_stride);
    } else if (!v_cache.is_none() || !k_scales.is_none() || !v_scales.is_none()) {
        return false;
    }
    for (int n = 0; n < (has_v ? 2 : 1); ++n) {
        const ropewalk::TensorView &x = n == 0 ? of_k : of_v;
        ropewalk_tensor &to = n == 0 ? call.r.tensors[1] : s.v;
        const nb::handle scales = n == 0 ? k_scales : v_scales;
        const ropewalk::TensorView *cache = written.add(n == 0 ? k_cache : v_cache, call, inference);
        if (!cache || cache->axes != 4 || cache->shape[2] != to.heads || cache->shape[3] != x.shape[at.at[3]]) return false;
        if (cache->shape[0] != written.views[0].shape[0] || cache->shape[1] != written.views[0].shape[1]) return false;
        const int kept = kept_dtype_of(*cache);
        if (has_8_bits(kept)) {
            if (!has_v || cache->strides[3] != 1 || to.heads * cache->shape[3] > ROPEWALK_CHANNELS_OF_8_BITS) return false;
            const ropewalk::TensorView *view = written.add(scales, call, inference);
            if (!view || !are_scales(*view, *cache)) return false;
            s.scale[n] = reinterpret_cast<float *>(view->first());
            for (int i = 0; i < 3; ++i) s.scale_stride[n][i] = view->strides[i];
        } else if (kept != call.r.dtype || !scales.is_none()) {
            return false;
        }
        if (n == 1 && kept != s.kept) return false;
        s.kept = static_cast<ropewalk_dtype>(kept);
        to.out = cache->first();
        for (int i = 0; i < 4; ++i) to.out_stride[i] = cache->strides[i];
    }
    if (written.shares(call.views[0]) || written.shares(of_k) || (has_v && written.shares(of_v))) return false;
    // Slots have the axes of tokens: batch, if the layout has it, and tokens.
    const int axes = at.at[0] < 0 ? 1 : 2;
    if (!torch.view(slots.ptr(), of_slots) || !of_slots.is_int(64) || of_slots.axes != axes) return false;
    if (of_slots.shape[axes - 1] != call.r.tokens || (axes == 2 && of_slots.shape[0] != call.r.batch)) return false;
    s.slots = reinterpret_cast<const int64_t *>(of_slots.first());
    s.slot_stride[0] = axes == 2 ? of_slots.strides[0] : 0, s.slot_stride[1] = of_slots.strides[axes - 1];
    s.block_size = written.views[0].shape[1];
    for (int64_t batch = 0; batch < call.r.batch; ++batch) {
        for (int64_t token = 0; token < call.r.tokens; ++token) {
            int64_t slot = s.slots[batch * s.slot_stride[0] + token * s.slot_stride[1]];
            if (slot < -1 || slot >= written.views[0].shape[0] * s.block_size) return false;
        }
    }
    return true;
}

// Normalize q and k, if weights are passed, and rotate them. Returns both. With a cache, writes k and, if it is passed, v to their slots
// and returns q. Returns None, without any effect, if the call is left to Python. `slots` has one int64 per token, in the order of
// `layout`.
nb::object step_plain(nb::handle q, nb::handle k, nb::handle cos, nb::handle sin, nb::handle layout, int64_t head_dim,
                      int64_t rotary_dim, bool interleaved, int64_t offset, bool per_head, nb::handle q_weight,
                      nb::handle k_weight, double eps, bool add_one, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                      nb::handle slots, nb::handle k_scales, nb::handle v_scales, bool profiled) {
    const nb::object left_to_python = nb::none();
    if (k.is_none()) return left_to_python;
    Call call = read_plain(q, k, cos, sin, layout, head_dim, rotary_dim, interleaved, offset, per_head, profiled);
    if (!call.ok) return left_to_python;
    const bool grad = call.grad;
    ropewalk_step s{};
    s.norm.eps = eps, s.norm.add_one = add_one;
    if (!q_weight.is_none() && !(read_weight(q_weight, grad, call.r, s.norm, 0) && read_weight(k_weight, grad, call.r, s.norm, 1))) {
        return left_to_python;
    }
    Written written;
    nb::object outputs[2];
    if (!(outputs[0] = new_output(call, 0)).ptr()) return left_to_python;
    if (slots.is_none()) {
        for (nb::handle x : {v, k_cache, v_cache, k_scales, v_scales}) {
            if (!x.is_none()) return left_to_python;
        }
        if (!(outputs[1] = new_output(call, 1)).ptr()) return left_to_python;
    } else if (!read_store(call, s, v, k_cache, v_cache, slots, k_scales, v_scales, written)) {
        return left_to_python;
    }
    s.rotation = call.r;
    const int64_t elements = elements_of(s.rotation), rows = s.rotation.batch * s.rotation.tokens;
    if (elements < 2 * GRAIN) {
        kernels->step(&s, 0, rows);
    } else {
        for (int n = 0; n < (slots.is_none() ? 2 : 1); ++n) {
            ropewalk::ask_for_large_pages(call.r.tensors[n].out, call.views[n].elements() * call.size);
        }
        const int threads = threads_for(elements, threads_of_torch());
        nb::gil_scoped_release release;
        ropewalk::share_rows(rows, threads, [&](int64_t begin, int64_t end) { kernels->step(&s, begin, end); });
    }
    if (slots.is_none()) return nb::make_tuple(outputs[0], outputs[1]);
    written.count_changes();
    return outputs[0];
}

// Compute the gradients of cos and sin, contiguous [batch, token, pairs] or [batch, head, token, pairs], from q, or q and k, and the
// gradients of the rotated tensors.
void table_gradient(const nb::list &tensors, const nb::list &grads, nb::handle d_cos, nb::handle d_sin, const nb::tuple &layout,
                    bool interleaved, int64_t offset) {
    Call call = read_checked(tensors, grads, d_cos, d_sin, layout, interleaved, offset);
    if (call.count == 0) return;
    ropewalk_table_gradient g{};
    // A gradient is written, so no two rows of a batch may have one row of it.
    const ropewalk::TensorView &to = call.cos;
    require(to.axes >= 3 && to.shape[0] == call.r.batch && is_contiguous(to) && is_contiguous(call.sin) &&
                to.is_float(call.r.dtype == ROPEWALK_F64 ? 64 : 32),
            "gradients of tables must have a row for each token of the batch", "others");
    g.rotation = call.r, g.d_cos = to.first(), g.d_sin = call.sin.first(), g.per_head = to.axes == 4;
    const int threads = threads_for(elements_of(call.r), threads_of_torch());
    nb::gil_scoped_release release;
    ropewalk::share_rows(call.r.batch * call.r.tokens, threads,
                         [&](int64_t begin, int64_t end) { kernels->table_gradient(&g, begin, end); });
}

// Write cos and sin of position * step. `positions` are [..., tokens], or [axes, ..., tokens] with `axis`, the axis of each pair. All
// are contiguous; positions, steps and axis are int64.
void angles(nb::handle positions, nb::handle axis, nb::handle steps, double factor, nb::handle cos, nb::handle sin) {
    ropewalk::TensorView at, of_axis, of_steps, to[2];
    require_memory(torch.memory_of(positions.ptr(), at) && torch.memory_of(steps.ptr(), of_steps) &&
                   torch.memory_of(cos.ptr(), to[0]) && torch.memory_of(sin.ptr(), to[1]) &&
                   (axis.is_none() || torch.memory_of(axis.ptr(), of_axis)));
    const int64_t axes = axis.is_none() ? 1 : at.shape[0], pairs = of_steps.elements(), rows = at.elements() / axes;
    bool matches = at.is_int(64) && of_steps.is_int(64) && is_contiguous(at) && is_contiguous(of_steps);
    for (const ropewalk::TensorView &table : to) {
        matches &= (table.is_float(32) || table.is_float(64)) && table.dtype_bits == to[0].dtype_bits && is_contiguous(table) &&
                   table.elements() == rows * pairs;
    }
    ropewalk_angles a{};
    if (!axis.is_none()) {
        matches &= of_axis.is_int(64) && is_contiguous(of_axis) && of_axis.elements() == pairs;
        a.axis = reinterpret_cast<const int64_t *>(of_axis.first()), a.axis_stride = rows;
        for (int64_t i = 0; matches && i < pairs; ++i) {
            require(a.axis[i] >= 0 && a.axis[i] < axes, "each pair must have one of the axes of positions", "another");
        }
    }
    require(matches, "positions, steps, axes and tables must match in sizes and dtypes", "others");
    a.positions = reinterpret_cast<const int64_t *>(at.first()), a.position_stride = 1;
    a.phase_steps = reinterpret_cast<const int64_t *>(of_steps.first()), a.pairs = pairs, a.factor = factor;
    a.dtype = static_cast<ropewalk_dtype>(dtype_of(to[0])), a.cos = to[0].first(), a.sin = to[1].first();
    for (const ropewalk::TensorView &table : to) ask_for_large_pages(table);
    const int threads = threads_for(8 * rows * pairs, threads_of_torch());
    nb::gil_scoped_release release;
    ropewalk::share_rows(rows, threads, [&](int64_t begin, int64_t end) { kernels->angles(&a, begin, end); });
}

// Copy positions of up to three axes to contiguous int64 numbers.
template <class Integer> std::vector<int64_t> copy_positions(const ropewalk::TensorView &x) {
    int64_t size[3] = {1, 1, 1}, stride[3] = {0, 0, 0};
    for (int i = 0; i < x.axes; ++i) size[3 - x.axes + i] = x.shape[i], stride[3 - x.axes + i] = x.strides[i];
    const auto *from = reinterpret_cast<const Integer *>(x.first());
    std::vector<int64_t> copy;
    copy.reserve(size[0] * size[1] * size[2]);
    for (int64_t a = 0; a < size[0]; ++a) {
        for (int64_t b = 0; b < size[1]; ++b) {
            for (int64_t c = 0; c < size[2]; ++c) copy.push_back(from[a * stride[0] + b * stride[1] + c * stride[2]]);
        }
    }
    return copy;
}

// Compute cos and sin as `angles` does, in new tensors, from int32 or int64 positions. Returns None, without any effect, if the call
// is left to Python. `steps` and `axis` are the bytes of int64 numbers. If tokens have one position, `axis` is empty and `axes` is 0.
nb::object angles_plain(nb::handle positions, nb::bytes steps, double factor, nb::handle dtype, nb::bytes axis, int64_t axes) {
    ropewalk::TensorView at, to[2];
    const int first = axes > 0 ? 1 : 0;  // the first axis of positions that is an axis of tokens
    if (torch.is_observed() || !torch.view(positions.ptr(), at) || !(at.is_int(64) || at.is_int(32))) return nb::none();
    if (at.axes < first + 1 || at.axes > first + 2 || (first && at.shape[0] != axes)) return nb::none();
    const int64_t pairs = static_cast<int64_t>(steps.size() / sizeof(int64_t)), elements = at.elements();
    const int last = at.axes - 1, tokens = at.axes - first;
    if (elements == 0) return nb::none();
    const int64_t rows = first ? elements / axes : elements;
    const auto *of_pairs = reinterpret_cast<const int64_t *>(axis.c_str());
    for (int64_t i = 0; first && i < pairs; ++i) {
        if (axis.size() != steps.size() || of_pairs[i] < 0 || of_pairs[i] >= axes) return nb::none();
    }
    nb::object sizes[3], tables[2];
    PyObject *arguments[4];
    for (int i = 0; i <= tokens; ++i) {
        sizes[i] = nb::int_(i < tokens ? at.shape[first + i] : pairs);
        arguments[i] = sizes[i].ptr();
    }
    arguments[tokens + 1] = dtype.ptr();
    auto create = [&](int i, PyObject *table) {
        tables[i] = nb::steal(table);
        if (!table) return PyErr_Clear(), false;  // an invalid dtype, or no memory: Python will raise
        return torch.new_view(table, to[i]) && (to[i].is_float(32) || to[i].is_float(64));
    };
    // Without a dtype, torch.empty is faster. It then creates float32 unless the program has changed the default.
    const bool is_default = dtype.ptr() == torch.float32 &&
                            create(0, PyObject_Vectorcall(torch.empty, arguments, tokens + 1, nullptr)) && to[0].is_float(32);
    if (!is_default && !create(0, PyObject_Vectorcall(torch.empty, arguments, tokens + 1, torch.dtype_keyword))) return nb::none();
    if (!create(1, ropewalk::call(torch.empty_like, tables[0].ptr()))) return nb::none();  // faster than torch.empty
    const bool contiguous = at.strides[last] == 1 && (tokens == 1 || at.strides[first] == at.shape[last]);
    std::vector<int64_t> copy;
    if (!at.is_int(64)) copy = copy_positions<int32_t>(at);
    else if (!contiguous) copy = copy_positions<int64_t>(at);
    ropewalk_angles a{};
    a.positions = copy.empty() ? reinterpret_cast<const int64_t *>(at.first()) : copy.data(), a.position_stride = 1;
    if (first) a.axis = of_pairs, a.axis_stride = copy.empty() ? at.strides[0] : rows;  // 0 if positions of text are expanded
    a.phase_steps = reinterpret_cast<const int64_t *>(steps.c_str()), a.pairs = pairs, a.factor = factor;
    a.dtype = static_cast<ropewalk_dtype>(dtype_of(to[0]));
    a.cos = to[0].first(), a.sin = to[1].first();
    if (8 * rows * pairs < 2 * GRAIN) {
        kernels->angles(&a, 0, rows);
    } else {
        for (const ropewalk::TensorView &table : to) ask_for_large_pages(table);
        const int threads = threads_for(8 * rows * pairs, threads_of_torch());
        nb::gil_scoped_release release;
        ropewalk::share_rows(rows, threads, [&](int64_t begin, int64_t end) { kernels->angles(&a, begin, end); });
    }
    return nb::make_tuple(tables[0], tables[1]);
}

// Read one int64 for each row, [batch]. None is null. Returns false if it is something else.
bool read_rows(nb::handle numbers, int64_t batch, const int64_t *&to) {
    ropewalk::TensorView view;
    if (numbers.is_none()) return true;
    if (!torch.view(numbers.ptr(), view) || !view.is_int(64) || view.axes != 1 || view.shape[0] != batch) return false;
    to = reinterpret_cast<const int64_t *>(view.first());
    return batch == 1 || view.strides[0] == 1;
}

// Attend with queries [batch, token, head, channel] over the keys and values [block, slot, kv head, channel] of a cache. The other
// arguments are those of ropewalk_attention; window 0 means none. Returns a new tensor, or None if the call is left to Python.
nb::object attend_plain(nb::handle q, nb::handle far_q, nb::handle keys, nb::handle values, nb::handle blocks, int64_t count,
                        nb::handle order, nb::handle counts, int64_t window, int64_t sinks,
                        nb::handle key_scales, nb::handle value_scales, int64_t ring, double scale, bool profiled) {
    const nb::object left_to_python = nb::none();
    ropewalk::TensorView of_q, of_far, of_keys, of_values, of_key_scales, of_value_scales, of_blocks, of_order, of_out;
    if (!kernels->attend || torch.is_observed(profiled)) return left_to_python;
    if (!torch.view(q.ptr(), of_q) || !torch.view(keys.ptr(), of_keys) || !torch.view(values.ptr(), of_values)) return left_to_python;
    if (of_q.axes != 4 || of_keys.axes != 4 || of_values.axes != 4 || of_q.elements() == 0) return left_to_python;
    if (ropewalk::Torch::is_true(torch.grad_enabled)) {
        for (nb::handle x : {q, far_q, keys, values}) {
            if (!x.is_none() && torch.requires_gradient(x.ptr())) return left_to_python;
        }
    }
    ropewalk_attention a{};
    const int dtype = dtype_of(of_q);
    const int kept = kept_dtype_of(of_keys);
    if (dtype < 0 || dtype == ROPEWALK_F64 || kept_dtype_of(of_values) != kept) return left_to_python;
    if (has_8_bits(kept)) {
        if (!torch.view(key_scales.ptr(), of_key_scales) || !torch.view(value_scales.ptr(), of_value_scales)) return left_to_python;
        if (!are_scales(of_key_scales, of_keys) || !are_scales(of_value_scales, of_values)) return left_to_python;
        a.key_scale = reinterpret_cast<const float *>(of_key_scales.first());
        a.value_scale = reinterpret_cast<const float *>(of_value_scales.first());
        for (int i = 0; i < 3; ++i) {
            a.key_scale_stride[i] = of_key_scales.strides[i], a.value_scale_stride[i] = of_value_scales.strides[i];
        }
    } else if (kept != dtype || !key_scales.is_none() || !value_scales.is_none()) {
        return left_to_python;
    }
    a.dtype = static_cast<ropewalk_dtype>(dtype), a.kept = static_cast<ropewalk_dtype>(kept);
    a.batch = of_q.shape[0], a.queries = of_q.shape[1], a.heads = of_q.shape[2], a.kv_heads = of_keys.shape[2];
    a.head_dim = of_q.shape[3];
    a.value_dim = of_values.shape[3];
    for (int i = 0; i < 4; ++i) {
        if (i < 3 && of_keys.shape[i] != of_values.shape[i]) return left_to_python;
        a.q_stride[i] = of_q.strides[i], a.key_stride[i] = of_keys.strides[i], a.value_stride[i] = of_values.strides[i];
    }
    if (of_keys.shape[3] != a.head_dim || a.kv_heads < 1 || a.heads % a.kv_heads) return left_to_python;
    if (of_keys.strides[3] != 1 || of_values.strides[3] != 1) return left_to_python;
    a.q = of_q.first(), a.key = of_keys.first(), a.value = of_values.first();
    if (!far_q.is_none()) {
        if (!torch.view(far_q.ptr(), of_far) || of_far.axes != 4 || dtype_of(of_far) != dtype) return left_to_python;
        for (int i = 0; i < 4; ++i) {
            if (of_far.shape[i] != of_q.shape[i]) return left_to_python;
            a.far_q_stride[i] = of_far.strides[i];
        }
        a.far_q = of_far.first();
    }
    const int64_t pool = of_keys.shape[0];
    a.block_size = of_keys.shape[1], a.keys = count;
    if (ring < 0 || ring > count || (ring && !blocks.is_none())) return left_to_python;
    if (blocks.is_none()) {
        if (a.batch > pool || count < 0 || count > a.block_size) return left_to_python;
    } else {
        if (!torch.view(blocks.ptr(), of_blocks) || !of_blocks.is_int(32) || of_blocks.axes != 2 || of_blocks.shape[0] != a.batch ||
            of_blocks.strides[1] != 1 || count < 0 || count > of_blocks.shape[1] * a.block_size) {
            return left_to_python;
        }
        a.blocks = reinterpret_cast<const int32_t *>(of_blocks.first()), a.block_stride = of_blocks.strides[0];
        for (int64_t row = 0; row < a.batch; ++row) {
            bool inside = true;
            for (int64_t i = 0; i < of_blocks.shape[1]; ++i) {
                inside &= static_cast<uint64_t>(a.blocks[row * a.block_stride + i]) < static_cast<uint64_t>(pool);
            }
            if (!inside) return left_to_python;
        }
    }
    if (!torch.view(order.ptr(), of_order) || !of_order.is_int(64) || of_order.axes != 2 || of_order.shape[0] != a.batch ||
        of_order.shape[1] != a.queries || !read_rows(counts, a.batch, a.counts)) {
        return left_to_python;
    }
    a.order = reinterpret_cast<const int64_t *>(of_order.first());
    a.order_stride[0] = of_order.strides[0], a.order_stride[1] = of_order.strides[1];
    a.window = window, a.sinks = sinks, a.ring = ring, a.scale = scale;
    nb::object out = a.value_dim == a.head_dim
                         ? nb::steal(ropewalk::call(torch.empty_like, q.ptr()))
                         : q.attr("new_empty")(nb::make_tuple(a.batch, a.queries, a.heads, a.value_dim));
    if (!out.ptr()) throw nb::python_error();
    if (!torch.view(out.ptr(), of_out) || of_out.strides[3] != 1) return left_to_python;
    a.out = of_out.first();
    ask_for_large_pages(of_out);
    for (int i = 0; i < 4; ++i) a.out_stride[i] = of_out.strides[i];
    a.parts = threads_for(a.batch * count * a.kv_heads * a.head_dim, threads_of_torch());
    std::unique_ptr<float[]> work(new float[static_cast<size_t>(kernels->attention_floats(&a))]);
    a.work = work.get();
    nb::gil_scoped_release release;
    ropewalk::share_rows(a.parts, static_cast<int>(a.parts), [&](int64_t begin, int64_t end) { kernels->attend(&a, begin, end); });
    ropewalk::share_rows(a.batch, static_cast<int>(std::min(a.parts, a.batch)),
                         [&](int64_t begin, int64_t end) { kernels->combine(&a, begin, end); });
    return out;
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
    m.def("use_openmp", &use_openmp);
    m.def("use_torch", &use_torch);
    m.def("rotate_plain", &rotate_plain, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
    m.def("step_plain", &step_plain, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
          nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg());
    m.def("attend_plain", &attend_plain, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
          nb::arg(), nb::arg());
    m.def("table_gradient", &table_gradient);
    m.def("angles", &angles, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
    m.def("angles_plain", &angles_plain, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
}
