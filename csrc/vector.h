// The vector operations that the kernels need, for each dtype, in the instruction set that the file is compiled for.
// Compilers without vector extensions (MSVC, GCC before 12) compile the kernels as plain loops. So do compilers for big-endian
// processors, where the first of two bfloat16 numbers is in the upper half of 32 bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "ropewalk.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ROPEWALK_VECTORS
#endif

#if defined(__GNUC__)
#define ROPEWALK_NOINLINE __attribute__((noinline))
#else
#define ROPEWALK_NOINLINE
#endif
// Small loops over registers, which GCC unrolls at -O2 only on request.
#if defined(__GNUC__) && !defined(__clang__)
#define ROPEWALK_UNROLL _Pragma("GCC unroll 32")
#else
#define ROPEWALK_UNROLL
#endif

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

template <class T>
inline T smaller(T a, T b) {
    return a < b ? a : b;
}

#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int BYTES = 32, REGISTERS = 16;
#else
constexpr int BYTES = 16, REGISTERS = 16;
#endif

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The dtype of an element: Stored is its type in memory, Real its type in computations, and `bytes` the size of a vector of Reals.

struct F32 {
    static constexpr bool is_bfloat = false;
    static constexpr int bytes = BYTES;
    using Stored = float;
    using Real = float;
    static float get(float x) { return x; }
    static float put(float x) { return x; }
};

struct F64 {
    static constexpr bool is_bfloat = false;
    static constexpr int bytes = BYTES;
    using Stored = double;
    using Real = double;
    static double get(double x) { return x; }
    static double put(double x) { return x; }
};

struct BF16 {
    static constexpr bool is_bfloat = true;
    static constexpr int bytes = BYTES;
    using Stored = uint16_t;
    using Real = float;
    static float get(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
    // Round to nearest, ties to even; nan stays nan.
    static uint16_t put(float x) {
        uint32_t u = bits<uint32_t>(x);
        return x != x ? uint16_t(u >> 16 | 0x40) : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
};

struct F16 {
    static constexpr bool is_bfloat = false;
    static constexpr int bytes = BYTES;
    using Stored = uint16_t;
    using Real = float;
    static float get(uint16_t x) {
        uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
        if (rest >= 0x7c00) return bits<float>(sign | 0x7f800000 | rest << 13);
        // Multiplying by 2^112 corrects the exponent, also of subnormal numbers.
        return bits<float>(sign | bits<uint32_t>(bits<float>(rest << 13) * 0x1p112f));
    }
    static uint16_t put(float x) {
        uint32_t u = bits<uint32_t>(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
        if (rest > 0x7f800000) return uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff));  // nan
        if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);                        // rounds to infinity
        if (rest < 0x38800000) {
            // Subnormal: adding 0.5 moves the number into the last bits, and the addition rounds it.
            return uint16_t(sign | (bits<uint32_t>(bits<float>(rest) + 0.5f) - 0x3f000000));
        }
        return uint16_t(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
    }
};

// Numbers of 8 bits, which are loaded as a multiple of `unit`. `round` returns the codes of numbers up to `largest` in the lowest bits
// of 32; Words and Reals are an integer and a float, or vectors of them.

struct I8 {
    static constexpr bool is_bfloat = false;
    static constexpr int bytes = BYTES;
    using Stored = int8_t;
    using Real = float;
    static constexpr float unit = 1, largest = 127;

    template <class Words, class Reals>
    static Words round(Reals x) {
        return bits<Words>(x + 0x1.8p23f);  // whose last bit is 1
    }
    static uint32_t put(float x) { return round<uint32_t>(x); }
    static uint64_t put(double x) { return bits<uint64_t>(x + 0x1.8p52); }
};

struct E4M3 {
    static constexpr bool is_bfloat = false;
    static constexpr int bytes = BYTES;
    using Stored = uint8_t;
    using Real = float;
    static constexpr float unit = 0x1p8f, largest = 448;

    template <class Words, class Reals>
    static Words round(Reals x) {
        Words u = bits<Words>(x), size = u & 0x7fffffff;
        Words normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 960;  // 960: the difference of the exponents
        Words subnormal = bits<Words>(bits<Reals>(size) + 0x1p14f) - bits<uint32_t>(0x1p14f);  // whose last bit is 2^-9
        Words code = size < bits<uint32_t>(0x1p-6f) ? subnormal : normal;
        return (code < 0x7f ? code : Words{} + 0x7f) | (u >> 24 & 0x80);  // 0x7f: nan
    }
    static uint32_t put(float x) { return round<uint32_t>(x); }
    static uint32_t put(double x) { return put(static_cast<float>(x)); }
};

#ifdef ROPEWALK_VECTORS

template <class T, int N>
using Vector __attribute__((vector_size(N * sizeof(T)))) = T;

// The same dtype in vectors of half the size.
template <class T>
struct Half : T {
    static constexpr int bytes = T::bytes / 2;
};

template <class T>
constexpr int WIDTH = T::bytes / int(sizeof(typename T::Real));

// A vector of the type in which a dtype is computed.
template <class T>
using Reals = Vector<typename T::Real, WIDTH<T>>;

template <class V, class T>
inline V read(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void write(T *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// Write a whole vector; if `past_caches`, with a non-temporal store, for outputs too large to stay in a cache. `to` must then be
// aligned to the size of the vector.
template <bool past_caches, class T, class V>
inline void put(T *to, V v) {
#if defined(__AVX512F__)
    if constexpr (past_caches && sizeof v == 64) return _mm512_stream_si512(reinterpret_cast<__m512i *>(to), bits<__m512i>(v));
#endif
#if defined(__AVX2__)
    if constexpr (past_caches && sizeof v == 32) return _mm256_stream_si256(reinterpret_cast<__m256i *>(to), bits<__m256i>(v));
#endif
    write(to, v);
}

template <bool past_caches, class T>
inline void copy(T *to, const T *from, int64_t count) {
    constexpr int N = BYTES / int(sizeof(T));
    int64_t i = 0;
    for (; i + N <= count; i += N) put<past_caches>(to + i, read<Vector<T, N>>(from + i));
    if (i < count) std::memcpy(to + i, from + i, static_cast<size_t>(count - i) * sizeof *to);
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    using type = Indices<I...>;
};
template <class T>
using Places = typename Count<WIDTH<T>>::type;

// Split two vectors into their even and odd elements.
template <class V, int... I>
inline void split(V x, V y, V &even, V &odd, Indices<I...>) {
    even = __builtin_shufflevector(x, y, (2 * I)...);
    odd = __builtin_shufflevector(x, y, (2 * I + 1)...);
}

// Exchange neighbouring elements.
template <class V, int... I>
inline V swap_neighbours(V x, Indices<I...>) {
    return __builtin_shufflevector(x, x, (I ^ 1)...);
}

// Interleave two vectors to (x0, y0, x1, y1, ...): their first halves into one vector, their second halves into another.
template <class V, int... I>
inline void interleave(V x, V y, V &first, V &second, Indices<I...>) {
    constexpr int n = sizeof...(I);
    first = __builtin_shufflevector(x, y, (I / 2 + n * (I % 2))...);
    second = __builtin_shufflevector(x, y, ((I + n) / 2 + n * (I % 2))...);
}

// Conversion from 16 to 32 bits and back. GCC compiles the general form to more than one instruction.
constexpr int WORDS = BYTES / 4;

inline Vector<uint32_t, WORDS> widen(const uint16_t *from) {
#if defined(__AVX512F__)
    return bits<Vector<uint32_t, WORDS>>(_mm512_maskz_cvtepu16_epi32(0xffff, read<__m256i>(from)));
#elif defined(__AVX2__)
    return bits<Vector<uint32_t, WORDS>>(_mm256_cvtepu16_epi32(read<__m128i>(from)));
#else
    return __builtin_convertvector(read<Vector<uint16_t, WORDS>>(from), Vector<uint32_t, WORDS>);
#endif
}

template <bool past_caches>
inline void store_narrowed(uint16_t *to, Vector<uint32_t, WORDS> x) {
#if defined(__AVX512F__)
    put<past_caches>(to, _mm512_maskz_cvtepi32_epi16(0xffff, bits<__m512i>(x)));
#else
    put<past_caches>(to, __builtin_convertvector(x, Vector<uint16_t, WORDS>));
#endif
}

// The lowest bytes of 32 bits.
inline void store_bytes(void *to, Vector<uint32_t, WORDS> x) {
#if defined(__AVX512F__)
    write(to, _mm512_maskz_cvtepi32_epi8(0xffff, bits<__m512i>(x)));
#else
    write(to, __builtin_convertvector(x, Vector<uint8_t, WORDS>));
#endif
}

// Conversion from 8 bits to two vectors of float32.

inline void widen_to_floats(const int8_t *from, Vector<float, WORDS> *to) {
    for (int i = 0; i < 2; ++i, from += WORDS) {
#if defined(__AVX512F__)
        auto wide = bits<Vector<int32_t, WORDS>>(_mm512_maskz_cvtepi8_epi32(0xffff, read<__m128i>(from)));
#elif defined(__AVX2__)
        auto wide = bits<Vector<int32_t, WORDS>>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(from))));
#else
        auto wide = __builtin_convertvector(read<Vector<int8_t, WORDS>>(from), Vector<int32_t, WORDS>);
#endif
        to[i] = __builtin_convertvector(wide, Vector<float, WORDS>);
    }
}

// float8_e4m3fn, divided by E4M3::unit: a sign, 4 bits of the exponent and 3 of the fraction, and nan if all of these are 1.
inline void widen_to_floats(const uint8_t *from, Vector<float, WORDS> *to) {
#if defined(__F16C__)
    // The number divided by `unit` is a float16 number with the same bits. Bit 14 must be 0, and 1 for nan, the only number from which
    // the addition carries. It is a copy of the sign, which xor with itself, and with the carry, corrects.
#if defined(__AVX512BW__)
    auto words = bits<Vector<uint16_t, 2 * WORDS>>(_mm512_maskz_cvtepi8_epi16(0xffffffff, read<__m256i>(from)));
#else
    auto words = bits<Vector<uint16_t, 2 * WORDS>>(_mm256_cvtepi8_epi16(read<__m128i>(from)));
#endif
    words <<= 7;
    words ^= (words + 0x80) & 0x4000;
    Vector<uint16_t, WORDS> halves[2];
    std::memcpy(halves, &words, sizeof words);
    for (int i = 0; i < 2; ++i) {
#if defined(__AVX512F__)
        to[i] = bits<Vector<float, WORDS>>(_mm512_maskz_cvtph_ps(0xffff, bits<__m256i>(halves[i])));
#else
        to[i] = bits<Vector<float, WORDS>>(_mm256_cvtph_ps(bits<__m128i>(halves[i])));
#endif
    }
#else
    // Multiplying by 2^112 corrects the exponent, also of subnormal numbers.
    for (int i = 0; i < 2; ++i, from += WORDS) {
        auto u = __builtin_convertvector(read<Vector<uint8_t, WORDS>>(from), Vector<uint32_t, WORDS>);
        auto rest = bits<Vector<uint32_t, WORDS>>(bits<Vector<float, WORDS>>((u & 0x7f) << 20) * 0x1p112f);
        to[i] = bits<Vector<float, WORDS>>(((u & 0x7f) == 0x7f ? rest | 0x7fc00000 : rest) | (u & 0x80) << 24);
    }
#endif
}

// Load and store a whole vector of elements, for each dtype.

template <class T>
inline Reals<T> load(const typename T::Stored *from) {
    if constexpr (sizeof(typename T::Stored) == sizeof(typename T::Real)) {
        return read<Reals<T>>(from);
    } else if constexpr (T::is_bfloat) {
        return bits<Reals<T>>(widen(from) << 16);
#if defined(__AVX512F__)
    } else if constexpr (T::bytes == 64) {
        return bits<Reals<T>>(_mm512_maskz_cvtph_ps(0xffff, read<__m256i>(from)));
#endif
#if defined(__F16C__)
    } else if constexpr (T::bytes == 32) {
        return bits<Reals<T>>(_mm256_cvtph_ps(read<__m128i>(from)));
    } else if constexpr (T::bytes == 16) {
        return bits<Reals<T>>(_mm_cvtph_ps(_mm_cvtsi64_si128(read<int64_t>(from))));
#endif
    } else {
        Reals<T> v;
        for (int i = 0; i < WIDTH<T>; ++i) v[i] = T::get(from[i]);
        return v;
    }
}

// Round to bfloat16 numbers, which are in the upper halves of the results.
template <class T>
inline Vector<uint32_t, WIDTH<T>> round_to_bfloat16(Reals<T> x) {
    auto u = bits<Vector<uint32_t, WIDTH<T>>>(x);
    auto nearest = u + 0x7fff + (u >> 16 & 1);
    return x != x ? (u | 0x400000) : nearest;
}

template <class T, bool past_caches = false>
inline void store(typename T::Stored *to, Reals<T> x) {
    if constexpr (sizeof(typename T::Stored) == sizeof(typename T::Real)) {
        put<past_caches>(to, x);
    } else if constexpr (T::is_bfloat) {
#if defined(__AVX512BF16__)
        put<past_caches>(to, _mm512_cvtneps_pbh(bits<__m512>(x)));
#else
        store_narrowed<past_caches>(to, round_to_bfloat16<T>(x) >> 16);
#endif
#if defined(__AVX512F__)
    } else if constexpr (T::bytes == 64) {
        put<past_caches>(to, _mm512_maskz_cvtps_ph(0xffff, bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
    } else if constexpr (T::bytes == 32) {
        put<past_caches>(to, _mm256_cvtps_ph(bits<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (T::bytes == 16) {
        put<past_caches>(to, _mm_cvtsi128_si64(_mm_cvtps_ph(bits<__m128>(x), _MM_FROUND_TO_NEAREST_INT)));
#endif
    } else {
        for (int i = 0; i < WIDTH<T>; ++i) to[i] = T::put(x[i]);
    }
}

// Pairs of neighbouring bfloat16 numbers: two in each 32 bits, the first in the lower half.

template <class T>
using Neighbours = Vector<uint32_t, WIDTH<T>>;

template <class T>
inline Reals<T> first_of(Neighbours<T> both) {
    return bits<Reals<T>>(both << 16);
}

template <class T>
inline Reals<T> second_of(Neighbours<T> both) {
    return bits<Reals<T>>(both & 0xffff0000);
}

#if defined(__AVX512BF16__)
inline auto to_bfloat16(__m512 low, __m512 high) { return _mm512_cvtne2ps_pbh(high, low); }
inline auto to_bfloat16(__m256 low, __m256 high) { return _mm256_cvtne2ps_pbh(high, low); }
inline auto to_bfloat16(__m128 low, __m128 high) { return _mm_cvtne2ps_pbh(high, low); }

template <class V, int... I>
inline V interleave_halves(V x, Indices<I...>) {
    return __builtin_shufflevector(x, x, (I / 2 + int(sizeof...(I)) / 2 * (I % 2))...);
}
#endif

template <class T, bool past_caches>
inline void store_neighbours(uint16_t *to, Reals<T> first, Reals<T> second) {
#if defined(__AVX512BF16__)
    constexpr int N = 2 * WIDTH<T>;
    put<past_caches>(to, interleave_halves(bits<Vector<uint16_t, N>>(to_bfloat16(first, second)), typename Count<N>::type()));
#else
    put<past_caches>(to, round_to_bfloat16<T>(first) >> 16 | (round_to_bfloat16<T>(second) & 0xffff0000));
#endif
}
#else
template <bool, class T>
inline void copy(T *to, const T *from, int64_t count) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}
#endif  // ROPEWALK_VECTORS

}  // namespace
}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
