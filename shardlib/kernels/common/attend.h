// Attention of one new token of each sequence to a cache.
//
// A sequence and a head of keys are one piece of work: keys are read once for all heads that share them, then values.
#pragma once

#include "rows.h"
#include "simd_math.h"

namespace {

template <typename Type>
void attend(const void* q_, const void* k_, const void* v_, void* keys_, void* values_, const int64_t* rows, const int64_t* starts,
            int64_t number, int64_t heads, int64_t kv_heads, int64_t room, int64_t size, int64_t window, float* scores_,
            void* y_, int threads) {
    typedef typename Type::Element Element;
    const int64_t group = heads / kv_heads;
    const float scale = 1.0f / __builtin_sqrtf(float(size));
    parallel(number * kv_heads, worth(threads, number * heads * room * size, 1 << 18), [&](int64_t from, int64_t to) {
        for (int64_t piece = from; piece < to; ++piece) {
            const int64_t i = piece / kv_heads, g = piece % kv_heads, n = starts[i] + 1, seen = larger(0, n - window);
            const Element* q = static_cast<const Element*>(q_) + (i * heads + g * group) * size;
            Element* y = static_cast<Element*>(y_) + (i * heads + g * group) * size;
            Element* keys = static_cast<Element*>(keys_) + (rows[i] * kv_heads + g) * room * size;
            Element* values = static_cast<Element*>(values_) + (rows[i] * kv_heads + g) * room * size;
            float* scores = scores_ + piece * group * room;
            memcpy(keys + (n - 1) * size, static_cast<const Element*>(k_) + piece * size, size_t(size) * sizeof(Element));
            memcpy(values + (n - 1) * size, static_cast<const Element*>(v_) + piece * size, size_t(size) * sizeof(Element));
            for (int64_t t = seen; t < n; ++t)
                for (int64_t h = 0; h < group; ++h) {
                    Floats products = {};
                    vectors(size, [&](int64_t j, int64_t m) {
                        products = fma(get<Type>(q + h * size + j, m), get<Type>(keys + t * size + j, m), products);
                    });
                    scores[h * room + t] = sum(products) * scale;
                }
            for (int64_t h = 0; h < group; ++h) {
                float* s = scores + h * room;
                float most = s[seen];
                for (int64_t t = seen; t < n; ++t) most = s[t] > most ? s[t] : most;
                Floats sums = {};
                vectors(n - seen, [&](int64_t t, int64_t m) {
                    const Floats odds = first(exponential(get<Float32>(s + seen + t, m) - most), m);
                    put<Float32>(s + seen + t, odds, m);
                    sums += odds;
                });
                const float share = 1.0f / sum(sums);
                vectors(size, [&](int64_t j, int64_t m) {
                    Floats mean = {};
                    for (int64_t t = seen; t < n; ++t) mean = fma(all(s[t]), get<Type>(values + t * size + j, m), mean);
                    put<Type>(y + h * size + j, mean * all(share), m);
                });
            }
        }
    });
}

}  // namespace
