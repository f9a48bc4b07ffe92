// fp16 buffers, and reads and writes of several elements at once, for kernels that take fp32, bf16 and fp16. No headers.
#pragma once
#include "simt.cuh"

// IEEE halves, rounded to nearest even.
struct Float16 {
    typedef unsigned short Element;
    static __device__ float get(const unsigned short* from) {
        unsigned sign = (unsigned)(*from & 0x8000) << 16, rest = *from & 0x7fff;
        if (rest < 0x400) return __uint_as_float(sign | __float_as_uint((float)rest * 0x1p-24f));
        return __uint_as_float(sign | ((rest << 13) + (rest < 0x7c00 ? 0x38000000 : 0x70000000)));
    }
    static __device__ void put(unsigned short* to, float value) {
        unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff, half;
        if (rest > 0x7f800000) half = 0x7e00 | (rest >> 13 & 0x1ff);  // NaN
        else if (rest >= 0x477ff000) half = 0x7c00;                   // rounds to infinity
        else if (rest >= 0x38800000) half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
        else half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000;  // 0.5's last unit is a denormal half's
        *to = (unsigned short)(sign | half);
    }
};

// WIDTH consecutive elements, read and written at once; aligned to their total size.
template <typename Element, int WIDTH>
struct alignas(sizeof(Element) * WIDTH) Pack {
    Element x[WIDTH];
};

template <typename Type, int WIDTH>
static __device__ inline void get(const typename Type::Element* from, float (&to)[WIDTH]) {
    Pack<typename Type::Element, WIDTH> pack = *(const Pack<typename Type::Element, WIDTH>*)from;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) to[k] = Type::get(pack.x + k);
}

// Calls visit(Type{}) for a dtype: 0 float, 1 bfloat16, 2 half.
template <typename Visit>
static inline void with_type(int dtype, Visit visit) {
    if (dtype == 0) visit(Float32{});
    else if (dtype == 1) visit(BFloat16{});
    else visit(Float16{});
}
