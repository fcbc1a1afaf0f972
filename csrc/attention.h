// Attention of a few new tokens over the keys and values of a cache, with the online softmax of FlashAttention (Dao et al.,
// https://arxiv.org/abs/2205.14135). Each key and value is read once, for all query heads that share it, and nothing is gathered.
//
// The visible keys of all rows, in chunks, are one sequence, of which each part (a thread) processes an equal share. So a long
// row is divided, and rows of different lengths cost no balance. A part has its own maximum, sum and weighted values of each row
// that it reads from; `combine` adds them up.
#pragma once

#include <math.h>

#include "vector.h"

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

#ifdef ROPEWALK_VECTORS

// Keys per chunk. While a chunk is processed, the keys and values of the next one are fetched into the second-level cache: those
// of all heads, which are often adjacent in memory, so that memory is read in its order.
constexpr int64_t KEYS = 32;
constexpr int SECOND_LEVEL = 2;

constexpr int LANE = WIDTH<F32>;
using Floats = Reals<F32>;

// Call use(0), ..., use(N - 1) with constants, so that arrays of vectors stay in registers.
#define ROPEWALK_INLINE __attribute__((always_inline))
template <int I>
struct Constant {
    constexpr operator int() const { return I; }
};
template <class Use, int... I>
ROPEWALK_INLINE inline void repeat(const Use &use, Indices<I...>) {
    (use(Constant<I>()), ...);
}
template <int N, class Use>
ROPEWALK_INLINE inline void repeat(const Use &use) {
    repeat(use, typename Count<N>::type());
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return bits<Floats>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(__FMA__)
    return bits<Floats>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#else
    return a * b + c;
#endif
}

// 2^x for x <= 0 with a relative error of 2e-7; 0 below 2^-126. NaN stays NaN.
inline Floats power_of_2(Floats x) {
    Floats above = x < -126.0f ? Floats{} - 126.0f : x;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats whole = (above + ROUND) - ROUND, part = above - whole;
    // The Taylor series of 2^part, which is in [-1/2, 1/2].
    constexpr float TERMS[] = {1.0f, 0.69314718f, 0.24022651f, 0.055504109f, 0.0096181291f, 0.0013333558f, 0.00015403530f};
    Floats sum = Floats{} + TERMS[6];
    ROPEWALK_UNROLL
    for (int i = 5; i >= 0; --i) sum = multiply_add(sum, part, Floats{} + TERMS[i]);
    auto exponent = __builtin_convertvector(whole, Vector<int32_t, LANE>) << 23;
    Floats power = bits<Floats>(bits<Vector<int32_t, LANE>>(sum) + exponent);
    return x < -126.0f ? Floats{} : power;
}

// Add neighbouring elements of two vectors, until the first vector has the sum of each of 2 * LEFT vectors.
template <int LEFT>
ROPEWALK_INLINE inline void add_elements(Floats *sums) {
    repeat<LEFT>([&](auto i) ROPEWALK_INLINE {
        Floats even, odd;
        split(sums[2 * i], sums[2 * i + 1], even, odd, Places<F32>());
        sums[i] = even + odd;
    });
    if constexpr (LEFT > 1) add_elements<LEFT / 2>(sums);
}

// Combine all elements of a vector, two halves at a time.
template <class V, class Combine>
ROPEWALK_INLINE inline float across(V x, const Combine &combine) {
    if constexpr (sizeof x == 16) {
        return combine(combine(x[0], x[1]), combine(x[2], x[3]));
    } else {
        Vector<float, int(sizeof x) / 8> halves[2];
        std::memcpy(halves, &x, sizeof x);
        return across(combine(halves[0], halves[1]), combine);
    }
}

// The channels of a head of a key or a value as vectors of float32, COUNT vectors at a time. Those of bfloat16 are in another order:
// first the even ones, then the odd ones.
template <class T>
struct Channels {
    static constexpr int COUNT = T::is_bfloat || sizeof(typename T::Stored) == 1 ? 2 : 1, STEP = COUNT * LANE;

    // STEP channels, or the last ones of a head, fewer than STEP, followed by zeros.
    static void read_channels(const typename T::Stored *from, Floats *to) {
        if constexpr (T::is_bfloat) {
            auto both = read<Neighbours<T>>(from);
            to[0] = first_of<T>(both), to[1] = second_of<T>(both);
        } else if constexpr (sizeof(*from) == 1) {
            widen_to_floats(from, to);
        } else {
            for (int i = 0; i < COUNT; ++i) to[i] = load<T>(from + i * LANE);
        }
    }
    static void read_last(const typename T::Stored *from, int64_t count, Floats *to) {
#if defined(__AVX512BW__)
        const auto mask = (uint32_t{1} << count) - 1;  // an instruction reads memory only where its mask is set
        if constexpr (sizeof(*from) == 4) {
            to[0] = bits<Floats>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from));
        } else {
            typename T::Stored buffer[32];
            if constexpr (sizeof(*from) == 1) write(buffer, _mm256_maskz_loadu_epi8(mask, from));
            else write(buffer, _mm512_maskz_loadu_epi16(mask, from));
            read_channels(buffer, to);
        }
#else
        typename T::Stored buffer[STEP] = {};
        std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof *from);
        read_channels(buffer, to);
#endif
    }
};

inline int64_t padded(int64_t channels, int64_t step) { return (channels + step - 1) / step * step; }

inline Floats spread(float x) { return x - Floats{}; }  // a sum with 0 would be computed, because of -0

// Add x[i * I + j * J] * y[j], for all j < count, to the i-th of LANE sums. Each y[j] is a vector.
template <int I, int J>
ROPEWALK_INLINE inline void add_products(const float *x, const float *y, int64_t count, Floats *sums) {
    for (int64_t j = 0; j < count; ++j) {
        const Floats of_y = read<Floats>(y + j * LANE);
        repeat<LANE>([&](auto i) ROPEWALK_INLINE { sums[i] = multiply_add(of_y, spread(x[i * I + j * J]), sums[i]); });
    }
}

// What a part keeps of the queries of one row: for each, the weighted sum of the values, then the maximum score and the sum of
// weights.
struct Sums {
    float *at;
    int64_t step;
    float *values(int64_t query) const { return at + query * step; }
    float &most(int64_t query) const { return at[(query + 1) * step - 2]; }
    float &weights(int64_t query) const { return at[(query + 1) * step - 1]; }
};

// K: the dtype of keys and values.
template <class K>
struct Attention {
    using Stored = typename K::Stored;
    using C = Channels<K>;
    static constexpr bool SCALED = sizeof(Stored) == 1;
    const ropewalk_attention &a;
    int64_t group, queries;          // query heads that share a key head, and queries of a key head
    int64_t in_lanes;                // how many of these are processed LANE at a time, each in a lane of all vectors
    int64_t q_step, sums_step;       // floats of a query, and of its `Sums`
    int64_t sums_size, queries_size; // floats of all queries of a row

    explicit Attention(const ropewalk_attention &args) : a(args) {
        group = a.heads / a.kv_heads, queries = group * a.queries;
        in_lanes = queries / LANE * LANE;
        q_step = padded(a.head_dim, C::STEP), sums_step = padded(a.value_dim, C::STEP) + LANE;
        sums_size = a.heads * a.queries * sums_step, queries_size = a.heads * a.queries * q_step;
    }

    // Part p writes the sums of row r to place r + p: the rows of later parts are not earlier, so each place has one writer.
    // A part has memory for the queries of a row, and for the sums of those in lanes.
    int64_t part_size() const { return queries_size * (a.far_q ? 2 : 1) + (in_lanes ? sums_size : 0); }
    int64_t floats() const { return (a.batch + a.parts) * sums_size + a.parts * part_size(); }
    Sums sums(int64_t row, int64_t part) const { return {a.work + (row + part) * sums_size, sums_step}; }

    int64_t order_of(int64_t row, int64_t token) const { return a.order[row * a.order_stride[0] + token * a.order_stride[1]]; }

    static int64_t chunks_of(int64_t keys) { return (keys + KEYS - 1) / KEYS; }

    // The keys that the tokens of a row attend to: the first `sinks`, and [first, end). The least and the largest order of tokens.
    struct Row {
        int64_t sinks, first, end, least, most;
        int64_t chunks() const { return chunks_of(sinks) + chunks_of(end - first); }
    };

    Row row_of(int64_t row) const {
        auto larger = [](int64_t x, int64_t y) { return x > y ? x : y; };
        const int64_t most = a.ring ? INT64_MAX : a.keys, keys = a.counts ? smaller(most, a.counts[row]) : most;
        Row r{0, 0, 0, order_of(row, 0), order_of(row, 0)};
        for (int64_t i = 1; i < a.queries; ++i) {
            r.least = smaller(r.least, order_of(row, i)), r.most = larger(r.most, order_of(row, i));
        }
        r.sinks = r.first = larger(0, smaller(smaller(a.sinks, keys), r.most + 1));
        if (a.window) r.first = larger(r.first, r.least - a.window + 1);
        r.end = larger(r.first, smaller(keys, r.most + 1));
        return r;
    }

    int64_t total_chunks() const {
        int64_t total = 0;
        for (int64_t row = 0; row < a.batch; ++row) total += row_of(row).chunks();
        return total;
    }

    struct Chunk {
        int64_t count, first, key[KEYS], value[KEYS];  // first: its first key; key, value: distances in elements
        int64_t key_scale[KEYS], value_scale[KEYS];
        bool hides, are_sinks;                         // hides: some query does not attend to some key
    };

    bool attends(int64_t query_order, const Chunk &chunk, int64_t key) const {
        const int64_t distance = query_order - chunk.first - key;
        return distance >= 0 && (chunk.are_sinks || !a.window || distance < a.window);
    }

    // Describe a chunk of the keys of a row. Those of sinks come first: other queries belong to them.
    void describe(int64_t row, const Row &r, int64_t number, Chunk &chunk) const {
        const int64_t of_sinks = chunks_of(r.sinks);
        chunk.are_sinks = number < of_sinks;
        int64_t at = chunk.are_sinks ? number * KEYS : r.first + (number - of_sinks) * KEYS;
        chunk.first = at;
        chunk.count = smaller(KEYS, (chunk.are_sinks ? r.sinks : r.end) - at);
        const int64_t front = a.keys - a.ring;  // with a ring, the slots in front of it
        int64_t in_row = a.ring && at > front ? front + (at - front) % a.ring : at;
        for (int64_t n = 0; n < chunk.count; ++n, ++at, in_row = a.ring && in_row + 1 == a.keys ? front : in_row + 1) {
            int64_t block = a.blocks ? a.blocks[row * a.block_stride + at / a.block_size] : row;
            int64_t slot = a.blocks ? at % a.block_size : in_row;
            chunk.key[n] = block * a.key_stride[0] + slot * a.key_stride[1];
            chunk.value[n] = block * a.value_stride[0] + slot * a.value_stride[1];
            if constexpr (SCALED) {
                chunk.key_scale[n] = block * a.key_scale_stride[0] + slot * a.key_scale_stride[1];
                chunk.value_scale[n] = block * a.value_scale_stride[0] + slot * a.value_scale_stride[1];
            }
        }
        int64_t last = chunk.first + chunk.count - 1;
        chunk.hides = last > r.least || (!chunk.are_sinks && a.window && r.most - chunk.first >= a.window);
    }

    // Call use with the dtype of queries and results.
    template <class Use>
    void with_dtype(const Use &use) const {
        if constexpr (!SCALED) {
            use(K());
        } else if (a.dtype == ROPEWALK_F32) {
            use(F32());
        } else {
            a.dtype == ROPEWALK_BF16 ? use(BF16()) : use(F16());
        }
    }

    // Convert the queries of a row, [kv head, query of it], times `factor`, to the order of channels of keys. LANE queries in lanes
    // have the order [channel, query].
    template <class T>
    void convert_queries(const void *from, const int64_t *stride, int64_t row, float factor, float *to) const {
        for (int64_t head = 0; head < a.heads; ++head) {
            for (int64_t token = 0; token < a.queries; ++token, to += q_step) {
                const int64_t of_head = head % group * a.queries + token, lane = of_head % LANE;
                const auto *x = static_cast<const typename T::Stored *>(from) + row * stride[0] + token * stride[1] + head * stride[2];
                for (int64_t c = 0; c < q_step; c += C::STEP) {
                    typename T::Stored buffer[C::STEP] = {};
                    const int64_t count = smaller<int64_t>(C::STEP, a.head_dim - c);
                    if (stride[3] == 1) std::memcpy(buffer, x + c, static_cast<size_t>(count) * sizeof *x);
                    else for (int64_t i = 0; i < count; ++i) buffer[i] = x[(c + i) * stride[3]];
                    Floats parts[C::COUNT];
                    for (int i = 0; i < C::COUNT; ++i) parts[i] = load<T>(buffer + i * LANE);
                    if constexpr (K::is_bfloat) split(parts[0], parts[1], parts[0], parts[1], Places<F32>());
                    float scaled[C::STEP];
                    for (int i = 0; i < C::COUNT; ++i) write(scaled + i * LANE, parts[i] * factor);
                    if (of_head >= in_lanes) std::memcpy(to + c, scaled, sizeof scaled);
                    else for (int i = 0; i < C::STEP; ++i) to[(c + i) * LANE - lane * (q_step - 1)] = scaled[i];
                }
            }
        }
    }

    static bool begins_line(int64_t channel) { return channel * int64_t{sizeof(Stored)} % 64 == 0; }

    // The scores of ROWS queries, [ROWS, KEYS].
    template <int ROWS>
    ROPEWALK_NOINLINE void score(const float *q, const Stored *keys, const Chunk &chunk, const Chunk &next, float *to) const {
        constexpr int AT_ONCE = LANE / ROWS;
        const int64_t full = a.head_dim / C::STEP * C::STEP;
        for (int64_t first = 0; first < chunk.count; first += AT_ONCE) {
            Floats sums[LANE] = {};
            const Stored *k[AT_ONCE], *ahead[AT_ONCE];
            for (int n = 0; n < AT_ONCE; ++n) k[n] = keys + chunk.key[smaller<int64_t>(first + n, chunk.count - 1)];
            for (int n = 0; n < AT_ONCE; ++n) ahead[n] = keys + next.key[smaller<int64_t>(first + n, chunk.count - 1)];
            auto add_products = [&](auto n, int64_t c, const Floats *x) ROPEWALK_INLINE {
                repeat<C::COUNT * ROWS>([&](auto i) ROPEWALK_INLINE {
                    constexpr int part = i / ROWS, r = i % ROWS;
                    Floats of_q = read<Floats>(q + r * q_step + c + part * LANE);
                    sums[r * AT_ONCE + n] = multiply_add(of_q, x[part], sums[r * AT_ONCE + n]);
                });
            };
            for (int64_t c = 0; c < full; c += C::STEP) {
                if (begins_line(c)) {
                    repeat<AT_ONCE>([&](auto n) ROPEWALK_INLINE { __builtin_prefetch(ahead[n] + c, 0, SECOND_LEVEL); });
                }
                repeat<AT_ONCE>([&](auto n) ROPEWALK_INLINE {
                    Floats x[C::COUNT];
                    C::read_channels(k[n] + c, x);
                    add_products(n, c, x);
                });
            }
            if (full < a.head_dim) {
                repeat<AT_ONCE>([&](auto n) ROPEWALK_INLINE {
                    Floats x[C::COUNT];
                    C::read_last(k[n] + full, a.head_dim - full, x);
                    add_products(n, full, x);
                });
            }
            add_elements<LANE / 2>(sums);
            float all[LANE];
            write(all, sums[0]);
            for (int r = 0; r < ROWS; ++r) std::memcpy(to + r * KEYS + first, all + r * AT_ONCE, AT_ONCE * sizeof(float));
        }
    }

    // Replace the scores of one query, in powers of 2, by weights. Returns the factor of what was summed up before.
    float weigh(float *scores, int64_t count, float &most, float &weights) const {
        constexpr float LEAST = -INFINITY;
        for (int64_t n = count; n < padded(count, LANE); ++n) scores[n] = LEAST;
        auto larger = [](auto x, auto y) ROPEWALK_INLINE { return x > y ? x : y; };
        Floats largest = read<Floats>(scores);
        for (int64_t n = LANE; n < count; n += LANE) largest = larger(read<Floats>(scores + n), largest);
        const float now = larger(across(largest, larger), most);
        const float base = now == LEAST ? 0 : now;  // nothing visible yet: all weights are 0
        Floats sum{};
        for (int64_t n = 0; n < count; n += LANE) {
            Floats x = power_of_2(read<Floats>(scores + n) - base);
            write(scores + n, x), sum += x;
        }
        const float total = across(sum, [](auto x, auto y) ROPEWALK_INLINE { return x + y; });
        const float factor = now == most ? 1 : power_of_2(Floats{} + (most - base))[0];
        most = now, weights = weights * factor + total;
        return factor;
    }

    // Add the weighted values, N times STEP channels of ROWS queries.
    template <int ROWS, int N, bool last>
    ROPEWALK_NOINLINE void add_values(const float *weights, const float *factors, const Stored *values, const Chunk &chunk,
                                      const Chunk &next, int64_t channel, const Sums &sums, int64_t query) const {
        constexpr int VECTORS = N * C::COUNT;
        Floats sum[ROWS][VECTORS];
        ROPEWALK_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            ROPEWALK_UNROLL
            for (int i = 0; i < VECTORS; ++i) sum[r][i] = read<Floats>(sums.values(query + r) + channel + i * LANE) * factors[r];
        }
        for (int64_t n = 0; n < chunk.count; ++n) {
            Floats x[VECTORS];
            const Stored *v = values + chunk.value[n] + channel;
            ROPEWALK_UNROLL
            for (int i = 0; i < N; ++i) {
                if (last) {
                    C::read_last(v, a.value_dim - channel, x);
                } else {
                    if (begins_line(channel + i * C::STEP)) {
                        __builtin_prefetch(values + next.value[n] + channel + i * C::STEP, 0, SECOND_LEVEL);
                    }
                    C::read_channels(v + i * C::STEP, x + i * C::COUNT);
                }
            }
            ROPEWALK_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                Floats weight = spread(weights[r * KEYS + n]);
                ROPEWALK_UNROLL
                for (int i = 0; i < VECTORS; ++i) sum[r][i] = multiply_add(weight, x[i], sum[r][i]);
            }
        }
        ROPEWALK_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            ROPEWALK_UNROLL
            for (int i = 0; i < VECTORS; ++i) write(sums.values(query + r) + channel + i * LANE, sum[r][i]);
        }
    }

    static void read_scales(const float *from, const int64_t *distances, int64_t count, float *to) {
        for (int64_t n = 0; n < count; ++n) to[n] = from[distances[n]] * K::unit;
        for (int64_t n = count; n < padded(count, LANE); ++n) to[n] = 0;
    }
    static void multiply(float *x, const float *factors, int64_t count) {
        for (int64_t n = 0; n < count; n += LANE) write(x + n, read<Floats>(x + n) * read<Floats>(factors + n));
    }

    // Process the keys of a chunk for ROWS queries of one key head. `query` is the first of them in the row.
    template <int ROWS>
    void attend_rows(const float *q, const Chunk &chunk, const Chunk &next, int64_t row, int64_t head, int64_t query, const Sums &sums) const {
        const Stored *keys = static_cast<const Stored *>(a.key) + head * a.key_stride[2];
        const Stored *values = static_cast<const Stored *>(a.value) + head * a.value_stride[2];
        float scores[ROWS * KEYS], factors[ROWS], key_scales[KEYS], value_scales[KEYS];
        score<ROWS>(q, keys, chunk, next, scores);
        if constexpr (SCALED) {
            read_scales(a.key_scale + head * a.key_scale_stride[2], chunk.key_scale, chunk.count, key_scales);
            read_scales(a.value_scale + head * a.value_scale_stride[2], chunk.value_scale, chunk.count, value_scales);
        }
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (SCALED) multiply(scores + r * KEYS, key_scales, chunk.count);
            if (chunk.hides) {
                int64_t order = order_of(row, (query + r) % a.queries);
                for (int64_t n = 0; n < chunk.count; ++n) {
                    if (!attends(order, chunk, n)) scores[r * KEYS + n] = -INFINITY;
                }
            }
            factors[r] = weigh(scores + r * KEYS, chunk.count, sums.most(query + r), sums.weights(query + r));
            if constexpr (SCALED) multiply(scores + r * KEYS, value_scales, chunk.count);
        }
        constexpr int MOST = (ROWS >= 4 ? 16 / ROWS : 8) / C::COUNT;
        int64_t c = 0;
        for (; c + MOST * C::STEP <= a.value_dim; c += MOST * C::STEP) {
            add_values<ROWS, MOST, false>(scores, factors, values, chunk, next, c, sums, query);
        }
        for (; c + C::STEP <= a.value_dim; c += C::STEP) add_values<ROWS, 1, false>(scores, factors, values, chunk, next, c, sums, query);
        if (c < a.value_dim) add_values<ROWS, 1, true>(scores, factors, values, chunk, next, c, sums, query);
    }

    // ---- LANE queries of a key head, one in each lane, so that each number of a key or a value is multiplied with a vector.
    // While some channels are multiplied, the next ones are widened.

    // Fetches keys or values of the next chunk, one after the other: the processor's own prefetching continues what is in order.
    struct Ahead {
        const Stored *rows[KEYS];
        int64_t channels, row = 0, channel = 0;
        ROPEWALK_INLINE void fetch() {
            if (begins_line(channel)) __builtin_prefetch(rows[row] + channel, 0, SECOND_LEVEL);
            if ((channel += C::STEP) >= channels) channel = 0, ++row;
        }
    };

    // Widen STEP channels of a key or a value.
    static ROPEWALK_INLINE void widen(const Stored *from, int64_t channel, int64_t left, float *to) {
        Floats x[C::COUNT];
        left >= C::STEP ? C::read_channels(from + channel, x) : C::read_last(from + channel, left, x);
        for (int i = 0; i < C::COUNT; ++i) write(to + i * LANE, x[i]);
    }

    // The scores, [KEYS, LANE].
    ROPEWALK_NOINLINE void score_lanes(const float *q, const Stored *keys, const Chunk &chunk, const Chunk &next, float *to) const {
        alignas(64) float x[2][LANE * C::STEP];
        const Stored *k[LANE];
        const int64_t count = chunk.count, channels = a.head_dim;
        for (int64_t first = 0; first < count; first += LANE) {
            Ahead ahead{{}, channels};
            for (int n = 0; n < LANE; ++n) {
                const int64_t i = smaller<int64_t>(first + n, count - 1);
                k[n] = keys + chunk.key[i], ahead.rows[n] = keys + next.key[i];
                widen(k[n], 0, channels, x[0] + n * C::STEP);
            }
            Floats sums[LANE] = {};
            int now = 0;
            for (int64_t c = 0; c < channels; c += C::STEP, now = 1 - now) {
                const int64_t left = channels - c - C::STEP;
                for (int64_t n = 0; n < LANE; ++n) {
                    ahead.fetch();
                    if (left > 0) widen(k[n], c + C::STEP, left, x[1 - now] + n * C::STEP);
                    add_products<C::STEP, 1>(x[now] + n * C::COUNT, q + (c + n * C::COUNT) * LANE, C::COUNT, sums);
                }
            }
            repeat<LANE>([&](auto i) ROPEWALK_INLINE { write(to + (first + i) * LANE, sums[i]); });
        }
    }

    // Replace scores by weights, as `weigh` does for one query.
    static Floats weigh_lanes(float *scores, int64_t count, float *most, float *weights) {
        const Floats before = read<Floats>(weights) > 0.0f ? read<Floats>(most) : Floats{} - INFINITY;  // at first, all sums are 0
        Floats now = before, sum{};
        for (int64_t n = 0; n < count; ++n) now = read<Floats>(scores + n * LANE) > now ? read<Floats>(scores + n * LANE) : now;
        const Floats base = now == -INFINITY ? Floats{} : now;
        for (int64_t n = 0; n < count; ++n) {
            Floats x = power_of_2(read<Floats>(scores + n * LANE) - base);
            write(scores + n * LANE, x), sum += x;
        }
        const Floats factor = now == before ? Floats{} + 1 : power_of_2(before - base);
        write(most, now), write(weights, read<Floats>(weights) * factor + sum);
        return factor;
    }

    // `sums` are those of these queries, [floats of `Sums`, LANE].
    void attend_lanes(const float *q, const Chunk &chunk, const Chunk &next, int64_t row, int64_t head, int64_t query, float *sums) const {
        const Stored *keys = static_cast<const Stored *>(a.key) + head * a.key_stride[2];
        const Stored *values = static_cast<const Stored *>(a.value) + head * a.value_stride[2];
        alignas(64) float scores[KEYS * LANE];
        auto multiply_by = [&](const float *scale, int64_t distance, const int64_t *distances) {
            if constexpr (SCALED) {
                float scales[KEYS];
                read_scales(scale + head * distance, distances, chunk.count, scales);
                for (int64_t n = 0; n < chunk.count; ++n) write(scores + n * LANE, read<Floats>(scores + n * LANE) * scales[n]);
            }
        };
        score_lanes(q, keys, chunk, next, scores);
        multiply_by(a.key_scale, a.key_scale_stride[2], chunk.key_scale);
        for (int64_t i = 0; chunk.hides && i < LANE; ++i) {
            const int64_t order = order_of(row, (query + i) % a.queries);
            for (int64_t n = 0; n < chunk.count; ++n) {
                if (!attends(order, chunk, n)) scores[n * LANE + i] = -INFINITY;
            }
        }
        const Floats factor = weigh_lanes(scores, chunk.count, sums + (sums_step - 2) * LANE, sums + (sums_step - 1) * LANE);
        multiply_by(a.value_scale, a.value_scale_stride[2], chunk.value_scale);
        add_values_lanes(scores, factor, values, chunk, next, sums);
    }

    // Add the weighted values.
    ROPEWALK_NOINLINE void add_values_lanes(const float *weights, Floats factor, const Stored *values, const Chunk &chunk, const Chunk &next,
                                            float *sums) const {
        alignas(64) float x[2][KEYS * C::STEP];
        const Stored *v[KEYS];
        const int64_t count = chunk.count, channels = a.value_dim;
        Ahead ahead{{}, channels};
        for (int64_t n = 0; n < count; ++n) {
            v[n] = values + chunk.value[n], ahead.rows[n] = values + next.value[n];
            widen(v[n], 0, channels, x[0] + n * C::STEP);
        }
        int now = 0;
        for (int64_t c = 0; c < channels; c += C::STEP, now = 1 - now) {
            for (int part = 0; part < C::COUNT; ++part, sums += LANE * LANE) {
                const int64_t left = part == 0 ? channels - c - C::STEP : 0;
                Floats sum[LANE];
                repeat<LANE>([&](auto i) ROPEWALK_INLINE { sum[i] = read<Floats>(sums + i * LANE) * factor; });
                for (int64_t n = 0; n < count; ++n) {
                    if (part == 0) ahead.fetch();
                    if (left > 0) widen(v[n], c + C::STEP, left, x[1 - now] + n * C::STEP);
                    add_products<1, C::STEP>(x[now] + n * C::STEP + part * LANE, weights + n * LANE, 1, sum);
                }
                repeat<LANE>([&](auto i) ROPEWALK_INLINE { write(sums + i * LANE, sum[i]); });
            }
        }
    }

    void attend_chunk(const float *q, const Chunk &chunk, const Chunk &next, int64_t row, const Sums &sums, float *of_lanes) const {
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            int64_t query = head * queries, end = query + queries;
            for (; query + LANE <= end; query += LANE) {
                attend_lanes(q + query * q_step, chunk, next, row, head, query, of_lanes + query * sums_step);
            }
            if constexpr (LANE == 16) {
                for (; query + 8 <= end; query += 8) attend_rows<8>(q + query * q_step, chunk, next, row, head, query, sums);
            }
            for (; query + 4 <= end; query += 4) attend_rows<4>(q + query * q_step, chunk, next, row, head, query, sums);
            if (query + 2 <= end) attend_rows<2>(q + query * q_step, chunk, next, row, head, query, sums), query += 2;
            if (query < end) attend_rows<1>(q + query * q_step, chunk, next, row, head, query, sums);
        }
    }

    void attend_part(int64_t part) const {
        const int64_t total = total_chunks(), begin = total * part / a.parts, end = total * (part + 1) / a.parts;
        float *near = a.work + (a.batch + a.parts) * sums_size + part * part_size();
        float *far = a.far_q ? near + queries_size : near, *of_lanes = far + queries_size;
        const float factor = static_cast<float>(a.scale * 1.4426950408889634);  // the weights are powers of 2
        for (int64_t row = 0, before = 0, count; row < a.batch && before < end; ++row, before += count) {
            const Row r = row_of(row);
            count = r.chunks();
            if (before + count <= begin) continue;
            int64_t number = begin > before ? begin - before : 0;
            const int64_t last = smaller(count, end - before);
            with_dtype([&](auto type) {
                using T = decltype(type);
                convert_queries<T>(a.q, a.q_stride, row, factor, near);
                if (a.far_q) convert_queries<T>(a.far_q, a.far_q_stride, row, factor, far);
            });
            Sums to = sums(row, part);
            std::memset(to.at, 0, static_cast<size_t>(sums_size) * sizeof(float));
            for (int64_t i = 0; i < a.heads * a.queries; ++i) to.most(i) = -INFINITY;
            if (in_lanes) std::memset(of_lanes, 0, static_cast<size_t>(sums_size) * sizeof(float));
            Chunk pair[2];
            if (number < last) describe(row, r, number, pair[0]);
            for (int n = 0; number < last; n = 1 - n) {
                const Chunk &chunk = pair[n];
                Chunk &next = pair[1 - n];
                next.count = 0;
                if (++number < last) describe(row, r, number, next);
                for (int64_t i = next.count; i < chunk.count; ++i) next.key[i] = chunk.key[i], next.value[i] = chunk.value[i];
                attend_chunk(chunk.are_sinks ? far : near, chunk, next, row, to, of_lanes);
            }
            for (int64_t query = 0; query < a.heads * a.queries; ++query) {
                const int64_t of_head = query % queries, lane = of_head % LANE;
                const float *from = of_lanes + (query - lane) * sums_step + lane;
                for (int64_t i = 0; of_head < in_lanes && i < sums_step; ++i) to.values(query)[i] = from[i * LANE];
            }
        }
    }

    // Add up what the parts have of a row, and divide by the sum of the weights.
    template <class T>
    void combine_row(int64_t row, int64_t first_part, int64_t last_part) const {
        for (int64_t query = 0; query < a.heads * a.queries; ++query) {
            auto *out = static_cast<typename T::Stored *>(a.out) + row * a.out_stride[0] + query % a.queries * a.out_stride[1] +
                        query / a.queries * a.out_stride[2];
            float most = -INFINITY, total = 0;
            for (int64_t part = first_part; part <= last_part; ++part) {
                float of_part = sums(row, part).most(query);
                most = of_part > most ? of_part : most;
            }
            for (int64_t part = first_part; part <= last_part; ++part) {
                Sums from = sums(row, part);
                float factor = from.most(query) == most ? 1 : power_of_2(Floats{} + (from.most(query) - most))[0];
                total += factor * from.weights(query);
                from.weights(query) = factor;  // from here on
            }
            const float inverse = total == 0 ? 0 : 1 / total;
            for (int64_t c = 0; c < a.value_dim; c += C::STEP) {
                Floats sum[C::COUNT] = {};
                for (int64_t part = first_part; part <= last_part; ++part) {
                    Sums from = sums(row, part);
                    for (int i = 0; i < C::COUNT; ++i) {
                        sum[i] += read<Floats>(from.values(query) + c + i * LANE) * from.weights(query);
                    }
                }
                for (int i = 0; i < C::COUNT; ++i) sum[i] *= inverse;
                if constexpr (K::is_bfloat) interleave(sum[0], sum[1], sum[0], sum[1], Places<F32>());
                typename T::Stored buffer[C::STEP];
                bool whole = c + C::STEP <= a.value_dim;
                for (int i = 0; i < C::COUNT; ++i) store<T>((whole ? out + c : buffer) + i * LANE, sum[i]);
                if (!whole) std::memcpy(out + c, buffer, static_cast<size_t>(a.value_dim - c) * sizeof *out);
            }
        }
    }

    void combine(int64_t begin, int64_t end) const {
        const int64_t total = total_chunks();
        auto part_of = [&](int64_t chunk) {  // the part p with total * p / parts <= chunk < total * (p + 1) / parts
            return ((chunk + 1) * a.parts - 1) / total;
        };
        for (int64_t row = 0, before = 0, count; row < end; ++row, before += count) {
            count = row_of(row).chunks();
            if (row < begin) continue;
            with_dtype([&](auto type) {
                using T = decltype(type);
                count ? combine_row<T>(row, part_of(before), part_of(before + count - 1)) : combine_row<T>(row, 0, -1);
            });
        }
    }
};

template <class Use>
void with_attention(const ropewalk_attention *a, const Use &use) {
    switch (a->kept) {
        case ROPEWALK_F32: return use(Attention<F32>(*a));
        case ROPEWALK_BF16: return use(Attention<BF16>(*a));
        case ROPEWALK_F16: return use(Attention<F16>(*a));
        case ROPEWALK_I8: return use(Attention<I8>(*a));
        case ROPEWALK_E4M3: return use(Attention<E4M3>(*a));
        case ROPEWALK_F64: return;
    }
}

int64_t attention_floats(const ropewalk_attention *a) {
    int64_t floats = 0;
    with_attention(a, [&](const auto &attention) { floats = attention.floats(); });
    return floats;
}

void attend(const ropewalk_attention *a, int64_t begin, int64_t end) {
    with_attention(a, [&](const auto &attention) {
        for (int64_t part = begin; part < end; ++part) attention.attend_part(part);
    });
}

void combine(const ropewalk_attention *a, int64_t begin, int64_t end) {
    with_attention(a, [&](const auto &attention) { attention.combine(begin, end); });
}
#endif  // ROPEWALK_VECTORS

}  // namespace
}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
