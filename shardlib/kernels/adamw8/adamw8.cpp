// AdamW with moments in 8 bits on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names
// it).
//
// A block's new moments stay in the first-level cache until their largest magnitude is known, and are then coded.
#include "../common/elementwise.h"
#include "../common/rows.h"

namespace {

constexpr int64_t BLOCK = 256;  // as in __init__.py
constexpr float NORMAL = 0x1p-126f;

inline Ints get_codes(const uint8_t* from, int64_t n) {
    if (n == W) return widen(load<Bytes>(from)) & 255;
    uint8_t codes[W] = {};
    memcpy(codes, from, size_t(n));
    return widen(load<Bytes>(codes)) & 255;
}

inline void put_codes(uint8_t* to, Ints codes, int64_t n) {
    Bytes narrow = __builtin_convertvector(codes, Bytes);
    if (n == W) return store(to, narrow);
    memcpy(to, &narrow, size_t(n));
}

inline Floats magnitude(Floats values) { return bitcast<Floats>(bitcast<Ints>(values) & 0x7fffffff); }

// By intrinsics, one instruction each; compilers emit two.
inline Floats lower(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

inline Floats higher(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// The larger of `most` and the magnitudes of `values`, as integers.
inline Ints larger_bits(Ints most, Floats values) {
    Ints bits = bitcast<Ints>(values) & 0x7fffffff;
    return bits > most ? bits : most;
}

// DynamicMap of __init__.py, with BITS bits of magnitude and its `lines`.
template <int BITS>
struct DynamicMap {
    const float* lines;

    Floats decode(Ints codes, float scale) const {
        Floats c = __builtin_convertvector(codes & ((1 << BITS) - 1), Floats);
        Floats fraction = c * lines[2] + lines[3];
        for (int e = 1; e < BITS; ++e) fraction = higher(fraction, c * lines[4 * e + 2] + lines[4 * e + 3]);
        if (BITS == 7) fraction = bitcast<Floats>(bitcast<Ints>(fraction) | (codes & 128) << 24);
        return fraction * scale;
    }

    Ints encode(Floats values, float reciprocal) const {
        const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
        Floats fraction = magnitude(values) * reciprocal;
        Floats height = fraction * lines[0] + lines[1];
        for (int e = 1; e < BITS; ++e) height = lower(height, fraction * lines[4 * e] + lines[4 * e + 1]);
        Ints code = __builtin_convertvector((height + magic) - magic, Ints);
        if (BITS == 8) return code - ((code == 0) & (fraction > 0.0f));
        return code | (bitcast<Ints>(values) >> 24 & 128);
    }

    // Codes the n values of a block and returns its scale. `largest`: the largest magnitude in each lane, as integers.
    float encode_block(const float* values, Ints largest, int64_t n, uint8_t* to) const {
        int32_t most = 0;
        for (int k = 0; k < W; ++k) most = largest[k] > most ? largest[k] : most;
        float scale = bitcast<float>(most);
        if (!__builtin_isfinite(scale)) {
            memset(to, 0, size_t(n));
            return scale;
        }
        if (scale < NORMAL) scale = 0;
        float reciprocal = scale > 0 ? 1 / scale : 0;
        vectors(n, [&](int64_t i, int64_t k) __attribute__((always_inline)) {
            put_codes(to + i, encode(load<Floats>(values + i), reciprocal), k);
        });
        return scale;
    }
};

template <typename Type>
struct Written {
    static void put(typename Type::Element* to, Floats values, int64_t n) { ::put<Type>(to, values, n); }
};

template <>
struct Written<Nothing> {
    static void put(uint16_t*, Floats, int64_t) {}
};

template <typename Kept, typename Grad, typename Copy>
struct AdamW8 {
    typename Kept::Element* param;
    const typename Grad::Element* grad;
    uint8_t* mu;
    float* mu_scales;
    uint8_t* nu;
    float* nu_scales;
    typename Copy::Element* copy;
    DynamicMap<7> with_sign;
    DynamicMap<8> positive;
    float b1, rest1, b2, rest2, decay, size, root, eps, scale;

    void block(int64_t number, int64_t count) const {
        int64_t start = number * BLOCK, n = smaller(BLOCK, count - start);
        float ms[BLOCK + W], vs[BLOCK + W];
        // Magnitudes as integers order like the floats they are, infinity and then NaN on top.
        Ints most_m = {}, most_v = {};
        vectors(n, [&](int64_t i, int64_t k) __attribute__((always_inline)) {
            int64_t at = start + i;
            Floats g = get<Grad>(grad + at, k) * scale;
            Floats m = with_sign.decode(get_codes(mu + at, k), mu_scales[number]) * b1 + g * rest1;
            Floats v = positive.decode(get_codes(nu + at, k), nu_scales[number]) * b2 + g * g * rest2;
            Floats p = get<Kept>(param + at, k) * decay - m * size / (Wide::root(v) * root + eps);
            store(ms + i, m);
            store(vs + i, v);
            most_m = larger_bits(most_m, m);
            most_v = larger_bits(most_v, v);
            put<Kept>(param + at, p, k);
            Written<Copy>::put(copy + at, p, k);
        });
        mu_scales[number] = with_sign.encode_block(ms, most_m, n, mu + start);
        nu_scales[number] = positive.encode_block(vs, most_v, n, nu + start);
    }
};

}  // namespace

EXPORT(adamw8_step)(void* param, int dtype, const void* grad, int grad_dtype, uint8_t* mu, float* mu_scales, uint8_t* nu,
                    float* nu_scales, uint16_t* copy, int copy_dtype, const float* signed_lines,
                    const float* unsigned_lines, int64_t count, float b1, float rest1, float b2, float rest2,
                    float decay, float size, float root, float eps, float scale, int threads) {
    with_types(dtype, grad_dtype, copy_dtype, [&](auto kept, auto read, auto narrow) {
        typedef decltype(kept) Kept;
        typedef decltype(read) Grad;
        AdamW8<Kept, Grad, decltype(narrow)> op = {
            static_cast<typename Kept::Element*>(param), static_cast<const typename Grad::Element*>(grad),
            mu, mu_scales, nu, nu_scales, copy, {signed_lines}, {unsigned_lines},
            b1, rest1, b2, rest2, decay, size, root, eps, scale};
        parallel((count + BLOCK - 1) / BLOCK, enough(threads, count), [&](int64_t first, int64_t last) {
            FlushDenormals flush;
            for (int64_t number = first; number < last; ++number) op.block(number, count);
        });
    });
}
