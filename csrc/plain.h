// Recognize calls that compiled code can run without Python: calls with plain PyTorch tensors on the CPU whose sizes match, while
// nothing observes the operators. The Python code handles every other call or raises an error. Nothing here raises.
#pragma once

#include <nanobind/nanobind.h>

#include "exchange.h"
#include "ropewalk.h"

namespace ropewalk {

namespace nb = nanobind;

// The same as PyObject_CallOneArg, which is not in the stable ABI.
inline PyObject *call(PyObject *function, PyObject *argument) {
    PyObject *arguments[] = {nullptr, argument};  // the free place is for the self of a bound method
    return PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// The functions and attributes of torch that each call uses. `use_torch` looks them up once.
struct Torch {
    const ExchangeAPI *api = nullptr;
    PyObject *tensor_type = nullptr, *parameter_type = nullptr, *layouts = nullptr, *forward_ad = nullptr, *observers = nullptr, *grad_enabled = nullptr,
             *inference_enabled = nullptr, *is_neg = nullptr, *is_inference = nullptr, *empty_like = nullptr,
             *empty = nullptr, *increment_version = nullptr, *num_threads = nullptr, *dtype_keyword = nullptr, *requires_grad = nullptr, *current_level = nullptr;

    // Get a view of a tensor. Returns false unless it is plain: a torch.Tensor on the CPU whose memory has its values.
    bool view(PyObject *object, TensorView &out) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == tensor_type && memory_of(object, out);
    }
    // The same for a tensor or a parameter.
    bool weight_view(PyObject *object, TensorView &out) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == parameter_type ? memory_of(object, out) : view(object, out);
    }
    bool memory_of(PyObject *object, TensorView &out) const {
        if (api->view_of(object, &out) != 0) return PyErr_Clear(), false;
        return out.on_cpu() && out.data && !is_true(is_neg, object);
    }
    // Returns whether a predicate, of a tensor or without arguments, is true. If it raises, the result is true, and the call is
    // left to Python.
    static bool is_true(PyObject *predicate, PyObject *of = nullptr) {
        return truth(of ? call(predicate, of) : PyObject_CallNoArgs(predicate));
    }
    bool requires_gradient(PyObject *tensor) const { return truth(PyObject_GetAttr(tensor, requires_grad)); }
    // Returns whether a transform, a mode, a tracer or a profiler must see the operators inside. If `profiled` is true, the
    // profiler already records this call and is not asked. It is the last of the observers.
    bool is_observed(bool profiled = false) const {
        for (Py_ssize_t i = 0; i < PyTuple_Size(observers) - (profiled ? 1 : 0); ++i) {
            if (is_true(PyTuple_GetItem(observers, i))) return true;
        }
        PyObject *level = PyObject_GetAttr(forward_ad, current_level);
        bool differentiates = !level || PyLong_AsLong(level) != -1;
        Py_XDECREF(level), PyErr_Clear();
        return differentiates;
    }

private:
    static bool truth(PyObject *result) {
        int is = result ? PyObject_IsTrue(result) : 1;
        Py_XDECREF(result), PyErr_Clear();
        return is != 0;
    }
};

// The number of bytes from the first to the last element along some of the axes. The bits of `which` select batch, token, head and
// channel.
inline int64_t extent(const TensorView &x, const int (&at)[4], int which, int64_t size) {
    int64_t last = 0;
    for (int i = 0; i < 4; ++i) {
        if (which >> i & 1 && at[i] >= 0) last += (x.shape[at[i]] - 1) * x.strides[at[i]];
    }
    return (last + 1) * size;
}

// Returns whether two tensors certainly share no element: their address ranges are disjoint, or they are slices of one fused
// projection that are adjacent in every token or in every row of the batch. False means that this quick test cannot exclude it.
inline bool certainly_disjoint(const TensorView &q, const TensorView &k, const int (&at)[4], int64_t size) {
    const TensorView &low = q.first() <= k.first() ? q : k, &high = q.first() <= k.first() ? k : q;
    const int64_t between = high.first() - low.first();
    if (between >= extent(low, at, 15, size)) return true;
    for (int outer : {3, 1}) {  // batch and tokens, or the batch alone, as the axes along which the slices repeat
        int64_t strides[2], counts[2];
        int n = 0;
        bool alike = true;
        for (int i = 0; i < 2; ++i) {
            if (!(outer >> i & 1) || at[i] < 0 || low.shape[at[i]] == 1) continue;
            alike = alike && low.strides[at[i]] == high.strides[at[i]];
            strides[n] = low.strides[at[i]] * size, counts[n] = low.shape[at[i]], ++n;
        }
        if (!alike || n == 0) continue;
        const int inner = n == 2 && strides[1] < strides[0] ? 1 : 0;
        // Elements with different outer indices are at least the smaller stride apart, and both slices fit into that stride.
        if (n == 2 && strides[1 - inner] < strides[inner] * counts[inner]) continue;
        if (between >= extent(low, at, 15 & ~outer, size) && between + extent(high, at, 15 & ~outer, size) <= strides[inner]) {
            return true;
        }
    }
    return false;
}

}  // namespace ropewalk
