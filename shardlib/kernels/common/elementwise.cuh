// Loops over flat buffers for elementwise operations, such as optimizers' steps. A thread has WIDTH consecutive elements: 4,
// read and written at once, where all buffers are aligned to 4 elements, else 1. No headers, as in simt.cuh.
#pragma once
#include "halves.cuh"

// The type of a copy that is not asked for: nothing is written.
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

// Calls op.at<WIDTH>(i) over all elements.
template <int WIDTH, typename Op>
__global__ void __launch_bounds__(THREADS) sweep(Op op, Int64 count) {
    Int64 i = ((Int64)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    if (i + WIDTH <= count) {
        op.template at<WIDTH>(i);
    } else {
        for (; i < count; ++i) op.template at<1>(i);
    }
}

// `addresses`: the address of all buffers, or'ed together.
template <typename Op>
static inline void launch_sweep(const Op& op, Int64 count, unsigned long long addresses, void* stream) {
    if (addresses % 4 == 0)
        LAUNCH((sweep<4, Op>), divided_up(count, THREADS * 4), stream, op, count);
    else
        LAUNCH((sweep<1, Op>), divided_up(count, THREADS), stream, op, count);
}

// Calls visit(Type{}) for the dtype of a copy: 1 bfloat16, 2 half, -1 for no copy.
template <typename Visit>
static inline void with_copy(int dtype, Visit visit) {
    if (dtype == 1) visit(BFloat16{});
    else if (dtype == 2) visit(Float16{});
    else visit(Nothing{});
}

// Calls visit(Type{}, Type{}, Type{}) for the dtypes of a step's states, gradient and copy: 0 float, 1 bfloat16, 2 half; of the
// copy -1 for none.
template <typename Visit>
static inline void with_types(int dtype, int grad_dtype, int copy_dtype, Visit visit) {
    with_type(dtype, [&](auto kept) {
        with_type(grad_dtype, [&](auto read) {
            with_copy(copy_dtype, [&](auto narrow) { visit(kept, read, narrow); });
        });
    });
}

// A buffer's address in units of its elements.
template <typename Element>
static inline unsigned long long address(const Element* buffer) {
    return (unsigned long long)buffer / sizeof(Element);
}
