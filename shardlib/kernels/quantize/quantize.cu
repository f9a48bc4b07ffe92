// Blockwise int8 and int4 on a GPU; see __init__.py for the mathematics. A warp quantises a block; its second pass reads from the
// cache.
#include "../common/simt.cuh"

namespace blockwise {

// A stored value of 8 or 4 bits; two of 4 bits share a byte, the first in the low half.
template <int BITS>
static __device__ inline int value_at(const Byte* values, Int64 i) {
    if (BITS == 8) return (signed char)values[i];
    int nibble = values[i / 2] >> (i % 2 * 4) & 15;
    return nibble - ((nibble & 8) << 1);
}

template <typename Type>
struct Tensor {
    const typename Type::Element* x;
    __device__ float at(Int64 i, Int64) const { return Type::get(x + i); }
};

// The sum of n ranks' values, in rank order; j is the block of element i.
template <int BITS>
struct Sum {
    const Byte* values;
    const float* scales;
    Int64 ranks, bytes, count;  // bytes and scales of a rank

    __device__ float at(Int64 i, Int64 j) const {
        float sum = 0;
        for (Int64 r = 0; r < ranks; ++r) sum += (float)value_at<BITS>(values + r * bytes, i) * scales[r * count + j];
        return sum;
    }
};

template <typename Source>
struct WithResidual {
    Source source;
    const float* residual;
    __device__ float at(Int64 i, Int64 j) const { return source.at(i, j) + residual[i]; }
};

// residual: may be null; unchanged where the scale is not finite.
template <int BITS, typename Source>
__global__ void __launch_bounds__(THREADS)
quantize(Source source, Int64 block, Int64 elements, Byte* values, float* scales, float* residual) {
    constexpr int LARGEST = (1 << (BITS - 1)) - 1;
    Int64 j = (Int64)blockIdx.x * WARPS + threadIdx.x / WARP, first = j * block;
    if (first >= elements) return;  // the whole warp
    Int64 last = first + block < elements ? first + block : elements;
    int lane = threadIdx.x % WARP;
    // Magnitudes as integers order like the floats they are, infinity and then NaN on top.
    int most = 0;
    for (Int64 i = first + lane; i < last; i += WARP) {
        int magnitude = (int)(__float_as_uint(source.at(i, j)) & 0x7fffffff);
        most = magnitude > most ? magnitude : most;
    }
    for (int step = WARP / 2; step; step /= 2) {
        int other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
    }
    float scale = __uint_as_float((unsigned)most) / (float)LARGEST;
    if (lane == 0) scales[j] = scale;
    bool finite = is_finite(scale), usable = finite && scale > 0;
    for (Int64 row = first; row < last; row += WARP) {  // all lanes take part, as they exchange nibbles
        Int64 i = row + lane;
        float c = i < last ? source.at(i, j) : 0;
        int q = usable ? __float2int_rn(fminf(fmaxf(c / scale, (float)-LARGEST), (float)LARGEST)) : 0;
        if (BITS == 8) {
            if (i < last) values[i] = (Byte)q;
        } else {
            int next = __shfl_xor_sync(0xffffffffu, q, 1);
            if (i < last && lane % 2 == 0) values[i / 2] = (Byte)((q & 15) | next << 4);
        }
        if (residual && finite && i < last) residual[i] = c - (float)q * scale;
    }
}

template <typename Type, int BITS>
__global__ void __launch_bounds__(THREADS)
dequantize_sum(Sum<BITS> sum, Int64 block, Int64 elements, typename Type::Element* out) {
    Int64 i = (Int64)blockIdx.x * THREADS + threadIdx.x;
    if (i < elements) Type::put(out + i, sum.at(i, i / block));
}

}  // namespace blockwise

using blockwise::Sum;
using blockwise::Tensor;
using blockwise::WithResidual;

template <typename Source>
static void launch(Source source, int bits, Int64 block, Int64 elements, Byte* values, float* scales, float* residual,
                   void* stream) {
    Int64 grid = divided_up(divided_up(elements, block), WARPS);
    if (bits == 8)
        LAUNCH((blockwise::quantize<8, Source>), grid, stream, source, block, elements, values, scales, residual);
    else
        LAUNCH((blockwise::quantize<4, Source>), grid, stream, source, block, elements, values, scales, residual);
}

template <typename Source>
static void launch_with(float* residual, Source source, int bits, Int64 block, Int64 elements, Byte* values, float* scales,
                        void* stream) {
    if (residual)
        launch(WithResidual<Source>{source, residual}, bits, block, elements, values, scales, residual, stream);
    else
        launch(source, bits, block, elements, values, scales, residual, stream);
}

template <int BITS>
static Sum<BITS> sum_of(const Byte* values, const float* scales, Int64 ranks, Int64 block, Int64 elements) {
    return {values, scales, ranks, BITS == 8 ? elements : (elements + 1) / 2, divided_up(elements, block)};
}

template <int BITS>
static void launch_sum(Sum<BITS> sum, Int64 block, Int64 elements, void* out, int dtype, void* stream) {
    Int64 grid = divided_up(elements, THREADS);
    if (dtype == 0)
        LAUNCH((blockwise::dequantize_sum<Float32, BITS>), grid, stream, sum, block, elements, (float*)out);
    else
        LAUNCH((blockwise::dequantize_sum<BFloat16, BITS>), grid, stream, sum, block, elements, (unsigned short*)out);
}

// dtype: 0 float, 1 bfloat16. bits: 8 or 4. block: a power of two from 16 to 4096. residual: may be null.
extern "C" int quantize(const void* x, int dtype, float* residual, int bits, Int64 block, Int64 elements,
                               Byte* values, float* scales, void* stream) {
    if (dtype == 0)
        launch_with(residual, Tensor<Float32>{(const float*)x}, bits, block, elements, values, scales, stream);
    else
        launch_with(residual, Tensor<BFloat16>{(const unsigned short*)x}, bits, block, elements, values, scales, stream);
    return (int)cudaGetLastError();
}

extern "C" int dequantize_sum(const Byte* values, const float* scales, Int64 ranks, int bits, Int64 block,
                              Int64 elements, void* out, int dtype, void* stream) {
    if (bits == 8)
        launch_sum(sum_of<8>(values, scales, ranks, block, elements), block, elements, out, dtype, stream);
    else
        launch_sum(sum_of<4>(values, scales, ranks, block, elements), block, elements, out, dtype, stream);
    return (int)cudaGetLastError();
}

extern "C" int dequantize_sum_quantize(const Byte* values, const float* scales, Int64 ranks, int bits, float* residual,
                                       int out_bits, Int64 block, Int64 elements, Byte* out_values, float* out_scales,
                                       void* stream) {
    if (bits == 8)
        launch_with(residual, sum_of<8>(values, scales, ranks, block, elements), out_bits, block, elements, out_values,
                    out_scales, stream);
    else
        launch_with(residual, sum_of<4>(values, scales, ranks, block, elements), out_bits, block, elements, out_values,
                    out_scales, stream);
    return (int)cudaGetLastError();
}
