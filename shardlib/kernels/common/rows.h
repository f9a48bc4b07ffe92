// Loops over rows: vectors that are not full at a row's end, and sums over rows that are the same for any number of threads.
#pragma once

#include <initializer_list>
#include <vector>

#include "simd.h"

namespace {

// Reads n ≤ W values; the other lanes are zero.
template <typename Type>
inline Floats get(const typename Type::Element* from, int64_t n) {
    if (n == W) return Type::load(from);
    typename Type::Element values[W] = {};
    memcpy(values, from, size_t(n) * sizeof(*from));
    return Type::load(values);
}

template <typename Type>
inline void put(typename Type::Element* to, Floats values, int64_t n) {
    if (n == W) return Type::store(to, values);
    typename Type::Element stored[W];
    Type::store(stored, values);
    memcpy(to, stored, size_t(n) * sizeof(*to));
}

// Calls body(i, n) for columns i to i + n − 1, until all are done.
template <typename Body>
inline void vectors(int64_t columns, const Body& body) {
    int64_t i = 0;
    for (; i + W <= columns; i += W) body(i, int64_t(W));
    if (i < columns) body(i, columns - i);
}

inline float sum(Floats values) {
    float lanes[W];
    store(lanes, values);
    for (int step = W / 2; step; step /= 2)  // a tree, as in a chain each addition waits for the one before
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
}

// Sets lanes from the n-th on to zero.
inline Floats first(Floats values, int64_t n) {
    if (n == W) return values;
    for (int64_t i = n; i < W; ++i) values[i] = 0;
    return values;
}

// The number of threads that pays: starting one takes as long as some 32768 elements.
inline int enough(int threads, int64_t elements) { return worth(threads, elements, 1 << 15); }

// Runs body(row) for every row.
template <typename Body>
inline void each_row(int64_t rows, int64_t columns, int threads, const Body& body) {
    parallel(rows, enough(threads, rows * columns), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row) body(row);
    });
}

// Runs body(row, sums) for every row; body adds to sums[outs][columns], which become those of outs that are not null. Rows are
// cut into RANGES ranges, each with its own sums, which are added in order: the result does not depend on the number of threads.
constexpr int64_t RANGES = 32;  // as in rows.py

template <typename Body>
inline void summed_rows(int64_t rows, int64_t columns, std::initializer_list<float*> outs, int threads,
                        const Body& body) {
    int64_t width = int64_t(outs.size()) * columns, first = 0;
    std::vector<float> zeros(size_t(RANGES * width));
    float* partial = zeros.data();
    parallel(RANGES, enough(threads, rows * columns), [&](int64_t from, int64_t to) {
        for (int64_t range = from; range < to; ++range)
            for (int64_t row = rows * range / RANGES; row < rows * (range + 1) / RANGES; ++row)
                body(row, partial + range * width);
    });
    for (float* out : outs) {
        if (out)
            vectors(columns, [&](int64_t i, int64_t n) {
                Floats total = {};
                for (int64_t range = 0; range < RANGES; ++range) total += get<Float32>(partial + range * width + first + i, n);
                put<Float32>(out + i, total, n);
            });
        first += columns;
    }
}

}  // namespace

// Calls function<Type>(arguments...) for a dtype: 0 float, 1 bfloat16.
#define BY_TYPE(dtype, function, ...) \
    ((dtype) == 0 ? function<Float32>(__VA_ARGS__) : function<BFloat16>(__VA_ARGS__))
