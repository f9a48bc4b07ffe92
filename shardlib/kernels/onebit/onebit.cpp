// 1-bit compression on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// The buffer is cut into spans of whole bytes of signs; a thread takes a range of spans. A first pass packs the signs and
// sums the squares. When a segment ends, its scale is known, and a second pass writes its residual (`residual`). A segment that
// fits the cache reads x and the residual and writes the residual and the signs, 12.125 bytes per fp32 element; a larger one
// is read twice from memory, 20.125 bytes. Sums are added in fp64, where the square of a float is exact, over 32 lanes,
// within a span and then over spans: all instruction sets and numbers of threads give the same bits.
#include "../common/simd.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "signs are stored as little-endian words");

namespace {

constexpr int64_t SPAN = 1 << 16;  // elements
constexpr int64_t AHEAD = 512;     // elements
constexpr int LANES = 32, VECTORS = LANES / W;

struct Segments {
    const int64_t* offsets;  // null: blocks
    int64_t block, count, elements, length;

    int64_t start(int64_t j) const { return offsets ? offsets[j] : smaller(j * block, elements); }

    // The segment of element i: the last one that begins at or before it.
    int64_t at(int64_t i) const {
        if (!offsets) return i / block;
        int64_t low = 0, high = count;  // start(low) <= i < start(high), as i lies in a segment
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (offsets[middle] <= i ? low : high) = middle;
        }
        return low;
    }
};

inline uint32_t signs(Floats c) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(c, _mm512_setzero_ps(), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(c, _mm256_setzero_ps(), _CMP_GE_OQ));
#else
    return (c[0] >= 0) | (c[1] >= 0) << 1 | (c[2] >= 0) << 2 | (c[3] >= 0) << 3;
#endif
}

// scale where the bit is 1, −scale where it is 0.
inline Floats signed_scale(uint32_t bits, Floats scale) {
#if defined(__AVX512F__)
    return _mm512_mask_blend_ps(__mmask16(bits), -scale, scale);
#elif defined(__AVX2__)
    const Ints bit_values = {1, 2, 4, 8, 16, 32, 64, 128};
    return ((Ints{} + int(bits)) & bit_values) != 0 ? scale : -scale;
#else
    const Ints bit_values = {1, 2, 4, 8};
    return ((Ints{} + int(bits)) & bit_values) != 0 ? scale : -scale;
#endif
}

// A source computes c, the numbers to compress: `group` for 32 elements from a multiple of 32, `one` for a single element,
// all in segment j.

// The source of a worker: c = x + residual.
template <typename Type>
struct Tensor {
    const typename Type::Element* x;
    const float* residual;

    void group(int64_t i, int64_t, Floats (&c)[VECTORS]) const {
        for (int v = 0; v < VECTORS; ++v) {
            // The hardware's prefetching stops at every 4 KB; asking ahead won 8 % (whole segments) to 20 % (blocks of 128).
            __builtin_prefetch(x + i + AHEAD + v * W);
            __builtin_prefetch(residual + i + AHEAD + v * W);
            c[v] = Type::load(x + i + v * W) + load<Floats>(residual + i + v * W);
        }
    }
    float one(int64_t i, int64_t) const { return Type::get(x + i) + residual[i]; }
};

// The mean over n ranks of ±scale, summed in rank order.
struct Mean {
    const uint8_t* bits;
    const float* scales;
    int64_t ranks, bytes, count;

    void group(int64_t i, int64_t j, Floats (&c)[VECTORS]) const {
        for (int v = 0; v < VECTORS; ++v) c[v] = Floats{};
        for (int64_t r = 0; r < ranks; ++r) {
            uint32_t word = load<uint32_t>(bits + r * bytes + i / 8);
            Floats scale = all(scales[r * count + j]);
            for (int v = 0; v < VECTORS; ++v) c[v] += signed_scale(word >> (v * W), scale);
        }
        for (int v = 0; v < VECTORS; ++v) c[v] /= all(float(ranks));
    }
    float one(int64_t i, int64_t j) const {
        float sum = 0;
        for (int64_t r = 0; r < ranks; ++r) {
            float scale = scales[r * count + j];
            sum += bits[r * bytes + i / 8] >> (i % 8) & 1 ? scale : -scale;
        }
        return sum / float(ranks);
    }
};

// The source of a server: c = mean + residual; the mean is computed again in each pass, never stored.
struct MeanAndResidual {
    Mean mean;
    const float* residual;

    void group(int64_t i, int64_t j, Floats (&c)[VECTORS]) const {
        mean.group(i, j, c);
        for (int v = 0; v < VECTORS; ++v) c[v] += load<Floats>(residual + i + v * W);
    }
    float one(int64_t i, int64_t j) const { return mean.one(i, j) + residual[i]; }
};

// Covers the elements from a up to b with calls of group(i), for 32 elements from a multiple of 32, and of one(i) at the
// ends; calls before() and after() around the groups.
template <typename One, typename Before, typename Group, typename After>
inline void sweep(int64_t a, int64_t b, One one, Before before, Group group, After after) {
    int64_t body = smaller(b, (a + LANES - 1) / LANES * LANES), tail = larger(body, b / LANES * LANES);
    for (int64_t i = a; i < body; ++i) one(i);
    before();
    for (int64_t i = body; i < tail; i += LANES) group(i);
    after();
    for (int64_t i = tail; i < b; ++i) one(i);
}

inline void nothing() {}

// Packs the signs of elements a up to b of segment j into `bits`, which must be 0 there, and returns Σ c².
template <typename Source>
inline double pack(const Source& source, int64_t j, int64_t a, int64_t b, uint8_t* bits) {
    alignas(64) double lanes[LANES] = {};
    Doubles sums[2 * VECTORS];
    sweep(
        a, b,
        [&](int64_t i) {
            float c = source.one(i, j);
            lanes[i % LANES] += double(c) * c;
            bits[i / 8] |= uint8_t((c >= 0) << (i % 8));
        },
        [&] { memcpy(sums, lanes, sizeof(sums)); },
        [&](int64_t i) {
            Floats c[VECTORS];
            source.group(i, j, c);
            uint32_t word = 0;
            for (int v = 0; v < VECTORS; ++v) {
                sums[2 * v] += low(c[v]) * low(c[v]);
                sums[2 * v + 1] += high(c[v]) * high(c[v]);
                word |= signs(c[v]) << (v * W);
            }
            store(bits + i / 8, word);
        },
        [&] { memcpy(lanes, sums, sizeof(sums)); });
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

// residual = c − scale·sgn(c) for elements a up to b of segment j; unchanged where the scale is not finite.
template <typename Source>
inline void subtract(const Source& source, int64_t j, int64_t a, int64_t b, float scale, float* residual) {
    if (!__builtin_isfinite(scale)) return;
    sweep(
        a, b,
        [&](int64_t i) {
            float c = source.one(i, j);
            residual[i] = c - (c >= 0 ? scale : -scale);
        },
        nothing,
        [&](int64_t i) {
            Floats c[VECTORS];
            source.group(i, j, c);
            for (int v = 0; v < VECTORS; ++v) store(residual + i + v * W, c[v] - (c[v] >= 0 ? all(scale) : -all(scale)));
        },
        nothing);
}

// Calls visit(j, a, b, ends) for every run of elements of one segment inside the span; ends: the segment ends with the run.
template <typename Visit>
inline void runs(const Segments& segments, int64_t span, Visit visit) {
    int64_t first = span * SPAN, last = smaller(first + SPAN, segments.elements);
    if (first >= last) return;
    int64_t a = first;
    for (int64_t j = segments.at(first); a < last; ++j) {
        int64_t stop = segments.start(j + 1), b = smaller(stop, last);
        if (b > a) visit(j, a, b, stop <= last);
        a = larger(a, b);
    }
}

// The scale of segment j, from the sums of its runs.
inline float scale_of(const Segments& segments, int64_t j, const double* partial) {
    int64_t start = segments.start(j), stop = segments.start(j + 1);
    if (start == stop) return 0;
    double sum = 0;
    for (int64_t span = start / SPAN; span <= (stop - 1) / SPAN; ++span) sum += partial[span + j];
    return float(__builtin_sqrt(sum / double(stop - start)));
}

inline void pad(const Segments& segments, int64_t span, uint8_t* bits, float* residual) {
    int64_t last = smaller((span + 1) * SPAN, segments.length);
    int64_t end = last == segments.length ? (last + 7) / 8 * 8 : last;  // the last byte is filled up
    for (int64_t i = larger(span * SPAN, segments.elements); i < end; ++i) {
        bits[i / 8] |= uint8_t(1 << (i % 8));
        if (i < last) residual[i] = 0;
    }
}

inline int64_t spans(const Segments& segments) { return (segments.length + SPAN - 1) / SPAN; }

// The number of threads that pays: starting one takes as long as a few spans.
inline int useful(int threads, int64_t count) { return worth(threads, count, 4); }

// `subtract` on the spans from `from` up to `to` of segment j; the last first, as it may still be in a cache.
template <typename Source>
inline void subtract_spans(const Source& source, const Segments& segments, int64_t j, int64_t from, int64_t to,
                           float scale, float* residual) {
    int64_t start = segments.start(j), stop = segments.start(j + 1);
    for (int64_t span = to; span-- > from;)
        subtract(source, j, larger(start, span * SPAN), smaller(stop, (span + 1) * SPAN), scale, residual);
}

// partial: a double per run. The run of segment j in a span lies at span + j: from one run to the next one of them grows, so
// no two runs share an element.
template <typename Source>
void compress(const Source& source, const Segments& segments, float* residual, uint8_t* bits, float* scales,
              double* partial, int threads) {
    constexpr float PENDING = -1;  // no scale is negative
    int64_t count = spans(segments);
    for (int64_t j = 0; j < segments.count; ++j) scales[j] = PENDING;
    parallel(count, useful(threads, count), [&](int64_t from, int64_t to) {
        for (int64_t span = from; span < to; ++span) {
            int64_t first = span * SPAN, last = smaller(first + SPAN, segments.length);
            memset(bits + first / 8, 0, size_t((last + 7) / 8 - first / 8));
            runs(segments, span, [&](int64_t j, int64_t a, int64_t b, bool ends) {
                partial[span + j] = pack(source, j, a, b, bits);
                int64_t begun = segments.start(j) / SPAN;
                if (!ends || begun < from) return;
                scales[j] = scale_of(segments, j, partial);
                subtract_spans(source, segments, j, begun, span + 1, scales[j], residual);
            });
            pad(segments, span, bits, residual);
        }
    });
    // The remaining segments: empty ones, and those that lie across several threads' ranges.
    for (int64_t j = 0; j < segments.count; ++j) {
        if (scales[j] != PENDING) continue;
        scales[j] = scale_of(segments, j, partial);
        int64_t start = segments.start(j), stop = segments.start(j + 1);
        if (start == stop) continue;
        int64_t begun = start / SPAN, number = (stop - 1) / SPAN + 1 - begun;
        parallel(number, useful(threads, number), [&](int64_t from, int64_t to) {
            subtract_spans(source, segments, j, begun + from, begun + to, scales[j], residual);
        });
    }
}

}  // namespace

// dtype: 0 float, 1 bfloat16. offsets: null for blocks. partial: spans + count doubles.
EXPORT(onebit_compress)(const void* x, int dtype, float* residual, const int64_t* offsets, int64_t block, int64_t count,
                        int64_t elements, int64_t length, uint8_t* bits, float* scales, double* partial, int threads) {
    Segments segments = {offsets, block, count, elements, length};
    if (dtype == 0) {
        Tensor<Float32> source = {static_cast<const float*>(x), residual};
        compress(source, segments, residual, bits, scales, partial, threads);
    } else {
        Tensor<BFloat16> source = {static_cast<const uint16_t*>(x), residual};
        compress(source, segments, residual, bits, scales, partial, threads);
    }
}

EXPORT(onebit_average)(const uint8_t* bits, const float* scales, int64_t ranks, const int64_t* offsets, int64_t block,
                       int64_t count, int64_t elements, int64_t length, float* out, int threads) {
    Segments segments = {offsets, block, count, elements, length};
    Mean mean = {bits, scales, ranks, (length + 7) / 8, count};
    int64_t number = spans(segments);
    parallel(number, useful(threads, number), [&](int64_t from, int64_t to) {
        for (int64_t span = from; span < to; ++span) {
            runs(segments, span, [&](int64_t j, int64_t a, int64_t b, bool) {
                sweep(
                    a, b, [&](int64_t i) { out[i] = mean.one(i, j); }, nothing,
                    [&](int64_t i) {
                        Floats c[VECTORS];
                        mean.group(i, j, c);
                        for (int v = 0; v < VECTORS; ++v) store(out + i + v * W, c[v]);
                    },
                    nothing);
            });
            for (int64_t i = larger(span * SPAN, elements); i < smaller((span + 1) * SPAN, length); ++i) out[i] = 0;
        }
    });
}

EXPORT(onebit_average_compress)(const uint8_t* bits, const float* scales, int64_t ranks, float* residual,
                                const int64_t* offsets, int64_t block, int64_t count, int64_t elements, int64_t length,
                                uint8_t* out_bits, float* out_scales, double* partial, int threads) {
    Segments segments = {offsets, block, count, elements, length};
    MeanAndResidual source = {{bits, scales, ranks, (length + 7) / 8, count}, residual};
    compress(source, segments, residual, out_bits, out_scales, partial, threads);
}
