// Compare every kernel of every instruction set that this machine can run with plain loops in double. Memory has exactly the
// size that is needed, so AddressSanitizer detects an access to one element too many. `sanitize` builds and runs this program;
// `harness verbose` names each case.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "memory.h"
#include "ropewalk.h"

namespace {

char now[400];  // describes the current case
bool verbose = false;
long checked = 0;

void check(bool holds, const char *what) {
    ++checked;
    if (holds) return;
    std::printf("%s: %s is wrong\n", now, what);
    std::exit(1);
}

void check_close(double got, double want, double bound, const char *what) {
    bool finite = std::isfinite(want);
    bool holds = std::isnan(want) ? std::isnan(got) : finite ? std::fabs(got - want) <= bound : got == want;
    if (!holds) std::printf("got %.17g, want %.17g\n", got, want);
    check(holds, what);
}

// ---- shapes and strides

struct Shape {
    int64_t batch, tokens, heads[2];
};

// The memory layout of [batch, token, head, channel]: the order of the outer axes, the elements between channels, the unused
// elements after each token, and an axis that is repeated by stride 0.
struct Place {
    const char *name;
    int order[3];
    int64_t channel, gap;
    int repeated;
};
constexpr Place BSHD = {"bshd", {0, 1, 2}, 1, 0, -1}, BHSD = {"bhsd", {0, 2, 1}, 1, 0, -1}, SBHD = {"sbhd", {1, 0, 2}, 1, 0, -1};
constexpr Place SLICED = {"sliced", {0, 1, 2}, 1, 37, -1}, APART = {"channels apart", {0, 1, 2}, 3, 0, -1};
constexpr Place TOKENS = {"tokens adjacent", {0, 2, 1}, 0, 0, -1};
constexpr Place ONE_BATCH = {"one batch", {0, 1, 2}, 1, 0, 0}, ONE_TOKEN = {"one token", {0, 1, 2}, 1, 0, 1};
constexpr Place ONE_HEAD = {"one head", {0, 1, 2}, 1, 0, 2}, ONE_CHANNEL = {"one channel", {0, 1, 2}, 1, 0, 3};

struct Way {
    Place in, out;
    bool in_place;
};
constexpr Way WAYS[] = {
    {BSHD, BSHD, false}, {BHSD, BHSD, false}, {BHSD, BSHD, false}, {SBHD, BHSD, false}, {SLICED, BSHD, false},
    {BSHD, SLICED, false}, {APART, BSHD, false}, {BSHD, APART, false}, {ONE_BATCH, BSHD, false}, {ONE_TOKEN, BSHD, false},
    {ONE_HEAD, BHSD, false}, {ONE_CHANNEL, BSHD, false}, {BSHD, BSHD, true}, {BHSD, BHSD, true}, {SLICED, SLICED, true},
    {APART, APART, true}, {TOKENS, TOKENS, false}, {TOKENS, TOKENS, true},
};

struct Head {
    int64_t dim, pairs, offset;
};
constexpr Head HEADS[] = {{2, 1, 0}, {6, 3, 0}, {16, 8, 0}, {50, 25, 0}, {80, 40, 0}, {96, 48, 0}, {112, 56, 0}, {128, 64, 0}, {256, 128, 0},
                          {512, 256, 0}, {96, 20, 8}, {64, 15, 7}, {1100, 520, 21}};

struct TableKind {
    const char *name;
    ropewalk_dtype dtype;
    bool per_batch, per_head, per_token;
    int64_t cos_step, sin_step, cos_gap, sin_gap;
};
constexpr TableKind KINDS[] = {
    {"plain tables", ROPEWALK_F32, false, false, true, 1, 1, 0, 0},
    {"a table for each batch", ROPEWALK_F32, true, false, true, 1, 1, 0, 0},
    {"float64 tables", ROPEWALK_F64, true, false, true, 1, 1, 0, 0},
    {"one row", ROPEWALK_F32, false, false, false, 1, 1, 0, 0},
    {"one number", ROPEWALK_F32, false, false, false, 0, 0, 0, 0},
    {"rows apart", ROPEWALK_F32, true, false, true, 1, 1, 3, 5},
    {"pairs apart", ROPEWALK_F64, false, false, true, 2, 3, 1, 0},
    {"a table for each head", ROPEWALK_F32, false, true, true, 1, 1, 0, 0},
    {"a table for each batch and head", ROPEWALK_F64, true, true, true, 1, 1, 1, 0},
    {"a row for each head", ROPEWALK_F32, false, true, false, 2, 1, 0, 0},
};
constexpr const TableKind &PER_BATCH = KINDS[1], &PER_HEAD = KINDS[7];

// The number of elements from the first to the last, including gaps.
int64_t extent(const int64_t *sizes, const int64_t *strides, int axes) {
    int64_t count = 1;
    for (int i = 0; i < axes; ++i) {
        if (sizes[i] == 0) return 0;
        count += (sizes[i] - 1) * strides[i];
    }
    return count;
}

Memory placed(ropewalk_dtype dtype, const Place &place, const int64_t *sizes, int64_t *strides) {
    if (place.channel == 0) {  // the tokens of a channel are adjacent
        strides[1] = 1, strides[3] = sizes[1], strides[2] = sizes[3] * strides[3], strides[0] = sizes[2] * strides[2];
        return Memory(dtype, extent(sizes, strides, 4));
    }
    strides[3] = place.channel;
    int64_t next = sizes[3] * place.channel;
    for (int i = 2; i >= 0; --i) {
        if (place.order[i] == 1) next += place.gap;
        strides[place.order[i]] = next, next *= sizes[place.order[i]];
    }
    if (place.repeated >= 0) strides[place.repeated] = 0;
    return Memory(dtype, extent(sizes, strides, 4));
}

Memory placed_table(const TableKind &kind, int64_t step, int64_t gap, const int64_t *sizes, int64_t *strides) {
    int64_t row = sizes[3] * step + gap, rows = kind.per_token ? sizes[1] : 1;
    strides[3] = step, strides[2] = kind.per_head ? rows * row : 0, strides[1] = kind.per_token ? row : 0;
    strides[0] = kind.per_batch ? sizes[2] * rows * row : 0;
    Memory table(kind.dtype, extent(sizes, strides, 4));
    table.set_random();
    return table;
}

int64_t at(const int64_t *strides, int64_t batch, int64_t token, int64_t head, int64_t channel) {
    return batch * strides[0] + token * strides[1] + head * strides[2] + channel * strides[3];
}

int64_t first_of(const ropewalk_rotation &r, int64_t pair) { return r.offset + (r.interleaved ? 2 * pair : pair); }
int64_t second_of(const ropewalk_rotation &r, int64_t pair) { return first_of(r, pair) + (r.interleaved ? 1 : r.pairs); }

// Divide the rows between two calls, as two threads would.
template <class Kernel, class Args>
void call(Kernel kernel, const Args &args, int64_t rows) {
    int64_t cut = rows * 2 / 3;
    kernel(&args, cut, rows);
    kernel(&args, 0, cut);
}

double real_share(ropewalk_dtype dtype) { return dtype == ROPEWALK_F64 ? 0x1p-53 : 0x1p-24; }

// ---- rotate

void check_rotated(const ropewalk_rotation &r, const ropewalk_tensor &x, const std::vector<unsigned char> &in,
                   const std::vector<unsigned char> &before, const Memory &out) {
    const ropewalk_tables &t = r.tables;
    size_t size = static_cast<size_t>(SIZES[r.dtype]);
    std::vector<bool> written(static_cast<size_t>(out.count));
    auto same = [&](const std::vector<unsigned char> &bytes, int64_t i, int64_t of_out, const char *what) {
        check(!std::memcmp(&bytes[static_cast<size_t>(i) * size], &out.bytes[static_cast<size_t>(of_out) * size], size), what);
    };
    for (int64_t row = 0; row < r.batch * r.tokens * x.heads; ++row) {
        int64_t head = row % x.heads, token = row / x.heads % r.tokens, batch = row / x.heads / r.tokens;
        for (int64_t i = 0; i < r.head_dim; ++i) {
            int64_t to = at(x.out_stride, batch, token, head, i);
            written[static_cast<size_t>(to)] = true;
            if (i >= r.offset && i < r.offset + 2 * r.pairs) continue;
            same(in, at(x.in_stride, batch, token, head, i), to, "an unrotated channel");
        }
        for (int64_t i = 0; i < r.pairs; ++i) {
            double a = get(r.dtype, in.data(), at(x.in_stride, batch, token, head, first_of(r, i)));
            double b = get(r.dtype, in.data(), at(x.in_stride, batch, token, head, second_of(r, i)));
            double c = get(t.dtype, static_cast<const unsigned char *>(t.cos), at(t.cos_stride, batch, token, head, i));
            double s = get(t.dtype, static_cast<const unsigned char *>(t.sin), at(t.sin_stride, batch, token, head, i));
            if (r.inverse) s = -s;
            double want[] = {a * c - b * s, a * s + b * c};
            double sums[] = {std::fabs(a * c) + std::fabs(b * s), std::fabs(a * s) + std::fabs(b * c)};
            int64_t places[] = {first_of(r, i), second_of(r, i)};
            for (int n = 0; n < 2; ++n) {
                // Rounding of the tables, products and sum (in float64, by the kernel and by this loop), then to the dtype.
                double bound = 4 * real_share(r.dtype) * sums[n] + SHARE[r.dtype] * std::fabs(want[n]) + LEAST[r.dtype];
                double got = get(r.dtype, out.bytes.get(), at(x.out_stride, batch, token, head, places[n]));
                check_close(got, want[n], bound, "a rotated channel");
            }
        }
    }
    for (int64_t i = 0; i < out.count; ++i) {
        if (!written[static_cast<size_t>(i)]) same(before, i, i, "memory between the channels");
    }
}

// The arguments that the kernels over tensors have in common.
struct Tensors {
    std::vector<Memory> in, out;  // `out` is empty where in place
    std::vector<std::vector<unsigned char>> in_before, out_before;

    Tensors(ropewalk_rotation &r, const Shape &shape, const Way &way) {
        r.batch = shape.batch, r.tokens = shape.tokens, r.tensor_count = shape.heads[1] ? 2 : 1;
        for (int n = 0; n < r.tensor_count; ++n) {
            ropewalk_tensor &x = r.tensors[n];
            x.heads = shape.heads[n];
            int64_t sizes[] = {r.batch, r.tokens, x.heads, r.head_dim};
            in.push_back(placed(r.dtype, way.in, sizes, x.in_stride));
            in[n].set_random();
            if (way.in_place) {
                std::memcpy(x.out_stride, x.in_stride, sizeof x.in_stride);
            } else {
                out.push_back(placed(r.dtype, way.out, sizes, x.out_stride));
            }
            x.in = in[n].bytes.get(), x.out = output(n).bytes.get();
        }
    }
    Memory &output(int n) { return out.empty() ? in[n] : out[n]; }
    void remember() {
        for (size_t n = 0; n < in.size(); ++n) {
            in_before.push_back(in[n].copy());
            out_before.push_back(output(static_cast<int>(n)).copy());
        }
    }
};

void test_rotate(const ropewalk_kernels &kernels, ropewalk_rotation r, const Shape &shape, const Way &way, const TableKind &kind) {
    Tensors tensors(r, shape, way);
    tensors.remember();
    int64_t sizes[] = {r.batch, r.tokens, kind.per_head ? shape.heads[0] : 1, r.pairs};
    Memory cos = placed_table(kind, kind.cos_step, kind.cos_gap, sizes, r.tables.cos_stride);
    Memory sin = placed_table(kind, kind.sin_step, kind.sin_gap, sizes, r.tables.sin_stride);
    r.tables.cos = cos.bytes.get(), r.tables.sin = sin.bytes.get(), r.tables.dtype = kind.dtype;
    call(kernels.rotate, r, r.batch * r.tokens);
    for (int n = 0; n < r.tensor_count; ++n) {
        if (!way.in_place) check(tensors.in[n].copy() == tensors.in_before[n], "the input, which must not change,");
        check_rotated(r, r.tensors[n], tensors.in_before[n], tensors.out_before[n], tensors.output(n));
    }
}

// All numbers of the 16-bit dtypes, including infinity and nan.
void test_every_16_bits(const ropewalk_kernels &kernels, ropewalk_rotation r) {
    r.batch = r.tokens = r.tensor_count = 1, r.head_dim = 512, r.pairs = 256;
    Memory in(r.dtype, 65536), out(r.dtype, 65536);
    for (int i = 0; i < 65536; ++i) in.set_bits(i, static_cast<uint16_t>(i));
    r.tensors[0] = {in.bytes.get(), out.bytes.get(), 128, {0, 0, 512, 1}, {0, 0, 512, 1}, 0};
    for (float c : {1.0f, 1 / 3.0f}) {
        float s = 1 - c;
        r.tables = {&c, &s, ROPEWALK_F32, {0, 0, 0, 0}, {0, 0, 0, 0}};
        call(kernels.rotate, r, 1);
        check_rotated(r, r.tensors[0], in.copy(), out.copy(), out);
    }
}

// ---- step

// The norm of one head in double, and the error that the kernel may have before it rotates.
std::vector<double> normed(const ropewalk_step &s, int n, const unsigned char *in, int64_t batch, int64_t token, int64_t head) {
    const ropewalk_rotation &r = s.rotation;
    std::vector<double> x;
    double sum = 0;
    for (int64_t i = 0; i < r.head_dim; ++i) {
        x.push_back(get(r.dtype, in, at(r.tensors[n].in_stride, batch, token, head, i)));
        sum += x.back() * x.back();
    }
    if (!s.norm.weight[n]) return x;
    for (int64_t i = 0; i < r.head_dim; ++i) {
        double gain = get(s.norm.dtype, static_cast<const unsigned char *>(s.norm.weight[n]), i) + (s.norm.add_one ? 1 : 0);
        x[static_cast<size_t>(i)] *= gain / std::sqrt(sum / static_cast<double>(r.head_dim) + s.norm.eps);
    }
    return x;
}

// What a step writes k and v to. In ROWS, there is no v.
enum Store { NOTHING, PLAIN, ROWS, IN_I8, IN_E4M3, STORES };
constexpr const char *STORE_NAMES[] = {"nothing", "caches", "rows", "int8", "float8_e4m3fn"};

void test_step(const ropewalk_kernels &kernels, ropewalk_step s, const Shape &shape, const Place &place, const Place &cache,
               bool per_head, Store store) {
    ropewalk_rotation &r = s.rotation;
    const bool stores = store != NOTHING, in_8_bits = store >= IN_I8;
    const ropewalk_dtype kept = store == IN_I8 ? ROPEWALK_I8 : store == IN_E4M3 ? ROPEWALK_E4M3 : r.dtype;
    // The largest number, and the error of numbers x * scale in 8 bits.
    const double most = store == IN_I8 ? 127 : 448;
    auto quantized = [&](double x, double scale) {
        if (!in_8_bits) return 0.0;
        return store == IN_I8 ? 0.5001 * scale : 1.0001 * std::fmax(std::fabs(x) / 16, scale / 1024);
    };
    Tensors tensors(r, shape, {place, BSHD, false});
    const TableKind &kind = per_head ? PER_HEAD : PER_BATCH;
    int64_t table[] = {r.batch, r.tokens, per_head ? shape.heads[0] : 1, r.pairs};
    Memory cos = placed_table(kind, 1, 0, table, r.tables.cos_stride), sin = placed_table(kind, 1, 0, table, r.tables.sin_stride);
    r.tables.cos = cos.bytes.get(), r.tables.sin = sin.bytes.get(), r.tables.dtype = kind.dtype;
    std::vector<Memory> weights;
    for (int n = 0; n < 2; ++n) {
        weights.emplace_back(s.norm.dtype, r.head_dim);
        weights[static_cast<size_t>(n)].set_random();
    }
    for (size_t n = 0; n < 2; ++n) s.norm.weight[n] = s.norm.eps > 0 ? weights[n].bytes.get() : nullptr;
    // Every third token is not stored. The others are stored in slots from the last one backwards.
    constexpr int64_t BLOCKS = 3;
    int64_t rows = r.batch * r.tokens, heads = shape.heads[1];
    s.block_size = rows / BLOCKS + 1, s.v_dim = r.head_dim + 3;
    std::unique_ptr<int64_t[]> slots(new int64_t[static_cast<size_t>(rows)]);
    for (int64_t i = 0; i < rows; ++i) slots[static_cast<size_t>(i)] = i % 3 == 1 ? -1 : BLOCKS * s.block_size - 1 - i;
    int64_t of_k[] = {BLOCKS, s.block_size, heads, r.head_dim}, of_v[] = {BLOCKS, s.block_size, heads, s.v_dim};
    int64_t v_sizes[] = {r.batch, r.tokens, heads, s.v_dim};
    Memory v = placed(r.dtype, place, v_sizes, s.v.in_stride), v_cache = placed(kept, cache, of_v, s.v.out_stride);
    v.set_random();
    int64_t k_stride[4];
    Memory k_cache = placed(kept, cache, of_k, k_stride);
    // The scales of k and v, in memory one after the other for each head.
    const int64_t of_scales[] = {BLOCKS, s.block_size, heads, 2};
    int64_t scale_stride[4];
    Memory scales = placed(ROPEWALK_F32, cache, of_scales, scale_stride);
    auto scale_of = [&](int64_t slot, int64_t head, int64_t n) {
        int64_t i = at(scale_stride, slot / s.block_size, slot % s.block_size, head, n);
        return in_8_bits ? get(ROPEWALK_F32, scales.bytes.get(), i) : 1;
    };
    if (in_8_bits) {
        s.kept = kept;
        for (int n = 0; n < 2; ++n) {
            s.scale[n] = reinterpret_cast<float *>(scales.bytes.get()) + n;
            std::memcpy(s.scale_stride[n], scale_stride, sizeof s.scale_stride[n]);
        }
    }
    if (stores) {
        s.slots = slots.get(), s.slot_stride[0] = r.tokens, s.slot_stride[1] = 1;
        r.tensors[1].out = k_cache.bytes.get(), std::memcpy(r.tensors[1].out_stride, k_stride, sizeof k_stride);
        if (store != ROWS) s.v.in = v.bytes.get(), s.v.out = v_cache.bytes.get(), s.v.heads = heads;
    }
    tensors.remember();
    auto k_before = k_cache.copy(), v_before = v_cache.copy(), v_given = v.copy(), scales_before = scales.copy();
    call(kernels.step, s, rows);
    check(v.copy() == v_given, "v, which must not change,");
    std::vector<bool> k_written(static_cast<size_t>(k_cache.count)), v_written(static_cast<size_t>(v_cache.count));
    for (int n = 0; n < 2; ++n) {
        const ropewalk_tensor &x = r.tensors[n];
        auto index = static_cast<size_t>(n);
        check(tensors.in[index].copy() == tensors.in_before[index], "the input, which must not change,");
        bool to_cache = stores && n == 1;
        const Memory &out = to_cache ? k_cache : tensors.output(n);
        for (int64_t row = 0; row < rows * x.heads; ++row) {
            int64_t head = row % x.heads, token = row / x.heads % r.tokens, batch = row / x.heads / r.tokens;
            int64_t slot = slots[static_cast<size_t>(batch * r.tokens + token)];
            if (to_cache && slot < 0) continue;
            int64_t outer = to_cache ? slot / s.block_size : batch, inner = to_cache ? slot % s.block_size : token;
            auto y = normed(s, n, tensors.in_before[index].data(), batch, token, head);
            const double scale = to_cache ? scale_of(slot, head, 0) : 1;
            double largest = 0;
            auto compare = [&](int64_t channel, double want, double bound) {
                int64_t to = at(x.out_stride, outer, inner, head, channel);
                if (to_cache) k_written[static_cast<size_t>(to)] = true;
                double got = get(out.dtype, out.bytes.get(), to);
                largest = std::fmax(largest, std::fabs(got));
                check_close(got * scale, want, bound + (to_cache ? quantized(std::fabs(want) + bound, scale) : 0), "a channel of q or k");
            };
            // Rounding of 1 + weight, two products, the root and, in float64, the sum, then to the dtype.
            double share = s.norm.weight[n] ? 24 * real_share(r.dtype) + SHARE[r.dtype] : 0;
            auto error = [&](double of) { return share > 0 ? share * std::fabs(of) + LEAST[r.dtype] : 0; };
            for (int64_t i = 0; i < r.head_dim; ++i) {
                double of = y[static_cast<size_t>(i)];
                if (i < r.offset || i >= r.offset + 2 * r.pairs) compare(i, of, error(of));
            }
            for (int64_t i = 0; i < r.pairs; ++i) {
                double a = y[static_cast<size_t>(first_of(r, i))], b = y[static_cast<size_t>(second_of(r, i))];
                double c = get(r.tables.dtype, cos.bytes.get(), at(r.tables.cos_stride, batch, token, head, i));
                double sine = get(r.tables.dtype, sin.bytes.get(), at(r.tables.sin_stride, batch, token, head, i));
                double want[] = {a * c - b * sine, a * sine + b * c};
                double sums[] = {std::fabs(a * c) + std::fabs(b * sine), std::fabs(a * sine) + std::fabs(b * c)};
                double moved[] = {error(a) * std::fabs(c) + error(b) * std::fabs(sine), error(a) * std::fabs(sine) + error(b) * std::fabs(c)};
                for (int p = 0; p < 2; ++p) {
                    double bound = 4 * real_share(r.dtype) * sums[p] + moved[p];
                    bound += SHARE[r.dtype] * (std::fabs(want[p]) + bound) + LEAST[r.dtype];
                    compare(p == 0 ? first_of(r, i) : second_of(r, i), want[p], bound);
                }
            }
            check(!to_cache || !in_8_bits || largest == most, "the scale of k");
        }
    }
    auto same = [&](const std::vector<unsigned char> &bytes, int64_t i, const Memory &of, int64_t to, const char *what) {
        auto size = static_cast<size_t>(SIZES[of.dtype]);
        check(!std::memcmp(&bytes[static_cast<size_t>(i) * size], &of.bytes[static_cast<size_t>(to) * size], size), what);
    };
    for (int64_t row = 0; s.v.out && row < rows * heads; ++row) {
        int64_t head = row % heads, token = row / heads % r.tokens, batch = row / heads / r.tokens;
        int64_t slot = slots[static_cast<size_t>(batch * r.tokens + token)];
        double largest = 0;
        for (int64_t i = 0; slot >= 0 && i < s.v_dim; ++i) {
            int64_t from = at(s.v.in_stride, batch, token, head, i);
            int64_t to = at(s.v.out_stride, slot / s.block_size, slot % s.block_size, head, i);
            v_written[static_cast<size_t>(to)] = true;
            if (!in_8_bits) {
                same(v_given, from, v_cache, to, "a channel of v");
                continue;
            }
            double want = get(r.dtype, v_given.data(), from), scale = scale_of(slot, head, 1), got = get(kept, v_cache.bytes.get(), to);
            largest = std::fmax(largest, std::fabs(got));
            check_close(got * scale, want, quantized(want, scale), "a channel of v");
        }
        check(!in_8_bits || slot < 0 || largest == most, "the scale of v");
    }
    for (int64_t i = 0; i < BLOCKS * s.block_size; ++i) {
        bool written = false;
        for (int64_t row = 0; row < rows; ++row) written = written || slots[static_cast<size_t>(row)] == i;
        for (int64_t n = 0; n < 2 * heads && (!written || !in_8_bits); ++n) {
            int64_t to = at(scale_stride, i / s.block_size, i % s.block_size, n / 2, n % 2);
            same(scales_before, to, scales, to, "a scale of a slot that no token has");
        }
    }
    for (int64_t i = 0; i < k_cache.count; ++i) {
        if (!k_written[static_cast<size_t>(i)]) same(k_before, i, k_cache, i, "a slot of k that no token has");
    }
    for (int64_t i = 0; i < v_cache.count; ++i) {
        if (!v_written[static_cast<size_t>(i)]) same(v_before, i, v_cache, i, "a slot of v that no token has");
    }
}

// ---- table_gradient

void test_table_gradient(const ropewalk_kernels &kernels, ropewalk_rotation r, const Shape &shape, const Way &way, bool per_head) {
    Tensors tensors(r, shape, way);
    int64_t tables = per_head ? shape.heads[0] : 1;
    for (Memory &gradient : tensors.out) gradient.set_random();
    tensors.remember();
    ropewalk_dtype dtype = r.dtype == ROPEWALK_F64 ? ROPEWALK_F64 : ROPEWALK_F32;
    Memory d_cos(dtype, r.batch * tables * r.tokens * r.pairs), d_sin(dtype, r.batch * tables * r.tokens * r.pairs);
    ropewalk_table_gradient gradient = {r, d_cos.bytes.get(), d_sin.bytes.get(), per_head};
    call(kernels.table_gradient, gradient, r.batch * r.tokens);
    for (int n = 0; n < r.tensor_count; ++n) {
        check(tensors.in[n].copy() == tensors.in_before[n], "the input, which must not change,");
        check(tensors.output(n).copy() == tensors.out_before[n], "the gradient to the output, which must not change,");
    }
    for (int64_t i = 0; i < d_cos.count; ++i) {
        int64_t pair = i % r.pairs, token = i / r.pairs % r.tokens, table = i / r.pairs / r.tokens % tables;
        int64_t batch = i / r.pairs / r.tokens / tables;
        double sums[2] = {}, sizes[2] = {};
        int64_t heads = 0;
        for (int n = 0; n < r.tensor_count; ++n) {
            const ropewalk_tensor &x = r.tensors[n];
            auto of = [&](const void *from, const int64_t *strides, int64_t head, int64_t channel) {
                return get(r.dtype, static_cast<const unsigned char *>(from), at(strides, batch, token, head, channel));
            };
            heads += per_head ? 1 : x.heads;
            for (int64_t head = per_head ? table : 0; head < (per_head ? table + 1 : x.heads); ++head) {
                double a = of(x.in, x.in_stride, head, first_of(r, pair)), b = of(x.in, x.in_stride, head, second_of(r, pair));
                double g = of(x.out, x.out_stride, head, first_of(r, pair)), h = of(x.out, x.out_stride, head, second_of(r, pair));
                sums[0] += g * a + h * b, sums[1] += h * a - g * b;
                sizes[0] += std::fabs(g * a) + std::fabs(h * b), sizes[1] += std::fabs(h * a) + std::fabs(g * b);
            }
        }
        // Rounding of the products, the sum of two, and one sum per head. In float64 the loop above rounds as often.
        double share = 2 * static_cast<double>(heads + 2) * real_share(r.dtype);
        check_close(get(dtype, d_cos.bytes.get(), i), sums[0], share * sizes[0], "d_cos");
        check_close(get(dtype, d_sin.bytes.get(), i), sums[1], share * sizes[1], "d_sin");
    }
}

// ---- angles

void test_angles(const ropewalk_kernels &kernels, ropewalk_dtype dtype, int64_t pairs, int64_t position_stride, int64_t axes) {
    std::vector<int64_t> values = {0, 1, -1, 2, 4095, -4096, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_MIN + 1};
    for (int i = 0; i < 8; ++i) values.push_back(static_cast<int64_t>(random_bits()));
    int64_t rows = static_cast<int64_t>(values.size());
    // Consecutive rows of exact size. On axis a, every position is that on axis 0 plus a.
    int64_t of_axis = (rows - 1) * position_stride + 1;
    std::unique_ptr<int64_t[]> positions(new int64_t[static_cast<size_t>(of_axis * axes)]());
    for (int64_t i = 0; i < rows * axes; ++i) {
        uint64_t value = static_cast<uint64_t>(values[static_cast<size_t>(i % rows)]) + static_cast<uint64_t>(i / rows);
        positions[static_cast<size_t>(i / rows * of_axis + i % rows * position_stride)] = static_cast<int64_t>(value);
    }
    std::unique_ptr<int64_t[]> axis(new int64_t[static_cast<size_t>(pairs)]);
    for (int64_t i = 0; i < pairs; ++i) axis[static_cast<size_t>(i)] = static_cast<int64_t>(random_bits() % static_cast<uint64_t>(axes));
    std::unique_ptr<int64_t[]> steps(new int64_t[static_cast<size_t>(pairs)]);
    for (int64_t i = 0; i < pairs; ++i) {
        // Some phases are whole eighths of a turn, where the quadrants meet.
        steps[static_cast<size_t>(i)] = static_cast<int64_t>(i % 3 ? random_bits() >> i % 64 : random_bits() << 61);
    }
    Memory cos(dtype, rows * pairs), sin(dtype, rows * pairs);
    double factor = 1.25;
    ropewalk_angles args = {positions.get(), position_stride, axes > 1 ? axis.get() : nullptr, of_axis, steps.get(), pairs,
                            factor, dtype, cos.bytes.get(), sin.bytes.get()};
    call(kernels.angles, args, rows);
    for (int64_t i = 0; i < rows * pairs; ++i) {
        auto step = static_cast<uint64_t>(steps[static_cast<size_t>(i % pairs)]);
        int64_t at = i / pairs * position_stride + axis[static_cast<size_t>(i % pairs)] * of_axis;
        auto position = static_cast<uint64_t>(positions[static_cast<size_t>(at)]);
        // In units of an eighth of a turn, with exact subtraction of the last one, because a long double may be a double.
        uint64_t phase = step * position, eighth = phase >> 61;
        long double rest = std::ldexp(static_cast<long double>(phase & ~uint64_t{0} >> 3), -61);
        rest *= 0.785398163397448309615660845819875721L;
        long double root = std::sqrt(0.5L), c = std::cos(rest), s = std::sin(rest);
        for (; eighth > 0; --eighth) {
            long double rotated = root * (c - s);
            s = root * (c + s), c = rotated;
        }
        // In float64, t, its product, the last two steps of the polynomial and the factor each round by 2^-53. float32 rounds
        // once more.
        double bound = factor * (8 * 0x1p-53 + (dtype == ROPEWALK_F64 ? 0 : 0x1p-24));
        check_close(get(dtype, cos.bytes.get(), i), static_cast<double>(factor * c), bound, "cos");
        check_close(get(dtype, sin.bytes.get(), i), static_cast<double>(factor * s), bound, "sin");
    }
}

// Attention over a pool of blocks in which every slot that no token attends to is NaN.
void test_attention(const ropewalk_kernels &kernels, ropewalk_attention a, const Place &place, bool has_blocks, bool has_sinks) {
    if (!kernels.attend) return;
    const int64_t length = a.ring ? 3 * a.keys + 1 : a.keys, front = a.keys - a.ring;  // of a row; with a ring, most keys are overwritten
    const int64_t blocks_of_row = (a.keys + a.block_size - 1) / a.block_size, pool = has_blocks ? a.batch * blocks_of_row + 1 : a.batch;
    const int64_t slots = has_blocks ? a.block_size : a.keys;
    const int64_t sizes[] = {a.batch, a.queries, a.heads, a.head_dim};
    const int64_t of_keys[] = {pool, slots, a.kv_heads, a.head_dim}, of_values[] = {pool, slots, a.kv_heads, a.value_dim};
    Memory q = placed(a.dtype, BHSD, sizes, a.q_stride), far_q = placed(a.dtype, SLICED, sizes, a.far_q_stride);
    const int64_t of_out[] = {a.batch, a.queries, a.heads, a.value_dim};
    Memory out = placed(a.dtype, BSHD, of_out, a.out_stride);
    Memory key = placed(a.kept, place, of_keys, a.key_stride), value = placed(a.kept, place, of_values, a.value_stride);
    // The scales of keys and values, in memory one after the other for each head.
    const int64_t of_scales[] = {pool, slots, a.kv_heads, 2};
    int64_t scale_stride[4];
    Memory scales = placed(ROPEWALK_F32, place, of_scales, scale_stride);
    for (int i = 0; i < 3; ++i) a.key_scale_stride[i] = a.value_scale_stride[i] = scale_stride[i];
    const bool scaled = SIZES[a.kept] == 1;
    a.key_scale = reinterpret_cast<float *>(scales.bytes.get()), a.value_scale = a.key_scale + 1;
    q.set_random(), far_q.set_random();
    auto batch = static_cast<size_t>(a.batch), queries = static_cast<size_t>(a.queries);
    std::unique_ptr<int32_t[]> blocks(new int32_t[batch * static_cast<size_t>(blocks_of_row)]);
    for (int64_t i = 0; i < a.batch * blocks_of_row; ++i) blocks[static_cast<size_t>(i)] = static_cast<int32_t>(pool - 1 - i);
    std::unique_ptr<int64_t[]> order(new int64_t[batch * queries]), counts(new int64_t[batch]);
    for (int64_t row = 0; row < a.batch; ++row) {
        counts[static_cast<size_t>(row)] = row == 2 ? 0 : length - row;
        for (int64_t i = 0; i < a.queries; ++i) {
            int64_t last = length - row - a.queries + i;
            order[static_cast<size_t>(row * a.queries + i)] = last < 0 ? 0 : last;
        }
    }
    a.q = q.bytes.get(), a.far_q = has_sinks ? far_q.bytes.get() : nullptr, a.out = out.bytes.get();
    a.key = key.bytes.get(), a.value = value.bytes.get(), a.blocks = has_blocks ? blocks.get() : nullptr;
    a.block_stride = blocks_of_row, a.order = order.get(), a.order_stride[0] = a.queries, a.order_stride[1] = 1;
    a.counts = counts.get(), a.sinks = !has_sinks ? 0 : a.keys > 100 ? 40 : 5;
    auto sees = [&](int64_t row, int64_t token, int64_t i) {
        int64_t distance = order[static_cast<size_t>(row * a.queries + token)] - i;
        return i < counts[static_cast<size_t>(row)] && distance >= 0 && (i < a.sinks || !a.window || distance < a.window);
    };
    auto place_of = [&](const int64_t *strides, int64_t row, int64_t i, int64_t head, int64_t channel) {
        if (a.ring && i >= front) i = front + (i - front) % a.ring;
        int64_t block = has_blocks ? blocks[static_cast<size_t>(row * blocks_of_row + i / a.block_size)] : row;
        return at(strides, block, has_blocks ? i % a.block_size : i, head, channel);
    };
    Memory random_keys = placed(a.kept, place, of_keys, a.key_stride), random_values = placed(a.kept, place, of_values, a.value_stride);
    random_keys.set_random(), random_values.set_random();
    const auto size = static_cast<size_t>(SIZES[a.kept]);
    for (int64_t row = 0; row < a.batch; ++row) {
        for (int64_t i = 0; i < length; ++i) {
            bool seen = false;
            for (int64_t token = 0; token < a.queries; ++token) seen = seen || sees(row, token, i);
            for (int64_t head = 0; seen && head < a.kv_heads; ++head) {
                for (int64_t of = 0; of < 2; ++of) {
                    scales.set(place_of(scale_stride, row, i, head, of), 0x1p-6 * static_cast<double>(1 + random_bits() % 4));
                }
                for (int64_t c = 0; c < a.head_dim; ++c) {
                    auto from = static_cast<size_t>(place_of(a.key_stride, row, i, head, c)) * size;
                    std::memcpy(&key.bytes[from], &random_keys.bytes[from], size);
                }
                for (int64_t c = 0; c < a.value_dim; ++c) {
                    auto from = static_cast<size_t>(place_of(a.value_stride, row, i, head, c)) * size;
                    std::memcpy(&value.bytes[from], &random_values.bytes[from], size);
                }
            }
        }
    }
    std::unique_ptr<float[]> work(new float[static_cast<size_t>(kernels.attention_floats(&a))]);
    a.work = work.get();
    call(kernels.attend, a, a.parts);
    call(kernels.combine, a, a.batch);
    const int64_t group = a.heads / a.kv_heads;
    auto number = [&](const Memory &of, const int64_t *strides, int64_t row, int64_t i, int64_t head, int64_t channel) {
        double x = get(a.kept, of.bytes.get(), place_of(strides, row, i, head, channel));
        return scaled ? x * get(ROPEWALK_F32, scales.bytes.get(), place_of(scale_stride, row, i, head, &of == &value)) : x;
    };
    for (int64_t n = 0; n < a.batch * a.queries * a.heads; ++n) {
        const int64_t head = n % a.heads, token = n / a.heads % a.queries, row = n / a.heads / a.queries;
        std::vector<double> scores;
        std::vector<int64_t> seen;
        double most = -INFINITY, total = 0, largest = 0;
        for (int64_t i = 0; i < length; ++i) {
            if (!sees(row, token, i)) continue;
            bool far = i < a.sinks;
            double score = 0, sum = 0;
            for (int64_t c = 0; c < a.head_dim; ++c) {
                double x = far ? get(a.dtype, far_q.bytes.get(), at(a.far_q_stride, row, token, head, c))
                               : get(a.dtype, q.bytes.get(), at(a.q_stride, row, token, head, c));
                double product = a.scale * x * number(key, a.key_stride, row, i, head / group, c);
                score += product, sum += std::fabs(product);
            }
            scores.push_back(score), seen.push_back(i), largest = std::fmax(largest, sum), most = std::fmax(most, score);
        }
        for (double &score : scores) total += score = std::exp(score - most);
        for (int64_t c = 0; c < a.value_dim; ++c) {
            double want = 0, largest_value = 0;
            for (size_t i = 0; i < seen.size(); ++i) {
                double v = number(value, a.value_stride, row, seen[i], head / group, c);
                want += scores[i] / total * v, largest_value = std::fmax(largest_value, std::fabs(v));
            }
            // Scores in float32, weights of a relative error twice theirs, and sums of float32; then one rounding.
            double of_scores = static_cast<double>(a.head_dim + 8) * 0x1p-24 * largest + 4 * 0x1p-24;
            double bound = (2 * of_scores + static_cast<double>(seen.size() + 8) * 0x1p-24) * largest_value;
            bound += std::fabs(want) * SHARE[a.dtype] + LEAST[a.dtype];
            check_close(get(a.dtype, out.bytes.get(), at(a.out_stride, row, token, head, c)), want, bound, "attention");
        }
    }
}

void test_level(const ropewalk_kernels &kernels) {
    auto tell = [&](const ropewalk_rotation &r, const Shape &shape, const Way &way, const char *what) {
        std::snprintf(now, sizeof now, "%s, %s, %s%s, head_dim %d, %d pairs from %d, batch %d, %d tokens, %d and %d heads, "
                      "%s to %s%s, %s", kernels.name, NAMES[r.dtype], r.interleaved ? "interleaved" : "half", r.inverse ? " inverse" : "",
                      int(r.head_dim), int(r.pairs), int(r.offset), int(shape.batch), int(shape.tokens), int(shape.heads[0]),
                      int(shape.heads[1]), way.in.name, way.out.name, way.in_place ? " in place" : "", what);
        if (verbose) std::printf("%s\n", now), std::fflush(stdout);
    };
    constexpr Shape small = {2, 3, {2, 1}}, alike = {2, 3, {3, 3}};
    // One token, more tokens and heads than the kernel processes at a time, and none.
    constexpr Shape others[] = {{1, 1, {1, 0}}, {3, 1, {2, 2}}, {1, 66, {9, 1}}, {1, 66, {9, 9}},
                                {2, 0, {3, 1}}, {0, 3, {3, 1}}, {1, 2, {0, 1}}, {1, 2, {0, 0}}};
    for (int variant = 0; variant < 16; ++variant) {
        ropewalk_rotation r{};
        r.dtype = static_cast<ropewalk_dtype>(variant / 4), r.interleaved = variant & 1, r.inverse = variant >> 1 & 1;
        if (SIZES[r.dtype] == 2) tell(r, small, WAYS[0], "every number"), test_every_16_bits(kernels, r);
        for (const Head &head : HEADS) {
            r.head_dim = head.dim, r.pairs = head.pairs, r.offset = head.offset;
            auto rotate = [&](const Shape &shape, const Way &way, const TableKind &kind) {
                tell(r, shape, way, kind.name), test_rotate(kernels, r, shape, way, kind);
            };
            auto gradient = [&](const Shape &shape, const Way &way, bool per_head) {
                if (r.inverse) return;
                tell(r, shape, way, per_head ? "gradient per head" : "gradient");
                test_table_gradient(kernels, r, shape, way, per_head);
            };
            for (const TableKind &kind : KINDS) {
                const Shape &shape = kind.per_head ? alike : small;
                rotate(shape, WAYS[0], kind), rotate(shape, {BHSD, BHSD, true}, kind);
            }
            for (const Way &way : WAYS) {
                rotate(small, way, KINDS[0]), gradient(small, way, false);
                rotate(alike, way, PER_HEAD), gradient(alike, way, true);
                if (head.dim != 6 && head.offset != 8) continue;
                for (const Shape &shape : others) {
                    rotate(shape, way, PER_BATCH), gradient(shape, way, false);
                    if (shape.heads[1] == shape.heads[0] || shape.heads[1] == 0) {
                        rotate(shape, way, PER_HEAD), gradient(shape, way, true);
                    }
                }
            }
        }
    }
    for (int variant = 0; variant < 8; ++variant) {
        ropewalk_step s{};
        s.rotation.dtype = static_cast<ropewalk_dtype>(variant / 2), s.rotation.interleaved = variant & 1;
        bool wide = s.rotation.dtype == ROPEWALK_F64;
        int cases = 0;
        for (const Head &head : HEADS) {
            s.rotation.head_dim = head.dim, s.rotation.pairs = head.pairs, s.rotation.offset = head.offset;
            constexpr Place places[][2] = {{BSHD, BSHD}, {BHSD, SLICED}, {SLICED, BHSD}, {APART, BSHD}, {ONE_HEAD, APART}};
            for (const auto &[place, cache] : places) {
                for (int norm = 0; norm < 4; ++norm) {  // none, weights as stored, weights as computed, 1 + weight
                    bool per_head = ++cases % 3 == 0;
                    Store store = static_cast<Store>(cases % STORES);
                    const Place &into = store >= IN_I8 && cache.channel != 1 ? BHSD : cache;  // its channels must be adjacent
                    s.norm.eps = norm == 0 ? 0 : 1e-5, s.norm.add_one = norm == 3;
                    s.norm.dtype = norm == 1 ? s.rotation.dtype : wide ? ROPEWALK_F64 : ROPEWALK_F32;
                    const Shape &shape = per_head ? alike : small;
                    tell(s.rotation, shape, {place, into, false}, STORE_NAMES[store]);
                    test_step(kernels, s, shape, place, into, per_head, store);
                }
            }
        }
    }
    int variant = 0;
    for (ropewalk_dtype kept : {ROPEWALK_F32, ROPEWALK_BF16, ROPEWALK_F16, ROPEWALK_I8, ROPEWALK_E4M3}) {
        for (int64_t head_dim : {1, 7, 16, 40, 64, 80, 130}) {
            for (int64_t keys : {1, 5, 33, 150}) {
                for (int64_t group : {1, 2, 3, 4, 7}) {
                    ropewalk_attention a{};
                    ++variant;
                    constexpr ropewalk_dtype dtypes[] = {ROPEWALK_F32, ROPEWALK_BF16, ROPEWALK_F16};
                    a.kept = kept, a.dtype = SIZES[kept] == 1 ? dtypes[variant % 3] : kept, a.batch = 1 + variant % 4, a.queries = 1 + variant % 3 * 2, a.kv_heads = 1 + variant % 2;
                    a.heads = a.kv_heads * group, a.head_dim = head_dim, a.value_dim = variant % 3 ? head_dim : 1 + variant % 50;
                    a.keys = keys, a.block_size = variant % 7 ? 16 : 3, a.window = variant % 4 ? 0 : 9, a.scale = 0.25;
                    a.parts = 1 + variant % 6, a.ring = a.window && keys > 30 && variant % 2 == 0 ? keys - (keys > 100 ? 40 : 5) : 0;
                    std::snprintf(now, sizeof now, "%s, attention, %s, head_dim %d, %d keys, %d of %d heads, batch %d, %d tokens, %d parts",
                                  kernels.name, NAMES[kept], int(head_dim), int(keys), int(a.kv_heads), int(a.heads), int(a.batch),
                                  int(a.queries), int(a.parts));
                    if (verbose) std::printf("%s\n", now), std::fflush(stdout);
                    test_attention(kernels, a, variant % 3 ? BSHD : BHSD, variant % 2, variant % 5 == 0);
                }
            }
        }
    }
    for (int64_t pairs : {1, 3, 4, 7, 8, 9, 40, 64, 257, 519}) {
        for (int64_t stride : {1, 0, 3}) {
            for (ropewalk_dtype dtype : {ROPEWALK_F32, ROPEWALK_F64}) {
                for (int64_t axes : {1, 3}) {
                    std::snprintf(now, sizeof now, "%s, angles, %s, %d pairs, stride %d, %d axes", kernels.name, NAMES[dtype],
                                  int(pairs), int(stride), int(axes));
                    test_angles(kernels, dtype, pairs, stride, axes);
                }
            }
        }
    }
}

}  // namespace

int main(int argc, char **argv) {
    verbose = argc > 1 && !std::strcmp(argv[1], "verbose");
    const ropewalk_kernels *best = nullptr;
    for (int level = 0; level < ROPEWALK_LEVELS; ++level) {
        const ropewalk_kernels *kernels = ropewalk_get(static_cast<ropewalk_level>(level));
        if (!kernels) continue;
        checked = 0, best = kernels;
        test_level(*kernels);
        std::printf("%s: %ld checks\n", kernels->name, checked);
    }
    std::snprintf(now, sizeof now, "ropewalk_best");
    check(best && ropewalk_best() == best, "the fastest");
    return 0;
}
