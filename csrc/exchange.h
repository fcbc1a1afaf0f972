// Read the address, shape and strides of a PyTorch tensor without calls into Python, through the C exchange API of DLPack. The
// binary interface of this API is the same in all versions of PyTorch that have it (2.10 and later). Source: DLPack 1.3, dlpack.h.
#pragma once

#include <Python.h>

#include <cstdint>

namespace ropewalk {

// DLTensor: a view of the elements. The tensor owns shape and strides, which count elements.
struct TensorView {
    void *data;
    int32_t device_type, device_id;
    int32_t axes;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;

    bool on_cpu() const { return device_type == 1; }
    char *first() const { return static_cast<char *>(data) + byte_offset; }
    int64_t elements() const {
        int64_t n = 1;
        for (int i = 0; i < axes; ++i) n *= shape[i];
        return n;
    }
    int64_t element_size() const { return dtype_bits / 8; }
    bool is_float(int bits) const { return dtype_code == 2 && dtype_bits == bits && dtype_lanes == 1; }
    bool is_bfloat() const { return dtype_code == 4 && dtype_bits == 16 && dtype_lanes == 1; }
    bool is_e4m3fn() const { return dtype_code == 10 && dtype_bits == 8 && dtype_lanes == 1; }
    bool is_int(int bits) const { return dtype_code == 0 && dtype_bits == bits && dtype_lanes == 1; }
};

// DLPackExchangeAPI, up to the last member that is used.
struct ExchangeAPI {
    uint32_t major, minor;
    ExchangeAPI *previous;
    void *allocate, *managed_from_object, *object_from_managed;
    int (*view_of)(void *object, TensorView *out);
    void *work_stream;
};

// The API of a type, or null if it has none of this major version.
inline const ExchangeAPI *exchange_api_of(PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void *found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
    Py_XDECREF(capsule);
    PyErr_Clear();
    auto *api = static_cast<const ExchangeAPI *>(found);
    while (api && api->major != 1) api = api->previous;
    return api && api->view_of ? api : nullptr;
}

}  // namespace ropewalk
