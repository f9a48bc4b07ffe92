// Masked softmax on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/rows.h"
#include "../common/simd_math.h"

namespace {

// The number of keys that a row's query may see; those beyond are neither read nor computed.
inline int64_t visible(bool causal, int64_t row, int64_t queries, int64_t keys) {
    return causal ? smaller(row % queries + 1, keys) : keys;
}

template <typename Type>
inline void clear(typename Type::Element* to, int64_t from, int64_t keys) {
    memset(to + from, 0, size_t(keys - from) * sizeof(*to));
}

template <typename Type>
void forward(const void* x_, const int64_t* lengths, int causal, float scale, int64_t rows, int64_t per_sequence,
             int64_t queries, int64_t keys, void* y_, int threads) {
    typedef typename Type::Element Element;
    const float lowest = -__builtin_inff();
    each_row(rows, keys, threads, [&](int64_t row) {
        const Element* x = static_cast<const Element*>(x_) + row * keys;
        Element* y = static_cast<Element*>(y_) + row * keys;
        int64_t count = visible(causal, row, queries, keys);
        if (lengths) count = larger(0, smaller(count, lengths[row / per_sequence]));
        Floats most = all(lowest);
        vectors(count, [&](int64_t i, int64_t n) {
            Floats value = get<Type>(x + i, n) * scale;
            for (int64_t lane = n; lane < W; ++lane) value[lane] = lowest;
            most = value < most ? most : value;  // NaN stays
        });
        float largest = lowest;
        for (int lane = 0; lane < W; ++lane) largest = most[lane] < largest ? largest : most[lane];
        Floats sums = {};
        vectors(count, [&](int64_t i, int64_t n) {
            sums += first(exponential(get<Type>(x + i, n) * scale - largest), n);
        });
        float inverse = 1.0f / sum(sums);
        vectors(count, [&](int64_t i, int64_t n) {
            put<Type>(y + i, exponential(get<Type>(x + i, n) * scale - largest) * inverse, n);
        });
        clear<Type>(y, count, keys);
    });
}

template <typename Type>
void backward(const void* y_, int causal, float scale, int64_t rows, int64_t queries, int64_t keys, const void* dy_,
              void* dx_, int threads) {
    typedef typename Type::Element Element;
    each_row(rows, keys, threads, [&](int64_t row) {
        const Element* y = static_cast<const Element*>(y_) + row * keys;
        const Element* dy = static_cast<const Element*>(dy_) + row * keys;
        Element* dx = static_cast<Element*>(dx_) + row * keys;
        int64_t count = visible(causal, row, queries, keys);
        Floats products = {};
        vectors(count, [&](int64_t i, int64_t n) { products += get<Type>(y + i, n) * get<Type>(dy + i, n); });
        float product = sum(products);
        vectors(count, [&](int64_t i, int64_t n) {
            put<Type>(dx + i, get<Type>(y + i, n) * (get<Type>(dy + i, n) - product) * scale, n);
        });
        clear<Type>(dx, count, keys);
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. lengths: null where all keys count; one per sequence of per_sequence rows.
EXPORT(softmax)(const void* x, int dtype, const int64_t* lengths, int causal, float scale, int64_t rows,
                int64_t per_sequence, int64_t queries, int64_t keys, void* y, int threads) {
    BY_TYPE(dtype, forward, x, lengths, causal, scale, rows, per_sequence, queries, keys, y, threads);
}

EXPORT(softmax_backward)(const void* y, int dtype, int causal, float scale, int64_t rows, int64_t queries, int64_t keys,
                         const void* dy, void* dx, int threads) {
    BY_TYPE(dtype, backward, y, causal, scale, rows, queries, keys, dy, dx, threads);
}
