// Allocate elements of each dtype in memory of exactly their size, and read them as doubles without code of the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "ropewalk.h"

namespace {

uint64_t random_bits() {  // splitmix64
    static uint64_t state = 0;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

constexpr const char *NAMES[] = {"float32", "float64", "bfloat16", "float16", "int8", "float8_e4m3fn"};
constexpr int64_t SIZES[] = {4, 8, 2, 2, 1, 1};
// The error of rounding to a dtype: relative for normal numbers, absolute for subnormal ones. AVX-512's bfloat16 conversion has
// no subnormal numbers.
constexpr double SHARE[] = {0x1p-24, 0x1p-53, 0x1p-8, 0x1p-11}, LEAST[] = {0, 0, 0x1p-126, 0x1p-25};

// Memory for exactly `count` elements, each NaN until it is written. Without elements nothing is allocated, as for an empty torch
// tensor.
struct Memory {
    ropewalk_dtype dtype;
    int64_t count;
    std::unique_ptr<unsigned char[]> bytes;

    Memory(ropewalk_dtype dtype, int64_t count) : dtype(dtype), count(count) {
        if (count == 0) return;
        bytes.reset(new unsigned char[size()]);
        std::memset(bytes.get(), 0xff, size());
    }
    size_t size() const { return static_cast<size_t>(count * SIZES[dtype]); }
    std::vector<unsigned char> copy() const { return {bytes.get(), bytes.get() + size()}; }

    void set_random() {
        for (int64_t i = 0; i < count; ++i) {
            uint64_t r = random_bits();
            if (dtype == ROPEWALK_BF16) set_bits(i, static_cast<uint16_t>((r & 0x807f) | (120 + (r >> 32) % 9) << 7));
            if (dtype == ROPEWALK_F16) set_bits(i, static_cast<uint16_t>((r & 0x83ff) | (8 + (r >> 32) % 9) << 10));
            if (SIZES[dtype] == 1) bytes[i] = static_cast<unsigned char>((r & 0x7f) == 0x7f ? 0 : r);  // no nan
            if (SIZES[dtype] > 2) set(i, static_cast<double>(static_cast<int64_t>(r)) * 0x1p-62);
        }
    }
    void set_bits(int64_t i, uint16_t bits) { std::memcpy(&bytes[2 * i], &bits, 2); }
    void set(int64_t i, double x) {
        float single = static_cast<float>(x);
        dtype == ROPEWALK_F64 ? std::memcpy(&bytes[8 * i], &x, 8) : std::memcpy(&bytes[4 * i], &single, 4);
    }
};

double get(ropewalk_dtype dtype, const unsigned char *from, int64_t i) {
    double x;
    float single;
    uint16_t half;
    switch (dtype) {
        case ROPEWALK_F64: return std::memcpy(&x, from + 8 * i, 8), x;
        case ROPEWALK_F32: return std::memcpy(&single, from + 4 * i, 4), single;
        case ROPEWALK_I8: return static_cast<int8_t>(from[i]);
        case ROPEWALK_E4M3: {
            int exponent = from[i] >> 3 & 15, digits = from[i] & 7;
            x = (from[i] & 127) == 127 ? NAN : exponent ? std::ldexp(digits + 8, exponent - 10) : std::ldexp(digits, -9);
            return from[i] & 128 ? -x : x;
        }
        default: std::memcpy(&half, from + 2 * i, 2);
    }
    if (dtype == ROPEWALK_BF16) {
        uint32_t bits = static_cast<uint32_t>(half) << 16;
        return std::memcpy(&single, &bits, 4), single;
    }
    int exponent = half >> 10 & 31, digits = half & 0x3ff;
    x = exponent == 31 ? (digits ? NAN : INFINITY) : exponent ? std::ldexp(digits + 1024, exponent - 25) : std::ldexp(digits, -24);
    return half & 0x8000 ? -x : x;
}

}  // namespace
