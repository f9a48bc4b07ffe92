// Launchers of the kernels in onebit.cuh, as C functions. They return the runtime's error code, 0 for none.
#include "onebit.cuh"

using namespace onebit;

// offsets and first are null for blocks of a multiple of 32 elements; block is 0 for all other segments.
// partial: tiles + count doubles; unused for blocks.
template <typename Source>
static void compress(Source source, float* residual, const Segments& segments, Byte* bits, float* scales, double* partial,
                     void* stream) {
    if (segments.block) {
        LAUNCH(onebit::blocks<Source>, divided_up(segments.count, WARPS), stream, source, residual, segments, bits, scales);
        return;
    }
    Int64 tiles = divided_up(segments.length, TILE);
    LAUNCH(onebit::signs<Source>, tiles, stream, source, residual, segments, bits, partial);
    LAUNCH(onebit::scales, segments.count, stream, partial, segments, scales);
    LAUNCH(onebit::residuals<Source>, tiles, stream, source, residual, segments, scales);
}

// dtype: 0 float, 1 bfloat16.
extern "C" int onebit_compress(const void* x, int dtype, float* residual, const Int64* offsets, const Int64* first,
                               Int64 block, Int64 count, Int64 elements, Int64 length, Byte* bits, float* scales,
                               double* partial, void* stream) {
    Segments segments = {offsets, first, block, count, elements, length};
    if (dtype == 0)
        compress(Tensor<Float32>{(const float*)x}, residual, segments, bits, scales, partial, stream);
    else
        compress(Tensor<BFloat16>{(const unsigned short*)x}, residual, segments, bits, scales, partial, stream);
    return (int)cudaGetLastError();
}

extern "C" int onebit_average(const Byte* bits, const float* scales, Int64 ranks, const Int64* offsets,
                              const Int64* first, Int64 block, Int64 count, Int64 elements, Int64 length, float* out,
                              void* stream) {
    Segments segments = {offsets, first, block, count, elements, length};
    Mean mean = {bits, scales, ranks, (length + 7) / 8, count};
    LAUNCH(onebit::average, divided_up(length, TILE), stream, mean, segments, out);
    return (int)cudaGetLastError();
}

extern "C" int onebit_average_compress(const Byte* bits, const float* scales, Int64 ranks, float* residual,
                                       const Int64* offsets, const Int64* first, Int64 block, Int64 count,
                                       Int64 elements, Int64 length, Byte* out_bits, float* out_scales,
                                       double* partial, void* stream) {
    Segments segments = {offsets, first, block, count, elements, length};
    Mean mean = {bits, scales, ranks, (length + 7) / 8, count};
    compress(mean, residual, segments, out_bits, out_scales, partial, stream);
    return (int)cudaGetLastError();
}
