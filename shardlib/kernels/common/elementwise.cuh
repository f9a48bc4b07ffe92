// Loops over flat buffers whose elements are each worked on alone, as optimizers do. A thread has WIDTH consecutive ones: 4,
// read and written at once, where all buffers are aligned to that, else 1. No headers, as in simt.cuh.
#pragma once
#include "halves.cuh"

// Where there is nothing to write.
struct Nothing {
    typedef unsigned short Element;
};

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

// visit(Type{}) for the number of a dtype that may be missing (-1), and is never float.
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
