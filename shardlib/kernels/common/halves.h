// fp16 buffers, for kernels that take fp32, bf16 and fp16.
#pragma once
#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// IEEE halves, rounded to nearest even.
struct Float16 {
    typedef uint16_t Element;
    static float get(const uint16_t* from) {
        uint32_t sign = uint32_t(*from & 0x8000) << 16, rest = *from & 0x7fff;
        if (rest < 0x400) return bitcast<float>(sign | bitcast<uint32_t>(float(rest) * 0x1p-24f));
        return bitcast<float>(sign | ((rest << 13) + (rest < 0x7c00 ? 0x38000000 : 0x70000000)));
    }
    static void put(uint16_t* to, float value) {
        uint32_t bits = bitcast<uint32_t>(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        uint32_t half;
        if (rest > 0x7f800000) half = 0x7e00 | (rest >> 13 & 0x1ff);  // NaN
        else if (rest >= 0x477ff000) half = 0x7c00;                   // rounds to infinity
        else if (rest >= 0x38800000) half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
        else half = bitcast<uint32_t>(bitcast<float>(rest) + 0.5f) - 0x3f000000;  // 0.5's last unit is a denormal half's
        *to = uint16_t(sign | half);
    }
#if defined(__AVX512F__)
    static Floats load(const uint16_t* from) { return bitcast<Floats>(_mm512_cvtph_ps(::load<__m256i>(from))); }
    static Shorts pack(Floats values) { return bitcast<Shorts>(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__AVX2__)
    static Floats load(const uint16_t* from) { return bitcast<Floats>(_mm256_cvtph_ps(::load<__m128i>(from))); }
    static Shorts pack(Floats values) { return bitcast<Shorts>(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT)); }
#else
    static Floats load(const uint16_t* from) {
        Floats values;
        for (int k = 0; k < W; ++k) values[k] = get(from + k);
        return values;
    }
    static Shorts pack(Floats values) {
        uint16_t halves[W];
        for (int k = 0; k < W; ++k) put(halves + k, values[k]);
        return ::load<Shorts>(halves);
    }
#endif
    static void store(uint16_t* to, Floats values) { ::store(to, pack(values)); }
};

// Calls visit(Type{}) for a dtype: 0 float, 1 bfloat16, 2 half.
template <typename Visit>
inline void with_type(int dtype, Visit visit) {
    if (dtype == 0) visit(Float32{});
    else if (dtype == 1) visit(BFloat16{});
    else visit(Float16{});
}

}  // namespace
