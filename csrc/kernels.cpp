// The kernels, compiled once for each instruction set. Everything except the table at the end is in the unnamed namespace, and
// nothing of the C++ library is used (memcpy is from C). Otherwise, the linker could replace the baseline's copy of an inline
// function by one compiled for AVX-512.
#include "attention.h"
#include "norm.h"
#include "quantize.h"
#include "vector.h"

#define ROPEWALK_STRING(name) #name
#define ROPEWALK_NAME(name) ROPEWALK_STRING(name)

namespace ropewalk {
namespace ROPEWALK_NAMESPACE {
namespace {

// Tokens per block, whose tables stay in a near cache while all heads are processed.
constexpr int64_t BLOCK = 64;
// Heads per group if the tokens of a head are adjacent in memory.
constexpr int64_t HEADS = 8;
// Pairs per chunk, whose tables fit a buffer on the stack.
constexpr int64_t CHUNK = 512;
// The distance of the prefetch, and the size of the tensors from which on prefetching pays, in bytes.
constexpr int64_t AHEAD = 2048, PREFETCH_FROM = int64_t{4} << 20;

// Make non-temporal stores visible to other threads before any later store.
inline void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// ---- rotation

// The heads of one token. `partner` is the distance from a to b of a pair in half pairing. Steps (between heads) and strides
// (between channels) count elements.
template <class Stored, class Real>
struct Heads {
    const Stored *in;
    Stored *out;
    int64_t in_step, out_step, in_stride, out_stride;
    const Real *cos, *sin;
    int64_t heads, pairs, partner;
    int64_t ahead;  // the distance of the prefetch in elements, or 0
    bool inverse, past_caches;
};
template <class T>
using Run = Heads<typename T::Stored, typename T::Real>;

template <class T, bool interleaved>
ROPEWALK_NOINLINE void rotate_strided(const Run<T> &run) {
    using Real = typename T::Real;
    for (int64_t n = 0; n < run.heads; ++n) {
        const auto *in = run.in + n * run.in_step;
        auto *out = run.out + n * run.out_step;
        for (int64_t i = 0; i < run.pairs; ++i) {
            int64_t at_a = interleaved ? 2 * i : i, at_b = interleaved ? 2 * i + 1 : i + run.partner;
            Real a = T::get(in[at_a * run.in_stride]), b = T::get(in[at_b * run.in_stride]);
            Real c = run.cos[i], s = run.inverse ? -run.sin[i] : run.sin[i];
            out[at_a * run.out_stride] = T::put(a * c - b * s);
            out[at_b * run.out_stride] = T::put(a * s + b * c);
        }
    }
}

#ifdef ROPEWALK_VECTORS
// A block is a few vectors of pairs with their tables, which stay in registers while one head after the other is rotated. `get`
// reads all that `put` needs, so that `out` may be `in`.

template <class T, bool interleaved, bool is_bfloat = T::is_bfloat>
struct Block {  // half pairing: a and b are in separate vectors of WIDTH pairs
    static constexpr int PAIRS = WIDTH<T>, TABLES = 2;
    struct Inputs {
        Reals<T> a, b;
    };
    Reals<T> c, s;

    void load_tables(const typename T::Real *cos, const typename T::Real *sin, bool inverse) {
        c = read<Reals<T>>(cos), s = read<Reals<T>>(sin);
        if (inverse) s = -s;
    }
    static Inputs get(const typename T::Stored *in, int64_t partner) { return {load<T>(in), load<T>(in + partner)}; }
    template <bool past_caches>
    void put(Inputs in, typename T::Stored *out, int64_t partner) const {
        store<T, past_caches>(out, in.a * c - in.b * s), store<T, past_caches>(out + partner, in.a * s + in.b * c);
    }
};

template <class T>
struct Block<T, true, false> {  // interleaved: (a, b, ...) (c, c, ...) + (b, a, ...) (-s, s, ...)
    static constexpr int PAIRS = WIDTH<T>, TABLES = 4;
    struct Inputs {
        Reals<T> x, y;
    };
    Reals<T> c[2], s[2];

    void load_tables(const typename T::Real *cos, const typename T::Real *sin, bool inverse) {
        Reals<T> once = read<Reals<T>>(cos), plus = read<Reals<T>>(sin);
        if (inverse) plus = -plus;
        interleave(once, once, c[0], c[1], Places<T>());
        interleave(-plus, plus, s[0], s[1], Places<T>());
    }
    static Inputs get(const typename T::Stored *in, int64_t) { return {load<T>(in), load<T>(in + WIDTH<T>)}; }
    template <bool past_caches>
    void put(Inputs in, typename T::Stored *out, int64_t) const {
        store<T, past_caches>(out, in.x * c[0] + swap_neighbours(in.x, Places<T>()) * s[0]);
        store<T, past_caches>(out + WIDTH<T>, in.y * c[1] + swap_neighbours(in.y, Places<T>()) * s[1]);
    }
};

template <class T>
struct Block<T, true, true> {
    static constexpr int PAIRS = WIDTH<T>, TABLES = 2;
    using Inputs = Neighbours<T>;
    Reals<T> c, s;

    void load_tables(const float *cos, const float *sin, bool inverse) {
        c = read<Reals<T>>(cos), s = read<Reals<T>>(sin);
        if (inverse) s = -s;
    }
    static Inputs get(const uint16_t *in, int64_t) { return read<Neighbours<T>>(in); }
    template <bool past_caches>
    void put(Inputs in, uint16_t *out, int64_t) const {
        Reals<T> a = first_of<T>(in), b = second_of<T>(in);
        store_neighbours<T, past_caches>(out, a * c - b * s, a * s + b * c);
    }
};

template <class T>
struct Block<T, false, true> {  // the pairs 0, 2, 4, ... and the pairs 1, 3, 5, ...
    static constexpr int PAIRS = 2 * WIDTH<T>, TABLES = 4;
    struct Inputs {
        Neighbours<T> a, b;
    };
    Reals<T> c[2], s[2];

    void load_tables(const float *cos, const float *sin, bool inverse) {
        constexpr int W = WIDTH<T>;
        split(read<Reals<T>>(cos), read<Reals<T>>(cos + W), c[0], c[1], Places<T>());
        split(read<Reals<T>>(sin), read<Reals<T>>(sin + W), s[0], s[1], Places<T>());
        if (inverse) s[0] = -s[0], s[1] = -s[1];
    }
    static Inputs get(const uint16_t *in, int64_t partner) {
        return {read<Neighbours<T>>(in), read<Neighbours<T>>(in + partner)};
    }
    template <bool past_caches>
    void put(Inputs in, uint16_t *out, int64_t partner) const {
        Reals<T> a[] = {first_of<T>(in.a), second_of<T>(in.a)}, b[] = {first_of<T>(in.b), second_of<T>(in.b)};
        store_neighbours<T, past_caches>(out, a[0] * c[0] - b[0] * s[0], a[1] * c[1] - b[1] * s[1]);
        store_neighbours<T, past_caches>(out + partner, a[0] * s[0] + b[0] * c[0], a[1] * s[1] + b[1] * c[1]);
    }
};

// Rotate the blocks I... of every head, from pair `first` on, and with `has_last` the last pairs of the head as a block of `Last`.
// It may include pairs of the block before: they are read before that block is written, and written twice. The folds over I leave
// no loop over the blocks, so that compilers keep the tables in registers.
template <class T, class Last, bool interleaved, bool has_last, bool past_caches, int... I>
ROPEWALK_NOINLINE void rotate_blocks(const Run<T> &run, int64_t first, Indices<I...>) {
    using B = Block<T, interleaved>;
    using L = Block<Last, interleaved>;
    constexpr int CHANNELS = interleaved ? 2 : 1, STEP = CHANNELS * B::PAIRS;
    const int64_t last_pair = run.pairs - L::PAIRS, at_last = CHANNELS * (last_pair - first);
    B blocks[sizeof...(I)];
    L last;
    (blocks[I].load_tables(run.cos + first + I * B::PAIRS, run.sin + first + I * B::PAIRS, run.inverse), ...);
    if constexpr (has_last) last.load_tables(run.cos + last_pair, run.sin + last_pair, run.inverse);
    const auto *in = run.in + CHANNELS * first;
    auto *out = run.out + CHANNELS * first;
    const int64_t in_step = run.in_step, out_step = run.out_step, partner = run.partner, ahead = run.ahead;
    auto prefetch = [&](int64_t channel) {
        __builtin_prefetch(in + ahead + channel);
        if (!interleaved) __builtin_prefetch(in + ahead + channel + partner);
    };
    for (int64_t n = run.heads; n > 0; --n, in += in_step, out += out_step) {
        if (ahead) {
            (prefetch(I * STEP), ...);
            if constexpr (has_last) prefetch(at_last);
        }
        [[maybe_unused]] typename L::Inputs inputs;
        if constexpr (has_last) inputs = L::get(in + at_last, partner);
        (blocks[I].template put<past_caches>(B::get(in + I * STEP, partner), out + I * STEP, partner), ...);
        if constexpr (has_last) last.template put<false>(inputs, out + at_last, partner);
    }
}

// Rotate `count` blocks, at most MOST.
template <class T, class Last, bool interleaved, bool has_last, bool past_caches, int MOST>
void rotate_some(const Run<T> &run, int64_t first, int64_t count) {
    if constexpr (MOST > 1) {
        if (count < MOST) return rotate_some<T, Last, interleaved, has_last, past_caches, MOST - 1>(run, first, count);
    }
    rotate_blocks<T, Last, interleaved, has_last, past_caches>(run, first, typename Count<MOST>::type());
}

// Rotate all pairs of every head: whole blocks, and the rest in the narrowest vectors that hold it. The narrowest have 16 bytes.
template <class T, bool interleaved>
void rotate_dense(const Run<T> &run) {
    using B = Block<T, interleaved>;
    if (run.pairs < B::PAIRS) {
        if constexpr (T::bytes > 16) return rotate_dense<Half<T>, interleaved>(run);
        return rotate_strided<T, interleaved>(run);
    }
    // At most half of the registers hold tables. Heads are processed in as few passes as possible, because the processor recognizes
    // the order of the accesses only if it has no gaps.
    constexpr int MOST = T::bytes < BYTES ? 1 : REGISTERS / 2 / B::TABLES, BESIDE = MOST > 4 ? 4 : MOST > 1 ? MOST - 1 : 1;
    const int64_t rest = run.pairs % B::PAIRS;
    int64_t first = 0, left = run.pairs / B::PAIRS;
    for (int64_t count; left > (rest ? BESIDE : MOST); left -= count, first += count * B::PAIRS) {
        count = smaller<int64_t>(MOST, left - 1);
        run.past_caches ? rotate_some<T, T, interleaved, false, true, MOST>(run, first, count)
                        : rotate_some<T, T, interleaved, false, false, MOST>(run, first, count);
    }
    if (rest) {
        if constexpr (T::bytes > 16) {
            if (2 * rest <= B::PAIRS) return rotate_some<T, Half<T>, interleaved, true, false, BESIDE>(run, first, left);
        }
        return rotate_some<T, T, interleaved, true, false, BESIDE>(run, first, left);
    }
    run.past_caches ? rotate_some<T, T, interleaved, false, true, MOST>(run, first, left)
                    : rotate_some<T, T, interleaved, false, false, MOST>(run, first, left);
}

template <class T, bool interleaved>
void rotate_run(const Run<T> &run) {
    run.in_stride == 1 && run.out_stride == 1 ? rotate_dense<T, interleaved>(run) : rotate_strided<T, interleaved>(run);
}

// Rotate the heads of several tokens whose channels are apart but which are adjacent themselves, so that a vector holds the same
// channel of several tokens. `run` begins at the first token. Return the number of tokens that fill vectors.
template <class T, bool interleaved>
ROPEWALK_NOINLINE int64_t rotate_adjacent_tokens(const Run<T> &run, int64_t tokens, int64_t cos_step, int64_t sin_step) {
    using B = Block<T, false>;
    const int64_t first_to_second = interleaved ? 1 : run.partner, whole = tokens - tokens % B::PAIRS;
    alignas(64) typename T::Real cos[B::PAIRS], sin[B::PAIRS];
    for (int64_t n = 0; n < whole; n += B::PAIRS) {
        for (int64_t i = 0; i < run.pairs; ++i) {
            for (int64_t j = 0; j < B::PAIRS; ++j) cos[j] = run.cos[(n + j) * cos_step + i], sin[j] = run.sin[(n + j) * sin_step + i];
            B block;
            block.load_tables(cos, sin, run.inverse);
            const int64_t channel = interleaved ? 2 * i : i;
            const auto *in = run.in + n + channel * run.in_stride;
            auto *out = run.out + n + channel * run.out_stride;
            for (int64_t head = 0; head < run.heads; ++head, in += run.in_step, out += run.out_step) {
                block.template put<false>(B::get(in, first_to_second * run.in_stride), out, first_to_second * run.out_stride);
            }
        }
    }
    return whole;
}
#else
template <class T, bool interleaved>
void rotate_run(const Run<T> &run) {
    rotate_strided<T, interleaved>(run);
}
template <class T, bool interleaved>
int64_t rotate_adjacent_tokens(const Run<T> &, int64_t, int64_t, int64_t) {
    return 0;
}
#endif

// Copy the channels that are not rotated: those before `first` and from `end` on.
template <class T>
ROPEWALK_NOINLINE void copy_unrotated(const Run<T> &run, int64_t first, int64_t end, int64_t channels) {
    bool dense = run.in_stride == 1 && run.out_stride == 1, adjacent = run.in_step == channels && run.out_step == channels;
    // One long copy is faster than several short ones, although the rotated channels are then written twice: in memory outside of
    // the caches and, inside, for less than half of the channels.
    if (dense && adjacent && !run.past_caches && (run.ahead || 2 * (end - first) < channels)) {
        return copy<false>(run.out, run.in, run.heads * channels);
    }
    for (int64_t n = 0; n < run.heads; ++n) {
        const auto *in = run.in + n * run.in_step;
        auto *out = run.out + n * run.out_step;
        if (run.past_caches) {
            copy<true>(out, in, first), copy<true>(out + end, in + end, channels - end);
        } else if (dense) {
            copy<false>(out, in, first), copy<false>(out + end, in + end, channels - end);
        } else {
            for (int64_t i = 0; i < first; ++i) out[i * run.out_stride] = in[i * run.in_stride];
            for (int64_t i = end; i < channels; ++i) out[i * run.out_stride] = in[i * run.in_stride];
        }
    }
}

// Rotate some tokens and heads of one tensor. If the tokens of a head are adjacent in memory, process a few heads at a time, so
// that memory is read in few streams and each row of the tables is used for several heads.
template <class T, bool interleaved>
void rotate_tensor(const ropewalk_rotation &r, const ropewalk_tensor &x, Run<T> run, int64_t batch, int64_t token, int64_t tokens,
                   int64_t first_head, int64_t end_head, int64_t first_pair) {
    const auto *in = static_cast<const typename T::Stored *>(x.in) + batch * x.in_stride[0] + token * x.in_stride[1];
    auto *out = static_cast<typename T::Stored *>(x.out) + batch * x.out_stride[0] + token * x.out_stride[1];
    run.in_step = x.in_stride[2], run.out_step = x.out_stride[2], run.in_stride = x.in_stride[3], run.out_stride = x.out_stride[3];
    int64_t first = r.offset + (interleaved ? 2 * first_pair : first_pair), end = r.offset + 2 * r.pairs;
    bool copies = in != out && first_pair == 0 && 2 * r.pairs < r.head_dim;
    bool tokens_adjacent = tokens > 1 && x.in_stride[1] < x.in_stride[2];
    // Non-temporal stores need vectors that begin at multiples of their size.
    auto aligned = [](int64_t elements) { return elements * int64_t(sizeof *out) % BYTES == 0; };
    run.past_caches = run.past_caches && !x.through_caches && in != out && run.in_stride == 1 && run.out_stride == 1 &&
                      aligned(run.out_step) && aligned(x.out_stride[1]) && aligned(first) && aligned(run.partner) &&
                      aligned(r.head_dim) && reinterpret_cast<uintptr_t>(out) % BYTES == 0;
    int64_t group = tokens_adjacent ? HEADS : x.heads;
    if (run.ahead) {
        // The processor's own prefetching stops at page boundaries.
        int64_t step = x.in_stride[tokens_adjacent ? 1 : 2], bytes = step * int64_t(sizeof *in);
        run.ahead = bytes > AHEAD ? step : bytes > 0 ? AHEAD / bytes * step : 0;
    }
    const auto *cos = run.cos, *sin = run.sin;
    int64_t cos_step = r.tables.cos_stride[1], sin_step = r.tables.sin_stride[1];
    const bool channels_apart = run.in_stride != 1 && x.in_stride[1] == 1 && x.out_stride[1] == 1;
    for (int64_t head = first_head; head < end_head; head += group) {
        run.heads = smaller(group, end_head - head);
        int64_t done = 0;
        for (int64_t n = 0; n < tokens; ++n) {
            run.in = in + n * x.in_stride[1] + head * run.in_step, run.out = out + n * x.out_stride[1] + head * run.out_step;
            run.cos = cos + n * cos_step, run.sin = sin + n * sin_step;
            if (copies) copy_unrotated<T>(run, r.offset, end, r.head_dim);
            run.in += first * run.in_stride, run.out += first * run.out_stride;
            if (n == 0 && channels_apart) done = rotate_adjacent_tokens<T, interleaved>(run, tokens, cos_step, sin_step);
            if (n >= done) rotate_run<T, interleaved>(run);
        }
    }
}

template <class Real>
void convert(const void *from, ropewalk_dtype dtype, int64_t at, int64_t stride, int64_t count, Real *to) {
    for (int64_t i = 0; i < count; ++i) {
        int64_t place = at + i * stride;
        to[i] = dtype == ROPEWALK_F64 ? Real(static_cast<const double *>(from)[place])
                                      : Real(static_cast<const float *>(from)[place]);
    }
}

template <class T, bool interleaved>
void rotate_rows(const ropewalk_rotation &r, int64_t begin, int64_t end) {
    using Real = typename T::Real;
    const ropewalk_tables &t = r.tables;
    bool direct = t.dtype == (sizeof(Real) == sizeof(double) ? ROPEWALK_F64 : ROPEWALK_F32) && t.cos_stride[3] == 1 &&
                    t.sin_stride[3] == 1;
    int64_t heads = r.tensors[0].heads + (r.tensor_count > 1 ? r.tensors[1].heads : 0);
    int64_t tables = t.cos_stride[2] || t.sin_stride[2] ? r.tensors[0].heads : 1;  // tables of a token: one per head, or one
    int64_t size = r.batch * r.tokens * heads * r.head_dim * int64_t(sizeof(typename T::Stored));
    alignas(64) Real buffer[2][CHUNK];
    Run<T> run;
    run.partner = r.pairs, run.ahead = size >= PREFETCH_FROM, run.inverse = r.inverse, run.past_caches = size >= ROPEWALK_LARGE;
    for (int64_t row = begin, count; row < end; row += count) {
        int64_t batch = row / r.tokens, token = row % r.tokens;
        count = smaller(smaller(end - row, r.tokens - token), direct ? BLOCK : 1);
        int64_t at_cos = batch * t.cos_stride[0] + token * t.cos_stride[1];
        int64_t at_sin = batch * t.sin_stride[0] + token * t.sin_stride[1];
        int64_t pairs = direct ? r.pairs : CHUNK;
        for (int64_t table = 0; table < tables; ++table, at_cos += t.cos_stride[2], at_sin += t.sin_stride[2]) {
            for (int64_t pair = 0; pair < r.pairs; pair += pairs) {
                run.pairs = smaller(pairs, r.pairs - pair);
                if (direct) {
                    run.cos = static_cast<const Real *>(t.cos) + at_cos, run.sin = static_cast<const Real *>(t.sin) + at_sin;
                } else {
                    convert(t.cos, t.dtype, at_cos + pair * t.cos_stride[3], t.cos_stride[3], run.pairs, buffer[0]);
                    convert(t.sin, t.dtype, at_sin + pair * t.sin_stride[3], t.sin_stride[3], run.pairs, buffer[1]);
                    run.cos = buffer[0], run.sin = buffer[1];
                }
                for (int n = 0; n < r.tensor_count; ++n) {
                    int64_t end_head = tables == 1 ? r.tensors[n].heads : table + 1;
                    rotate_tensor<T, interleaved>(r, r.tensors[n], run, batch, token, count, table, end_head, pair);
                }
            }
        }
    }
    if (run.past_caches) fence();
}

template <class T>
void rotate_dtype(const ropewalk_rotation &r, int64_t begin, int64_t end) {
    r.interleaved ? rotate_rows<T, true>(r, begin, end) : rotate_rows<T, false>(r, begin, end);
}

void rotate(const ropewalk_rotation *r, int64_t begin, int64_t end) {
    switch (r->dtype) {
        case ROPEWALK_F32: return rotate_dtype<F32>(*r, begin, end);
        case ROPEWALK_F64: return rotate_dtype<F64>(*r, begin, end);
        case ROPEWALK_BF16: return rotate_dtype<BF16>(*r, begin, end);
        case ROPEWALK_F16: return rotate_dtype<F16>(*r, begin, end);
        default: return;
    }
}

// ---- step: norm, rotation and cache

// Normalize one token of q or k.
template <class T>
void normalize_token(const ropewalk_tensor &x, const ropewalk_step &s, const void *weight, int64_t batch, int64_t token, void *to) {
    using Stored = typename T::Stored;
    const ropewalk_norm &norm = s.norm;
    const Gain<T> gain = {weight, norm.dtype == s.rotation.dtype, norm.add_one != 0};
    const auto *in = static_cast<const Stored *>(x.in) + batch * x.in_stride[0] + token * x.in_stride[1];
    auto *out = static_cast<Stored *>(to);
    // Compute the scales of several heads first, so that the latencies of their roots and divisions overlap.
    typename T::Real scales[2 * HEADS];
    for (int64_t head = 0, count; head < x.heads; head += count) {
        count = smaller(2 * HEADS, x.heads - head);
        for (int64_t i = 0; i < count; ++i) {
            scales[i] = scale_of<T>(in + (head + i) * x.in_stride[2], x.in_stride[3], s.rotation.head_dim, norm.eps);
        }
        for (int64_t i = 0; i < count; ++i) {
            multiply<T>(in + (head + i) * x.in_stride[2], out + (head + i) * x.out_stride[2], x.in_stride[3], x.out_stride[3],
                        s.rotation.head_dim, scales[i], gain);
        }
    }
}

template <class Stored>
void copy_token(const ropewalk_tensor &x, int64_t channels, int64_t batch, int64_t token, void *to) {
    const auto *in = static_cast<const Stored *>(x.in) + batch * x.in_stride[0] + token * x.in_stride[1];
    auto *out = static_cast<Stored *>(to);
    for (int64_t head = 0; head < x.heads; ++head, in += x.in_stride[2], out += x.out_stride[2]) {
        if (x.in_stride[3] == 1 && x.out_stride[3] == 1) {
            std::memcpy(out, in, static_cast<size_t>(channels) * sizeof *in);
        } else {
            for (int64_t i = 0; i < channels; ++i) out[i * x.out_stride[3]] = in[i * x.in_stride[3]];
        }
    }
}

// Write the heads of one token, adjacent at `from`, in 8 bits to a slot of the n-th cache.
template <class T, class K>
void quantize_token(const ropewalk_step &s, int n, int64_t channels, const typename T::Stored *from, int64_t block, int64_t inside) {
    const ropewalk_tensor &x = n == 0 ? s.rotation.tensors[1] : s.v;
    const int64_t *stride = s.scale_stride[n];
    auto *out = static_cast<typename K::Stored *>(x.out) + block * x.out_stride[0] + inside * x.out_stride[1];
    float *scale = s.scale[n] + block * stride[0] + inside * stride[1];
    for (int64_t head = 0; head < x.heads; ++head) {
        quantize_head<T, K>(from + head * channels, channels, out + head * x.out_stride[2], scale[head * stride[2]]);
    }
}

template <class T, bool interleaved>
void step_rows(const ropewalk_step &s, int64_t begin, int64_t end) {
    using Stored = typename T::Stored;
    const ropewalk_rotation &all = s.rotation;
    const bool in_8_bits = s.slots && (s.kept == ROPEWALK_I8 || s.kept == ROPEWALK_E4M3);
    alignas(64) Stored buffer[ROPEWALK_CHANNELS_OF_8_BITS];  // k or v before it is quantized
    for (int64_t row = begin; row < end; ++row) {
        int64_t batch = row / all.tokens, token = row % all.tokens;
        int64_t slot = s.slots ? s.slots[batch * s.slot_stride[0] + token * s.slot_stride[1]] : 0;
        int64_t block = s.slots && slot >= 0 ? slot / s.block_size : 0, inside = slot - block * s.block_size;
        ropewalk_rotation of_token = all;  // the rotation of this token; its tensors begin at this token
        of_token.tensor_count = slot < 0 ? 1 : 2;
        for (int n = 0; n < of_token.tensor_count; ++n) {
            ropewalk_tensor &x = of_token.tensors[n];
            bool stored = s.slots && n == 1;
            void *to = buffer;
            if (stored && in_8_bits) {
                x.out_stride[2] = all.head_dim, x.out_stride[3] = 1, x.through_caches = 1;
            } else {
                to = static_cast<Stored *>(x.out) + (stored ? block : batch) * x.out_stride[0] +
                     (stored ? inside : token) * x.out_stride[1];
            }
            x.out_stride[0] = x.out_stride[1] = 0;
            if (s.norm.weight[n]) {
                normalize_token<T>(x, s, s.norm.weight[n], batch, token, to);
                std::memcpy(x.in_stride, x.out_stride, sizeof x.in_stride), x.in = to;
            }
            x.out = to;
        }
        rotate_rows<T, interleaved>(of_token, row, row + 1);
        if (!s.slots || slot < 0 || !s.v.out) continue;
        if (in_8_bits) {
            auto quantize = s.kept == ROPEWALK_I8 ? quantize_token<T, I8> : quantize_token<T, E4M3>;
            quantize(s, 0, all.head_dim, buffer, block, inside);
            ropewalk_tensor v = s.v;
            v.out_stride[2] = s.v_dim, v.out_stride[3] = 1;
            copy_token<Stored>(v, s.v_dim, batch, token, buffer);
            quantize(s, 1, s.v_dim, buffer, block, inside);
        } else {
            void *to = static_cast<Stored *>(s.v.out) + block * s.v.out_stride[0] + inside * s.v.out_stride[1];
            copy_token<Stored>(s.v, s.v_dim, batch, token, to);
        }
    }
}

template <class T>
void step_dtype(const ropewalk_step &s, int64_t begin, int64_t end) {
    s.rotation.interleaved ? step_rows<T, true>(s, begin, end) : step_rows<T, false>(s, begin, end);
}

void step(const ropewalk_step *s, int64_t begin, int64_t end) {
    switch (s->rotation.dtype) {
        case ROPEWALK_F32: return step_dtype<F32>(*s, begin, end);
        case ROPEWALK_F64: return step_dtype<F64>(*s, begin, end);
        case ROPEWALK_BF16: return step_dtype<BF16>(*s, begin, end);
        case ROPEWALK_F16: return step_dtype<F16>(*s, begin, end);
        default: return;
    }
}

// ---- gradient to the tables
//
// With y = (a c - b s, a s + b c) and the gradient (g, h) of y:  d_cos = g a + h b,  d_sin = h a - g b.

#ifdef ROPEWALK_VECTORS
// The first and the second numbers of the pairs [i, i + WIDTH<T>) of a head, whose channels are adjacent.
template <class T, bool interleaved>
inline void read_pairs(const typename T::Stored *head, int64_t i, int64_t pairs, Reals<T> &first, Reals<T> &second) {
    if constexpr (interleaved) {
        split(load<T>(head + 2 * i), load<T>(head + 2 * i + WIDTH<T>), first, second, Places<T>());
    } else {
        first = load<T>(head + i), second = load<T>(head + i + pairs);
    }
}

// Write the sums of whole vectors of pairs. Returns the first pair that is left.
template <class T, bool interleaved, class Heads>
inline int64_t table_gradient_vectors(const Heads &each_head, int64_t pairs, typename T::Real *d_cos, typename T::Real *d_sin) {
    int64_t i = 0;
    for (; i + WIDTH<T> <= pairs; i += WIDTH<T>) {
        Reals<T> c{}, s{};
        each_head([&](const ropewalk_tensor &, const typename T::Stored *in, const typename T::Stored *out) {
            Reals<T> a, b, g, h;
            read_pairs<T, interleaved>(in, i, pairs, a, b);
            read_pairs<T, interleaved>(out, i, pairs, g, h);
            c += g * a + h * b, s += h * a - g * b;
        });
        write(d_cos + i, c), write(d_sin + i, s);
    }
    return i;
}
#endif

template <class T>
void table_gradient_rows(const ropewalk_table_gradient &gradient, int64_t begin, int64_t end) {
    using Real = typename T::Real;
    using Stored = typename T::Stored;
    const ropewalk_rotation &r = gradient.rotation;
    int64_t tables = gradient.per_head ? r.tensors[0].heads : 1;  // tables of a token: one per head, or one
    for (int64_t row = begin * tables; row < end * tables; ++row) {
        int64_t table = row % tables, token = row / tables % r.tokens, batch = row / tables / r.tokens;
        int64_t place = ((batch * tables + table) * r.tokens + token) * r.pairs, first = 0;
        Real *d_cos = static_cast<Real *>(gradient.d_cos) + place, *d_sin = static_cast<Real *>(gradient.d_sin) + place;
        auto each_head = [&](const auto &use) {
            for (int n = 0; n < r.tensor_count; ++n) {
                const ropewalk_tensor &x = r.tensors[n];
                int64_t end_head = gradient.per_head ? table + 1 : x.heads;
                for (int64_t head = table; head < end_head; ++head) {
                    use(x, static_cast<const Stored *>(x.in) + batch * x.in_stride[0] + token * x.in_stride[1] +
                               head * x.in_stride[2] + r.offset * x.in_stride[3],
                        static_cast<const Stored *>(x.out) + batch * x.out_stride[0] + token * x.out_stride[1] +
                            head * x.out_stride[2] + r.offset * x.out_stride[3]);
                }
            }
        };
#ifdef ROPEWALK_VECTORS
        bool adjacent = true;
        for (int n = 0; n < r.tensor_count; ++n) adjacent &= r.tensors[n].in_stride[3] == 1 && r.tensors[n].out_stride[3] == 1;
        if (adjacent) {
            first = r.interleaved ? table_gradient_vectors<T, true>(each_head, r.pairs, d_cos, d_sin)
                                  : table_gradient_vectors<T, false>(each_head, r.pairs, d_cos, d_sin);
        }
#endif
        for (int64_t i = first; i < r.pairs; ++i) d_cos[i] = d_sin[i] = 0;
        each_head([&](const ropewalk_tensor &x, const Stored *in, const Stored *out) {
            for (int64_t i = first; i < r.pairs; ++i) {
                int64_t at_a = r.interleaved ? 2 * i : i, at_b = r.interleaved ? 2 * i + 1 : i + r.pairs;
                Real a = T::get(in[at_a * x.in_stride[3]]), b = T::get(in[at_b * x.in_stride[3]]);
                Real g = T::get(out[at_a * x.out_stride[3]]), h = T::get(out[at_b * x.out_stride[3]]);
                d_cos[i] += g * a + h * b;
                d_sin[i] += h * a - g * b;
            }
        });
    }
}

void table_gradient(const ropewalk_table_gradient *gradient, int64_t begin, int64_t end) {
    switch (gradient->rotation.dtype) {
        case ROPEWALK_F32: return table_gradient_rows<F32>(*gradient, begin, end);
        case ROPEWALK_F64: return table_gradient_rows<F64>(*gradient, begin, end);
        case ROPEWALK_BF16: return table_gradient_rows<BF16>(*gradient, begin, end);
        case ROPEWALK_F16: return table_gradient_rows<F16>(*gradient, begin, end);
        default: return;
    }
}

// ---- angles
//
// The upper two bits of a phase, rounded to nearest, are its quadrant. The residual t is within an eighth of a turn, in units of
// pi/4. The coefficients of cos(pi/4 t) and (sin(pi/4 t) / t - pi/4) / t^2 in powers of t^2 are Chebyshev fits computed with 50
// digits, with errors of 3e-20 and 1e-17.

constexpr double COS[] = {1.0, -0.30842513753404245296, 0.015854344243815419319, -0.00032599188692673764224,
                          3.5908604460279520345e-6, -2.4611364033652596137e-8, 1.1500512028217341338e-10,
                          -3.858189007341667731e-13};
constexpr double SIN[] = {-0.080745512188280771809, 0.0024903945701920074546, -0.00003657620417386099773,
                          3.1336165354315280849e-7, -1.7571791752800344071e-9, 6.8874821400921976273e-12};
constexpr double QUARTER_PI = 0.78539816339744830962;

template <class V, int N>
inline V polynomial(const double (&coefficients)[N], V u) {
    V sum = u * 0 + coefficients[N - 1];
    for (int i = N - 2; i >= 0; --i) sum = sum * u + coefficients[i];
    return sum;
}

// Real is double or a vector of doubles, and Integer is int64 or a vector of as many. Products that wrap around are Unsigned.
template <class Real, class Integer, class Unsigned, class ToReal>
inline void cos_sin(Unsigned phase, double factor, Real &cos, Real &sin, ToReal to_real) {
    Integer quadrant = (Integer)(phase + (1ull << 61)) >> 62;
    Real t = to_real((Integer)(phase - ((Unsigned)quadrant << 62))) * 0x1p-61;
    Real u = t * t;
    Real c = polynomial(COS, u), s = t * (QUARTER_PI + u * polynomial(SIN, u));
    Integer odd = -(quadrant & 1);
    Integer of_c = bits<Integer>(c), of_s = bits<Integer>(s);
    Integer swap = (of_c ^ of_s) & odd;
    // cos is negative in quadrants 1 and 2, sin in 2 and 3.
    Unsigned minus_cos = (Unsigned)((quadrant + 1) & 2) << 62, minus_sin = (Unsigned)(quadrant & 2) << 62;
    cos = bits<Real>((Unsigned)(of_c ^ swap) ^ minus_cos) * factor;
    sin = bits<Real>((Unsigned)(of_s ^ swap) ^ minus_sin) * factor;
}

// cos and sin of the pairs [first, end) of a row. `position` is one number for all pairs or, if `several`, an array with one
// number per pair from `first` on.
template <class Out, bool several, class Position>
inline void angle_pairs(const ropewalk_angles &args, Position position, int64_t first, int64_t end, Out *cos, Out *sin) {
    int64_t i = first;
#ifdef ROPEWALK_VECTORS
    constexpr int W = BYTES / 8;
    using Doubles = Vector<double, W>;
    using Phases = Vector<uint64_t, W>;
    auto to_doubles = [](Vector<int64_t, W> x) { return __builtin_convertvector(x, Doubles); };
    for (; i + W <= end; i += W) {
        Doubles c, s;
        Phases phase = read<Phases>(args.phase_steps + i);
        if constexpr (several) {
            phase *= read<Phases>(position + (i - first));
        } else {
            phase *= position;
        }
        cos_sin<Doubles, Vector<int64_t, W>>(phase, args.factor, c, s, to_doubles);
        write(cos + i, __builtin_convertvector(c, Vector<Out, W>));
        write(sin + i, __builtin_convertvector(s, Vector<Out, W>));
    }
#endif
    for (; i < end; ++i) {
        double c, s;
        auto phase = static_cast<uint64_t>(args.phase_steps[i]);
        if constexpr (several) {
            phase *= position[i - first];
        } else {
            phase *= position;
        }
        cos_sin<double, int64_t>(phase, args.factor, c, s, [](int64_t x) { return static_cast<double>(x); });
        cos[i] = static_cast<Out>(c), sin[i] = static_cast<Out>(s);
    }
}

template <class Out>
void angle_rows(const ropewalk_angles &args, int64_t begin, int64_t end) {
    uint64_t of_pairs[CHUNK];
    for (int64_t row = begin; row < end; ++row) {
        const int64_t *position = args.positions + row * args.position_stride;
        Out *cos = static_cast<Out *>(args.cos) + row * args.pairs, *sin = static_cast<Out *>(args.sin) + row * args.pairs;
        if (!args.axis) {
            angle_pairs<Out, false>(args, static_cast<uint64_t>(*position), 0, args.pairs, cos, sin);
            continue;
        }
        for (int64_t first = 0, count; first < args.pairs; first += count) {
            count = smaller(CHUNK, args.pairs - first);
            for (int64_t i = 0; i < count; ++i) {
                of_pairs[i] = static_cast<uint64_t>(position[args.axis[first + i] * args.axis_stride]);
            }
            angle_pairs<Out, true>(args, static_cast<const uint64_t *>(of_pairs), first, first + count, cos, sin);
        }
    }
}

void angles(const ropewalk_angles *args, int64_t begin, int64_t end) {
    args->dtype == ROPEWALK_F64 ? angle_rows<double>(*args, begin, end) : angle_rows<float>(*args, begin, end);
}

}  // namespace

extern const ropewalk_kernels kernels;
const ropewalk_kernels kernels = {ROPEWALK_NAME(ROPEWALK_NAMESPACE), rotate, table_gradient, angles, step,
#ifdef ROPEWALK_VECTORS
                                  attention_floats, attend, combine};
#else
                                  nullptr, nullptr, nullptr};
#endif

}  // namespace ROPEWALK_NAMESPACE
}  // namespace ropewalk
