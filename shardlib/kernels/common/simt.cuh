// Types, sums and launches that the CUDA kernels share. No headers: the kernels compile with any toolkit, and in the tests on
// a CPU.
#pragma once

typedef long long Int64;
typedef unsigned char Byte;

constexpr int WARP = 32;
constexpr int THREADS = 256, WARPS = THREADS / WARP;

// float and bfloat16 buffers; bfloat16 is the upper half of a float, rounded to nearest even.
struct Float32 {
    typedef float Element;
    static __device__ float get(const float* from) { return *from; }
    static __device__ void put(float* to, float value) { *to = value; }
};

struct BFloat16 {
    typedef unsigned short Element;
    static __device__ float get(const unsigned short* from) { return __uint_as_float((unsigned)*from << 16); }
    static __device__ void put(unsigned short* to, float value) {
        unsigned bits = __float_as_uint(value);
        // A NaN must not round to infinity.
        *to = (unsigned short)((value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16);
    }
};

static __device__ inline bool is_finite(float value) { return value - value == 0; }

// The sum over the threads of a block, always in the same order.
static __device__ inline double block_sum(double value) {
    __shared__ double lanes[THREADS];
    lanes[threadIdx.x] = value;
    __syncthreads();
    for (int step = THREADS / 2; step; step /= 2) {
        if ((int)threadIdx.x < step) lanes[threadIdx.x] += lanes[threadIdx.x + step];
        __syncthreads();
    }
    double sum = lanes[0];
    __syncthreads();
    return sum;
}

static inline Int64 divided_up(Int64 a, Int64 b) { return (a + b - 1) / b; }

// CUDA refuses a launch of no blocks.
#ifndef LAUNCH
#define LAUNCH(kernel, blocks, stream, ...)                                                           \
    do {                                                                                              \
        if ((blocks) > 0) kernel<<<(unsigned)(blocks), THREADS, 0, (cudaStream_t)(stream)>>>(__VA_ARGS__); \
    } while (0)
#endif
