// Blockwise int8 and int4 on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// A block's elements are collected in the first-level cache, then scaled, rounded and packed. Blocks are independent, so each
// thread takes a range of them.
#include "../common/packed.h"

namespace {

// A source computes the numbers to quantise: fill(a, b, c) returns a pointer to the elements from a, a multiple of W, up to
// b, which it has written to c unless they lie in memory already; b − a ≤ CHUNK.

constexpr int64_t CHUNK = 512;  // floats: few enough that reading memory and computing overlap
constexpr int64_t AHEAD = 1024;  // floats: beyond the 4 KB at which the hardware's prefetching stops

template <typename Type>
struct Tensor {
    const typename Type::Element* x;

    const float* fill(int64_t a, int64_t b, float* c) const {
        float* to = c;
        for (; a + W <= b; a += W, to += W) {
            __builtin_prefetch(x + a + AHEAD);
            store(to, Type::load(x + a));
        }
        for (; a < b; ++a, ++to) *to = Type::get(x + a);
        return c;
    }
};

template <>
struct Tensor<Float32> {
    const float* x;

    const float* fill(int64_t a, int64_t, float*) const { return x + a; }
};

// The source that sums n ranks' values, in rank order.
template <int BITS>
struct Sum {
    const uint8_t* values;
    const float* scales;
    int64_t ranks, bytes, count, block;  // bytes and scales of a rank

    const float* fill(int64_t a, int64_t b, float* c) const {
        for (int64_t from = a, to; from < b; from = to) {
            to = smaller(b, (from / block + 1) * block);
            const float* scale = scales + from / block;
            add<true>(values, *scale, from, to, c + (from - a));
            for (int64_t r = 1; r < ranks; ++r)
                add<false>(values + r * bytes, scale[r * count], from, to, c + (from - a));
        }
        return c;
    }
    template <bool FIRST>
    static void add(const uint8_t* values, float scale, int64_t a, int64_t b, float* c) {
        for (; a + W <= b; a += W, c += W) {
            Floats sum = FIRST ? Floats{} : load<Floats>(c);
            store(c, sum + __builtin_convertvector(Packed<BITS>::load(values, a), Floats) * all(scale));
        }
        for (; a < b; ++a, ++c) *c = (FIRST ? 0 : *c) + float(Packed<BITS>::get(values, a)) * scale;
    }
};

template <typename Source>
struct WithResidual {
    Source source;
    const float* residual;

    const float* fill(int64_t a, int64_t b, float* c) const {
        const float* from = source.fill(a, b, c);
        float* to = c;
        for (; a + W <= b; a += W, from += W, to += W) {
            __builtin_prefetch(from + AHEAD / 2);
            __builtin_prefetch(residual + a + AHEAD / 2);
            store(to, load<Floats>(from) + load<Floats>(residual + a));
        }
        for (; a < b; ++a, ++from, ++to) *to = *from + residual[a];
        return c;
    }
};

// Adding ROUND to a float of up to 22 bits leaves it, rounded to nearest even, in the lowest bits of the sum.
constexpr float ROUND = 12582912;  // 1.5 · 2^23

inline Floats clamp(Floats v, float most) {
    v = v > all(most) ? all(most) : v;
    return v < all(-most) ? all(-most) : v;
}

// The largest magnitude in c, compared as integers, which order like the floats with infinity and then NaN on top.
inline float largest(const float* c, int64_t number) {
    Ints most = {};
    int64_t i = 0;
    for (; i + W <= number; i += W) {
        __builtin_prefetch(c + i + AHEAD);
        Ints magnitude = bitcast<Ints>(load<Floats>(c + i)) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t lanes[W];
    store(lanes, most);
    for (; i < number; ++i) {
        int32_t magnitude = bitcast<int32_t>(c[i]) & 0x7fffffff;
        lanes[0] = magnitude > lanes[0] ? magnitude : lanes[0];
    }
    for (int step = W / 2; step; step /= 2)
        for (int lane = 0; lane < step; ++lane)
            lanes[lane] = lanes[lane] > lanes[lane + step] ? lanes[lane] : lanes[lane + step];
    return bitcast<float>(lanes[0]);
}

// Quantises elements a up to b, given their c; residual may be null.
template <int BITS>
inline void emit(const float* c, int64_t a, int64_t b, float scale, uint8_t* values, float* residual) {
    constexpr float LARGEST = Packed<BITS>::LARGEST;
    int64_t i = a;
    for (; i + W <= b; i += W, c += W) {
        Floats rounded = clamp(load<Floats>(c) / all(scale), LARGEST) + ROUND;
        Packed<BITS>::store(values, i, bitcast<Ints>(rounded) - bitcast<Ints>(all(ROUND)));
        if (residual) store(residual + i, load<Floats>(c) - (rounded - ROUND) * all(scale));
    }
    for (; i < b; ++i, ++c) {
        float v = *c / scale;
        float rounded = (v > LARGEST ? LARGEST : v < -LARGEST ? -LARGEST : v) + ROUND;
        Packed<BITS>::put(values, i, bitcast<int32_t>(rounded) - bitcast<int32_t>(ROUND));
        if (residual) residual[i] = *c - (rounded - ROUND) * scale;
    }
}

// Quantises elements a up to b of one block, given their c; `residual` is unchanged where the scale is not finite.
template <int BITS>
inline void emit_block(const float* c, int64_t a, int64_t b, float scale, uint8_t* values, float* residual) {
    if (__builtin_isfinite(scale) && scale > 0) {
        emit<BITS>(c, a, b, scale, values, residual);
        return;
    }
    memset(values + a * BITS / 8, 0, size_t((b - a) * BITS + 7) / 8);
    if (residual && scale == 0) memcpy(residual + a, c, size_t(b - a) * sizeof(float));
}

// Quantises elements a up to b: many blocks that fill a chunk, or one block of many chunks. All scales are computed before
// all values: a scale is a long chain of dependent instructions, and the chains of different blocks overlap.
template <int BITS, typename Source>
void quantize_unit(const Source& source, int64_t a, int64_t b, int64_t block, uint8_t* values, float* scales,
                   float* residual) {
    alignas(64) float buffer[CHUNK];
    const float* c = buffer;
    for (int64_t from = a; from < b; from += CHUNK) {
        int64_t to = smaller(b, from + CHUNK);
        c = source.fill(from, to, buffer);
        for (int64_t i = from; i < to; i += block) {
            float* most = scales + i / block;
            float magnitude = largest(c + (i - from), smaller(block, to - i));
            if (i % block == 0 || bitcast<int32_t>(magnitude) > bitcast<int32_t>(*most)) *most = magnitude;
        }
    }
    for (int64_t i = a; i < b; i += block) scales[i / block] /= Packed<BITS>::LARGEST;
    for (int64_t from = a; from < b; from += CHUNK) {
        int64_t to = smaller(b, from + CHUNK);
        if (b - a > CHUNK) c = source.fill(from, to, buffer);
        for (int64_t i = from; i < to; i += block)
            emit_block<BITS>(c + (i - from), i, smaller(i + block, to), scales[i / block], values, residual);
    }
}

// The number of threads that pays: starting one takes as long as a megabyte.
inline int useful(int threads, int64_t elements) { return worth(threads, elements, 1 << 18); }

template <int BITS, typename Source>
void quantize(const Source& source, int64_t block, int64_t elements, uint8_t* values, float* scales, float* residual,
              int threads) {
    int64_t unit = larger(block, CHUNK);
    parallel((elements + unit - 1) / unit, useful(threads, elements), [&](int64_t from, int64_t to) {
        for (int64_t a = from * unit; a < smaller(to * unit, elements); a += unit)
            quantize_unit<BITS>(source, a, smaller(a + unit, elements), block, values, scales, residual);
    });
}

template <typename Source>
void quantize(const Source& source, int bits, int64_t block, int64_t elements, uint8_t* values, float* scales,
              float* residual, int threads) {
    WithResidual<Source> corrected = {source, residual};
    if (bits == 8) {
        if (residual)
            quantize<8>(corrected, block, elements, values, scales, residual, threads);
        else
            quantize<8>(source, block, elements, values, scales, residual, threads);
    } else {
        if (residual)
            quantize<4>(corrected, block, elements, values, scales, residual, threads);
        else
            quantize<4>(source, block, elements, values, scales, residual, threads);
    }
}

template <int BITS>
inline Sum<BITS> sum_of(const uint8_t* values, const float* scales, int64_t ranks, int64_t block, int64_t elements) {
    int64_t bytes = BITS == 8 ? elements : (elements + 1) / 2;
    return {values, scales, ranks, bytes, (elements + block - 1) / block, block};
}

// Calls each(a, b) for every chunk.
template <typename Each>
inline void chunks(int64_t elements, int threads, const Each& each) {
    parallel((elements + CHUNK - 1) / CHUNK, useful(threads, elements), [&](int64_t from, int64_t to) {
        for (int64_t a = from * CHUNK; a < smaller(to * CHUNK, elements); a += CHUNK)
            each(a, smaller(a + CHUNK, elements));
    });
}

template <int BITS>
void write(const Sum<BITS>& sum, int64_t elements, void* out, int dtype, int threads) {
    if (dtype == 0) {
        float* floats = static_cast<float*>(out);
        chunks(elements, threads, [&](int64_t a, int64_t b) { sum.fill(a, b, floats + a); });
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(out);
    chunks(elements, threads, [&](int64_t a, int64_t b) {
        alignas(64) float c[CHUNK];
        sum.fill(a, b, c);
        int64_t i = a;
        for (; i + W <= b; i += W) BFloat16::store(halves + i, load<Floats>(c + (i - a)));
        for (; i < b; ++i) BFloat16::put(halves + i, c[i - a]);
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. bits: 8 or 4. block: a power of two from 16 to 4096. residual: may be null.
EXPORT(quantize)(const void* x, int dtype, float* residual, int bits, int64_t block, int64_t elements, uint8_t* values,
                 float* scales, int threads) {
    if (dtype == 0)
        quantize(Tensor<Float32>{static_cast<const float*>(x)}, bits, block, elements, values, scales, residual, threads);
    else
        quantize(Tensor<BFloat16>{static_cast<const uint16_t*>(x)}, bits, block, elements, values, scales, residual,
                 threads);
}

EXPORT(dequantize_sum)(const uint8_t* values, const float* scales, int64_t ranks, int bits, int64_t block,
                       int64_t elements, void* out, int dtype, int threads) {
    if (bits == 8)
        write(sum_of<8>(values, scales, ranks, block, elements), elements, out, dtype, threads);
    else
        write(sum_of<4>(values, scales, ranks, block, elements), elements, out, dtype, threads);
}

EXPORT(dequantize_sum_quantize)(const uint8_t* values, const float* scales, int64_t ranks, int bits, float* residual,
                                int out_bits, int64_t block, int64_t elements, uint8_t* out_values, float* out_scales,
                                int threads) {
    if (bits == 8)
        quantize(sum_of<8>(values, scales, ranks, block, elements), out_bits, block, elements, out_values, out_scales,
                 residual, threads);
    else
        quantize(sum_of<4>(values, scales, ranks, block, elements), out_bits, block, elements, out_values, out_scales,
                 residual, threads);
}
