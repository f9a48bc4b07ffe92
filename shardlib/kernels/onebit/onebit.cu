// 1-bit compression on a GPU; see __init__.py for the mathematics. A warp reads 32 consecutive elements at a time and packs their
// signs by one ballot. Sums are fp64 in a fixed order: the same bits on every run.
#include "../common/simt.cuh"

namespace onebit {

constexpr int TILE = 2048, ROWS = TILE / THREADS;  // elements of a thread block; of a thread

struct Segments {
    const Int64* offsets;
    const Int64* first;  // of every tile, the first segment; see Segments.first in segments.py
    Int64 block, count, elements, length;

    __device__ Int64 bytes() const { return (length + 7) / 8; }
};

template <typename Type>
struct Tensor {
    const typename Type::Element* x;
    __device__ float at(Int64 i, Int64) const { return Type::get(x + i); }
};

// The mean over ranks of ±scale, summed in rank order.
struct Mean {
    const Byte* bits;
    const float* scales;
    Int64 ranks, bytes, count;

    __device__ float at(Int64 i, Int64 j) const {
        float sum = 0;
        for (Int64 r = 0; r < ranks; ++r) {
            float scale = scales[r * count + j];
            sum += bits[r * bytes + i / 8] >> (i % 8) & 1 ? scale : -scale;
        }
        return sum / (float)ranks;
    }
};

// The segment of element i, searched from j, the segment of an earlier element.
static __device__ inline Int64 segment_of(const Segments& segments, Int64 i, Int64 j) {
    while (segments.offsets[j + 1] <= i) ++j;
    return j;
}

// Packs the signs of a warp whose first element is i; every lane calls it.
static __device__ inline void store_signs(bool positive, Int64 i, int lane, const Segments& segments, Byte* bits) {
    unsigned word = __ballot_sync(0xffffffffu, positive);
    Int64 byte = i / 8 + lane;
    if (lane < 4 && byte < segments.bytes()) bits[byte] = (Byte)(word >> (8 * lane));
}

static __device__ inline float without(float c, float scale) { return c - (c >= 0 ? scale : -scale); }

// The first element of a warp's row in its tile.
static __device__ inline Int64 row_start(Int64 tile, int row) {
    return tile * TILE + (threadIdx.x / WARP * ROWS + row) * WARP;
}

// Packs the signs, and writes Σ c² over the tile's elements of segment j to partial[tile + j], which no two of them share.
template <typename Source>
__global__ void __launch_bounds__(THREADS)
signs(Source source, const float* residual, Segments segments, Byte* bits, double* partial) {
    Int64 tile = blockIdx.x, low = segments.first[tile], high = segments.first[tile + 1];
    int lane = threadIdx.x % WARP;
    float c[ROWS];
    Int64 j = low;
    Int64 segment[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        Int64 start = row_start(tile, row), i = start + lane;
        bool inside = i < segments.elements;
        if (inside) j = segment_of(segments, i, j);
        segment[row] = inside ? j : -1;
        c[row] = inside ? source.at(i, j) + residual[i] : 0;
        store_signs(c[row] >= 0 || !inside, start, lane, segments, bits);
    }
    for (j = low; j <= high; ++j) {
        double sum = 0;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            if (segment[row] == j) sum += (double)c[row] * c[row];
        sum = block_sum(sum);
        if (threadIdx.x == 0) partial[tile + j] = sum;
    }
}

// A thread block per segment.
static __global__ void __launch_bounds__(THREADS) scales(const double* partial, Segments segments, float* out) {
    Int64 j = blockIdx.x, start = segments.offsets[j], stop = segments.offsets[j + 1];
    double sum = 0;
    if (stop > start)
        for (Int64 tile = start / TILE + threadIdx.x; tile <= (stop - 1) / TILE; tile += THREADS) sum += partial[tile + j];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[j] = stop > start ? (float)sqrt(sum / (double)(stop - start)) : 0;
}

// residual = c − scale·sgn(c); unchanged where the scale is not finite, 0 in the padding.
template <typename Source>
__global__ void __launch_bounds__(THREADS)
residuals(Source source, float* residual, Segments segments, const float* scales) {
    Int64 tile = blockIdx.x, j = segments.first[tile];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        Int64 i = row_start(tile, row) + threadIdx.x % WARP;
        if (i < segments.elements) {
            j = segment_of(segments, i, j);
            float scale = scales[j];
            if (is_finite(scale)) residual[i] = without(source.at(i, j) + residual[i], scale);
        } else if (i < segments.length) {
            residual[i] = 0;
        }
    }
}

// The whole compression in one kernel, a warp per block of a multiple of 32 elements; the second pass reads from the cache.
template <typename Source>
__global__ void __launch_bounds__(THREADS)
blocks(Source source, float* residual, Segments segments, Byte* bits, float* scales) {
    Int64 j = (Int64)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (j >= segments.count) return;  // the whole warp
    int lane = threadIdx.x % WARP;
    Int64 first = j * segments.block, filled = segments.elements - first;
    filled = filled < 0 ? 0 : filled < segments.block ? filled : segments.block;
    double sum = 0;
    for (Int64 i = first + lane; i < first + segments.block; i += WARP) {
        bool valid = i < segments.elements;
        float c = valid ? source.at(i, j) + residual[i] : 0;
        store_signs(c >= 0 || !valid, i - lane, lane, segments, bits);
        sum += (double)c * c;
    }
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    float scale = filled ? (float)sqrt(sum / (double)filled) : 0;
    if (lane == 0) scales[j] = scale;
    for (Int64 i = first + lane; i < first + segments.block && i < segments.length; i += WARP) {
        if (i >= segments.elements)
            residual[i] = 0;
        else if (is_finite(scale))
            residual[i] = without(source.at(i, j) + residual[i], scale);
    }
}

static __global__ void __launch_bounds__(THREADS) average(Mean mean, Segments segments, float* out) {
    Int64 tile = blockIdx.x, j = segments.block ? 0 : segments.first[tile];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        Int64 i = row_start(tile, row) + threadIdx.x % WARP;
        if (i < segments.elements) {
            j = segments.block ? i / segments.block : segment_of(segments, i, j);
            out[i] = mean.at(i, j);
        } else if (i < segments.length) {
            out[i] = 0;
        }
    }
}

}  // namespace onebit

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
