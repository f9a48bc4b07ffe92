// Loops over flat buffers whose elements are each worked on alone, as optimizers do. A thread has WIDTH consecutive ones: 4,
// read and written at once, where all buffers are aligned to that, else 1. No headers, as in simt.cuh.
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
        else half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000;  // 0.5 has a denormal half's last place
        *to = (unsigned short)(sign | half);
    }
};

// Where there is nothing to write.
struct Nothing {
    typedef unsigned short Element;
};

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

template <typename Type, int WIDTH>
struct Put {
    static __device__ void put(typename Type::Element* to, const float (&values)[WIDTH]) {
        Pack<typename Type::Element, WIDTH> pack;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) Type::put(pack.x + k, values[k]);
        *(Pack<typename Type::Element, WIDTH>*)to = pack;
    }
};

template <int WIDTH>
struct Put<Nothing, WIDTH> {
    static __device__ void put(unsigned short*, const float (&)[WIDTH]) {}
};

template <typename Type, int WIDTH>
static __device__ inline void put(typename Type::Element* to, const float (&values)[WIDTH]) {
    Put<Type, WIDTH>::put(to, values);
}

// op.at<WIDTH>(i) for all elements.
template <int WIDTH, typename Op>
__global__ void __launch_bounds__(THREADS) sweep(Op op, Int64 count) {
    Int64 i = ((Int64)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    if (i + WIDTH <= count) {
        op.template at<WIDTH>(i);
    } else {
        for (; i < count; ++i) op.template at<1>(i);
    }
}

// `addresses`: of all buffers, or'ed together, each divided by the size of its elements.
template <typename Op>
static inline void launch_sweep(const Op& op, Int64 count, unsigned long long addresses, void* stream) {
    if (addresses % 4 == 0)
        LAUNCH((sweep<4, Op>), divided_up(count, THREADS * 4), stream, op, count);
    else
        LAUNCH((sweep<1, Op>), divided_up(count, THREADS), stream, op, count);
}

// visit(Type{}) for a dtype's number.
template <typename Visit>
static inline void with_type(int dtype, Visit visit) {
    if (dtype == 0) visit(Float32{});
    else if (dtype == 1) visit(BFloat16{});
    else visit(Float16{});
}

// The same for what may be missing (-1), and is never float.
template <typename Visit>
static inline void with_copy(int dtype, Visit visit) {
    if (dtype == 1) visit(BFloat16{});
    else if (dtype == 2) visit(Float16{});
    else visit(Nothing{});
}

template <typename Element>
static inline unsigned long long place(const Element* buffer) {
    return (unsigned long long)buffer / sizeof(Element);
}
