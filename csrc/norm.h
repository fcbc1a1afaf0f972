// RMSNorm of one head: x / sqrt(mean of x^2 + eps), times the weight, rounded to the dtype of x. The squares are added in
// float64, in the same order on every machine: they are padded with zeros to a power of two, and the second half is repeatedly
// added to the first until one number is left.
#pragma once

#include <math.h>

#include "vector.h"

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

// The sum over `count` channels first, first + step, ..., where count is a power of two. In the order above, it is the sum over
// the even places plus the sum over the odd ones.
template <class T>
double sum_of_squares(const typename T::Stored *x, int64_t stride, int64_t channels, int64_t first, int64_t step, int64_t count) {
    if (first >= channels) return 0;
    if (count == 1) {
        auto x_first = static_cast<double>(T::get(x[first * stride]));
        return x_first * x_first;
    }
    return sum_of_squares<T>(x, stride, channels, first, 2 * step, count / 2) +
           sum_of_squares<T>(x, stride, channels, first + step, 2 * step, count / 2);
}

inline int64_t power_of_two(int64_t count) {
    int64_t power = 1;
    while (power < count) power *= 2;
    return power;
}

#ifdef ROPEWALK_VECTORS
// The squares of a vector's elements in float64. Vectors of float32 need two vectors of doubles.
constexpr int LANES = BYTES / 8;
using Doubles = Vector<double, LANES>;

// GCC compiles the general form to more than one instruction.
inline Doubles doubles(Vector<float, LANES> x) {
#if defined(__AVX512F__)
    return bits<Doubles>(_mm512_maskz_cvtps_pd(0xff, bits<__m256>(x)));
#elif defined(__AVX2__)
    return bits<Doubles>(_mm256_cvtps_pd(bits<__m128>(x)));
#else
    return __builtin_convertvector(x, Doubles);
#endif
}

inline void square(Doubles x, Doubles *to) { *to = x * x; }
inline void square(Vector<float, 2 * LANES> x, Doubles *to) {
    Vector<float, LANES> half[2];
    std::memcpy(half, &x, sizeof x);
    square(doubles(half[0]), to), square(doubles(half[1]), to + 1);
}

template <int COUNT>
inline double sum_of_lanes(Vector<double, COUNT> x) {
    if constexpr (COUNT == 2) {
        return x[0] + x[1];
    } else {
        Vector<double, COUNT / 2> half[2];
        std::memcpy(half, &x, sizeof x);
        return sum_of_lanes<COUNT / 2>(half[0] + half[1]);
    }
}

// The sum over CHANNELS channels, a power of two of at least two vectors. The partial sums stay in registers.
template <class T, int CHANNELS>
double sum_of_squares(const typename T::Stored *x) {
    constexpr int HALF = CHANNELS / 2 / LANES, AT_ONCE = WIDTH<T> / LANES;
    Doubles sums[HALF], others[AT_ONCE];
    ROPEWALK_UNROLL
    for (int i = 0; i < HALF; i += AT_ONCE) {
        square(load<T>(x + i * LANES), sums + i), square(load<T>(x + i * LANES + CHANNELS / 2), others);
        for (int j = 0; j < AT_ONCE; ++j) sums[i + j] += others[j];
    }
    ROPEWALK_UNROLL
    for (int half = HALF / 2; half > 0; half /= 2) {
        ROPEWALK_UNROLL
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sum_of_lanes<LANES>(sums[0]);
}

template <class T>
double sum_of_dense_squares(const typename T::Stored *x, int64_t channels) {
    if (channels == 64) return sum_of_squares<T, 64>(x);
    if (channels == 128) return sum_of_squares<T, 128>(x);
    if (channels == 256) return sum_of_squares<T, 256>(x);
    typename T::Stored filled[256] = {};
    if (channels < 256) {
        std::memcpy(filled, x, static_cast<size_t>(channels) * sizeof *x);
        return channels > 128 ? sum_of_squares<T, 256>(filled) : sum_of_squares<T, 128>(filled);
    }
    return sum_of_squares<T>(x, 1, channels, 0, 1, power_of_two(channels));
}
#endif

// The weights of the channels, converted to the dtype of the computation.
template <class T>
struct Gain {
    const void *weight;
    bool as_stored, add_one;  // as_stored: weights have the dtype of the tensors, otherwise that of the computation

    typename T::Real at(int64_t i) const {
        using Real = typename T::Real;
        Real g = as_stored ? T::get(static_cast<const typename T::Stored *>(weight)[i]) : static_cast<const Real *>(weight)[i];
        return add_one ? Real(1) + g : g;
    }
#ifdef ROPEWALK_VECTORS
    Reals<T> vector(int64_t i) const {
        Reals<T> g = as_stored ? load<T>(static_cast<const typename T::Stored *>(weight) + i)
                               : read<Reals<T>>(static_cast<const typename T::Real *>(weight) + i);
        return add_one ? 1 + g : g;
    }
#endif
};

// 1 / sqrt(mean of x^2 + eps) of one head.
template <class T>
typename T::Real scale_of(const typename T::Stored *in, int64_t stride, int64_t channels, double eps) {
#ifdef ROPEWALK_VECTORS
    double sum = stride == 1 ? sum_of_dense_squares<T>(in, channels)
                             : sum_of_squares<T>(in, stride, channels, 0, 1, power_of_two(channels));
#else
    double sum = sum_of_squares<T>(in, stride, channels, 0, 1, power_of_two(channels));
#endif
    return static_cast<typename T::Real>(1 / sqrt(sum * (1 / static_cast<double>(channels)) + eps));
}

template <class T>
void multiply(const typename T::Stored *in, typename T::Stored *out, int64_t in_stride, int64_t out_stride, int64_t channels,
              typename T::Real scale, const Gain<T> &gain) {
    int64_t i = 0;
#ifdef ROPEWALK_VECTORS
    bool dense = in_stride == 1 && out_stride == 1;
    for (; dense && i + WIDTH<T> <= channels; i += WIDTH<T>) store<T>(out + i, load<T>(in + i) * scale * gain.vector(i));
#endif
    for (; i < channels; ++i) out[i * out_stride] = T::put(T::get(in[i * in_stride]) * scale * gain.at(i));
}

}  // namespace
}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
