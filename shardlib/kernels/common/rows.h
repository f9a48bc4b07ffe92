// What kernels of rows share: part vectors at a row's end, and sums over rows that are the same for any number of threads.
#pragma once

#include "simd.h"

namespace {

// n values, W at most; zeros after them.
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
    for (int step = W / 2; step; step /= 2)  // a tree: one after the other they would wait for each other
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
}

// Sets lanes from the n-th on to zero.
inline Floats first(Floats values, int64_t n) {
    if (n == W) return values;
    for (int64_t i = n; i < W; ++i) values[i] = 0;
    return values;
}

// A thread costs what some 32768 elements take.
inline int enough(int threads, int64_t elements) { return worth(threads, elements, 1 << 15); }

// Runs body(row) for every row.
template <typename Body>
inline void each_row(int64_t rows, int64_t columns, int threads, const Body& body) {
    parallel(rows, enough(threads, rows * columns), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row) body(row);
    });
}

// Runs body(row, sums) for every row, which adds to sums[width]; sums are kept apart for each of PIECES pieces of the
// rows, in partial[PIECES][width], and then added in order, whoever computed them.
constexpr int64_t PIECES = 32;  // as in rows.py

template <typename Body>
inline void summed_rows(int64_t rows, int64_t columns, int64_t width, float* partial, float* out, int threads,
                        const Body& body) {
    memset(partial, 0, size_t(PIECES * width) * sizeof(float));
    parallel(PIECES, enough(threads, rows * columns), [&](int64_t from, int64_t to) {
        for (int64_t piece = from; piece < to; ++piece)
            for (int64_t row = rows * piece / PIECES; row < rows * (piece + 1) / PIECES; ++row)
                body(row, partial + piece * width);
    });
    vectors(width, [&](int64_t i, int64_t n) {
        Floats total = {};
        for (int64_t piece = 0; piece < PIECES; ++piece) total += get<Float32>(partial + piece * width + i, n);
        put<Float32>(out + i, total, n);
    });
}

}  // namespace

// Calls function<Type>(arguments...) for the type of an element: 0 float, 1 bfloat16.
#define BY_TYPE(dtype, function, ...) \
    ((dtype) == 0 ? function<Float32>(__VA_ARGS__) : function<BFloat16>(__VA_ARGS__))
