// A head in 8 bits: numbers x / scale, rounded to nearest, where the largest becomes that of the dtype.
#pragma once

#include "vector.h"

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

// The larger of `most` and |x|, for numbers or vectors. nan stays.
template <class Real>
inline Real larger(Real most, Real x) {
    Real size = x < Real{} ? -x : x;
    return (size > most) | (size != size) ? size : most;
}

// Write a head whose channels are adjacent as numbers of K.
template <class T, class K>
ROPEWALK_NOINLINE void quantize_head(const typename T::Stored *x, int64_t channels, typename K::Stored *out, float &scale) {
    using Real = typename T::Real;
    constexpr auto LEAST = static_cast<Real>(0x1p-100);
    Real most = 0;
    int64_t i = 0;
#ifdef ROPEWALK_VECTORS
    Reals<T> of_lanes{};
    for (; i + WIDTH<T> <= channels; i += WIDTH<T>) of_lanes = larger(of_lanes, load<T>(x + i));
    for (int n = 0; n < WIDTH<T>; ++n) most = larger<Real>(most, of_lanes[n]);
#endif
    for (; i < channels; ++i) most = larger<Real>(most, T::get(x[i]));
    most /= K::largest;
    scale = static_cast<float>(most < LEAST ? LEAST : most);
    const Real divisor = scale;
    i = 0;
#ifdef ROPEWALK_VECTORS
    if constexpr (sizeof(Real) == sizeof(float)) {
        using Words = Vector<uint32_t, WIDTH<T>>;
        for (; i + WIDTH<T> <= channels; i += WIDTH<T>) store_bytes(out + i, K::template round<Words>(load<T>(x + i) / divisor));
    }
#endif
    for (; i < channels; ++i) out[i] = static_cast<typename K::Stored>(K::put(T::get(x[i]) / divisor));
}

}  // namespace
}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
