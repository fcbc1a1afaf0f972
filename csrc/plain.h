// Recognize calls that compiled code can run without Python: calls with plain PyTorch tensors on the CPU whose sizes match, while
// nothing observes the operators. The Python code handles every other call or raises an error. Nothing here raises.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>

#include "exchange.h"
#include "ropewalk.h"

namespace ropewalk {

namespace nb = nanobind;

// The same as PyObject_CallOneArg, which is not in the stable ABI.
inline PyObject *call(PyObject *function, PyObject *argument) {
    PyObject *arguments[] = {nullptr, argument};  // the free place is for the self of a bound method
    return PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// An attribute of tensors. Reading it looks up no name.
struct Attribute {
    PyObject *descriptor = nullptr;
    descrgetfunc get = nullptr;

    void find(PyObject *type, const char *name) {
        descriptor = PyObject_GetAttrString(type, name);
        get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
    }
    PyObject *of(PyObject *tensor) const { return get(descriptor, tensor, reinterpret_cast<PyObject *>(Py_TYPE(tensor))); }
};

// The functions and attributes of torch that each call uses. `use_torch` looks them up once.
struct Torch {
    const ExchangeAPI *api = nullptr;
    PyObject *tensor_type = nullptr, *parameter_type = nullptr, *forward_ad = nullptr, *observers = nullptr, *grad_enabled = nullptr,
             *inference_enabled = nullptr, *is_neg = nullptr, *empty_like = nullptr, *empty = nullptr,
             *increment_version = nullptr, *num_threads = nullptr, *dtype_keyword = nullptr, *float32 = nullptr,
             *current_level = nullptr;
    Attribute requires_grad, version;

    // Get a view of a tensor. Returns false unless it is plain: a torch.Tensor on the CPU whose memory has its values.
    bool view(PyObject *object, TensorView &out) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == tensor_type && values_of(object, out);
    }
    // The same for a tensor or a parameter.
    bool weight_view(PyObject *object, TensorView &out) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == parameter_type ? values_of(object, out) : view(object, out);
    }
    // The same for a tensor that PyTorch has just created, so that it has no flag that negates its values.
    bool new_view(PyObject *object, TensorView &out) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == tensor_type && memory_of(object, out);
    }
    bool values_of(PyObject *object, TensorView &out) const { return memory_of(object, out) && !is_true(is_neg, object); }
    bool memory_of(PyObject *object, TensorView &out) const {
        if (api->view_of(object, &out) != 0) return PyErr_Clear(), false;
        return out.on_cpu() && out.data;
    }
    // Returns whether a predicate, of a tensor or without arguments, is true. If it raises, the result is true, and the call is
    // left to Python.
    static bool is_true(PyObject *predicate, PyObject *of = nullptr) {
        return truth(of ? call(predicate, of) : PyObject_CallNoArgs(predicate));
    }
    bool requires_gradient(PyObject *tensor) const { return truth(requires_grad.of(tensor)); }
    // Returns whether autograd counts the changes of a tensor, which it does unless inference mode has created the tensor.
    bool counts_changes(PyObject *tensor) const {
        PyObject *count = version.of(tensor);
        if (!count) return PyErr_Clear(), false;
        Py_DECREF(count);
        return true;
    }
    // Returns whether a transform, a mode, a tracer or a profiler must see the operators inside. If `profiled` is true, the
    // profiler already records this call and is not asked. It is the last of the observers.
    bool is_observed(bool profiled = false) const {
        for (Py_ssize_t i = PyTuple_Size(observers) - (profiled ? 2 : 1); i >= 0; --i) {
            if (is_true(PyTuple_GetItem(observers, i))) return true;
        }
        PyObject *level = PyObject_GetAttr(forward_ad, current_level);
        const bool outside = level && PyLong_AsLong(level) == -1 && !PyErr_Occurred();
        Py_XDECREF(level);
        return outside ? false : (PyErr_Clear(), true);
    }

private:
    static bool truth(PyObject *result) {
        if (!result) return PyErr_Clear(), true;
        const int is = PyObject_IsTrue(result);
        Py_DECREF(result);
        return is < 0 ? PyErr_Clear(), true : is != 0;
    }
};

// Sort the axes of a tensor by stride, the largest first. It must have at most four.
inline void sort_axes(const TensorView &x, int *order) {
    for (int i = 0; i < x.axes; ++i) {
        int at = i;
        for (; at > 0 && x.strides[order[at - 1]] < x.strides[i]; --at) order[at] = order[at - 1];
        order[at] = i;
    }
}

// Returns whether the strides of a tensor are nested: a step along an axis is longer than all axes of smaller strides together. Then
// no two elements share memory. False means that this quick test cannot exclude it.
inline bool is_nested(const TensorView &x) {
    int order[4];
    if (x.axes > 4) return false;
    sort_axes(x, order);
    int64_t reach = 0;
    for (int n = x.axes - 1; n >= 0; --n) {
        const int64_t stride = x.strides[order[n]], steps = x.shape[order[n]];
        if (steps == 1) continue;
        if (stride <= reach) return false;
        reach += (steps - 1) * stride;
    }
    return true;
}

// Returns whether two tensors certainly share no element: their address ranges are disjoint, or they are slices of one tensor that
// lie side by side in each step along its outer axes, such as q and k of a fused projection, or keys and values of one pool. False
// means that this quick test cannot exclude it.
inline bool certainly_disjoint(const TensorView &a, const TensorView &b) {
    const TensorView &low = a.first() <= b.first() ? a : b, &high = a.first() <= b.first() ? b : a;
    const int64_t between = high.first() - low.first(), size = low.element_size();
    // The bytes from the first element to the end of the last, along all axes that are not outer axes yet.
    int64_t of_low = size, of_high = size;
    for (int i = 0; i < low.axes; ++i) of_low += (low.shape[i] - 1) * low.strides[i] * size;
    for (int i = 0; i < high.axes; ++i) of_high += (high.shape[i] - 1) * high.strides[i] * size;
    if (between >= of_low) return true;
    if (low.axes != high.axes || low.axes > 4 || size != high.element_size()) return false;
    int order[4];
    sort_axes(low, order);
    int64_t above = INT64_MAX;  // the stride of the previous outer axis
    for (int n = 0; n < low.axes; ++n) {
        const int axis = order[n];
        const int64_t stride = low.strides[axis], steps = std::max(low.shape[axis], high.shape[axis]);
        if (steps == 1) continue;
        // Elements with different outer indices are at least the smallest outer stride apart.
        if (stride != high.strides[axis] || stride * steps > above) return false;
        above = stride;
        of_low -= (low.shape[axis] - 1) * stride * size, of_high -= (high.shape[axis] - 1) * stride * size;
        if (between >= of_low && between + of_high <= stride * size) return true;  // both fit into one step
    }
    return false;
}

}  // namespace ropewalk
