// Σ x² on the CPU; see __init__.py. Compiled once per instruction set (ISA names it). Squares are exact in fp64 and are added over
// 32 lanes, within a span and then over spans: all instruction sets and numbers of threads give the same bits.
#include "../common/halves.h"

namespace {

constexpr int64_t SPAN = 1 << 16;  // elements
constexpr int64_t AHEAD = 1024;    // bytes; the hardware's prefetching stops at every 4 KB
constexpr int LANES = 32, VECTORS = LANES / W;

template <typename Type>
inline double sum(const typename Type::Element* x, int64_t count) {
    Doubles sums[2 * VECTORS] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int v = 0; v < VECTORS; ++v) {
            __builtin_prefetch(reinterpret_cast<const char*>(x + i + v * W) + AHEAD);
            Floats values = Type::load(x + i + v * W);
            sums[2 * v] += low(values) * low(values);
            sums[2 * v + 1] += high(values) * high(values);
        }
    alignas(64) double lanes[LANES];
    memcpy(lanes, sums, sizeof(lanes));
    for (int lane = 0; i < count; ++i, ++lane) {
        double value = Type::get(x + i);
        lanes[lane] += value * value;
    }
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

template <typename Type>
double sum_spans(const typename Type::Element* x, int64_t count, double* partial, int threads) {
    int64_t spans = (count + SPAN - 1) / SPAN;
    parallel(spans, worth(threads, spans, 4), [&](int64_t from, int64_t to) {
        for (int64_t span = from; span < to; ++span)
            partial[span] = sum<Type>(x + span * SPAN, smaller(SPAN, count - span * SPAN));
    });
    double total = 0;
    for (int64_t span = 0; span < spans; ++span) total += partial[span];
    return total;
}

}  // namespace

// dtype: 0 float, 1 bfloat16, 2 half. partial: a double per span.
EXPORT(sum_of_squares)(const void* x, int dtype, int64_t count, double* partial, double* out, int threads) {
    with_type(dtype, [&](auto type) {
        typedef decltype(type) Type;
        *out = sum_spans<Type>(static_cast<const typename Type::Element*>(x), count, partial, threads);
    });
}
