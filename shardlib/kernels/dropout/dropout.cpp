// Dropout from a counter on the CPU; see __init__.py and counter.h. Compiled once per instruction set (ISA names it).
#include "../common/counter.h"
#include "../common/rows.h"

namespace {

struct Draw {
    float scale;
    int32_t threshold;
    uint64_t seed;
    int64_t start;
    const int64_t* starts;

    uint64_t first(int64_t row, int64_t columns) const { return uint64_t(starts ? starts[row] : start + row * columns); }
};

// The factors of a row's elements: 0 or scale.
struct Mask {
    uint32_t low, below, above;  // the first index's lower half; the mixes of its upper half, and of that plus one
    uint32_t seed;
    Words lane;
    Ints threshold;
    float scale;

    Mask(const Draw& draw, uint64_t index)
        : low(uint32_t(index)),
          below(mix(uint32_t(index >> 32) ^ uint32_t(draw.seed >> 32))),
          above(mix((uint32_t(index >> 32) + 1) ^ uint32_t(draw.seed >> 32))),
          seed(uint32_t(draw.seed)),
          threshold(Ints{} + draw.threshold),
          scale(draw.scale) {
        for (int i = 0; i < W; ++i) lane[i] = uint32_t(i);
    }

    Floats operator()(int64_t column) const {
        Words index = lane + (low + uint32_t(column));
        Words upper = index < low ? Words{} + above : Words{} + below;  // the lower half wrapped around
        Words bits = mix(mix(index ^ seed) ^ upper) >> 8;
        return bitcast<Ints>(bits) >= threshold ? all(scale) : Floats{};
    }
};

template <typename Type>
void forward(const void* x_, const void* residual_, const float* bias, const Draw& draw, int64_t rows, int64_t columns,
             void* y_, int threads) {
    typedef typename Type::Element Element;
    const Element *x = static_cast<const Element*>(x_), *residual = static_cast<const Element*>(residual_);
    Element* y = static_cast<Element*>(y_);
    each_row(rows, columns, threads, [&](int64_t row) {
        Mask mask(draw, draw.first(row, columns));
        vectors(columns, [&](int64_t i, int64_t n) {
            int64_t at = row * columns + i;
            Floats z = get<Type>(x + at, n);
            if (bias) z += get<Float32>(bias + i, n);
            z *= mask(i);
            if (residual) z += get<Type>(residual + at, n);
            put<Type>(y + at, z, n);
        });
    });
}

template <typename Type>
void backward(const void* dy_, const Draw& draw, int64_t rows, int64_t columns, void* dx_, float* dbias, int threads) {
    typedef typename Type::Element Element;
    const Element* dy = static_cast<const Element*>(dy_);
    Element* dx = static_cast<Element*>(dx_);
    auto gradient = [&](int64_t at, const Mask& mask, int64_t i, int64_t n) {
        Floats dz = get<Type>(dy + at, n) * mask(i);
        put<Type>(dx + at, dz, n);
        return dz;
    };
    if (!dbias)
        return each_row(rows, columns, threads, [&](int64_t row) {
            Mask mask(draw, draw.first(row, columns));
            vectors(columns, [&](int64_t i, int64_t n) { gradient(row * columns + i, mask, i, n); });
        });
    summed_rows(rows, columns, {dbias}, threads, [&](int64_t row, float* sums) {
        Mask mask(draw, draw.first(row, columns));
        vectors(columns, [&](int64_t i, int64_t n) {
            put<Float32>(sums + i, get<Float32>(sums + i, n) + gradient(row * columns + i, mask, i, n), n);
        });
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. residual, bias, starts: null for none.
EXPORT(dropout)(const void* x, int dtype, const void* residual, const float* bias, float scale, int threshold,
                int64_t seed, int64_t start, const int64_t* starts, int64_t rows, int64_t columns, void* y, int threads) {
    Draw draw = {scale, threshold, uint64_t(seed), start, starts};
    BY_TYPE(dtype, forward, x, residual, bias, draw, rows, columns, y, threads);
}

// dbias: null for none.
EXPORT(dropout_backward)(const void* dy, int dtype, float scale, int threshold, int64_t seed, int64_t start,
                         const int64_t* starts, int64_t rows, int64_t columns, void* dx, float* dbias,
                         int threads) {
    Draw draw = {scale, threshold, uint64_t(seed), start, starts};
    BY_TYPE(dtype, backward, dy, draw, rows, columns, dx, dbias, threads);
}
