// Launchers of the kernels in quantize.cuh, as C functions. They return the runtime's error code, 0 for none.
#include "quantize.cuh"

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
