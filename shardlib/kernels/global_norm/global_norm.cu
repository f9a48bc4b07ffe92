// Σ x² on a GPU; see __init__.py. A block sums a tile, then one block sums the tiles: the same bits on every run.
#include "../common/halves.cuh"

namespace global_norm {

constexpr int TILE = 8192;  // elements of a thread block

template <typename Type, int WIDTH>
__global__ void __launch_bounds__(THREADS) tiles(const typename Type::Element* x, Int64 count, double* partial) {
    Int64 first = (Int64)blockIdx.x * TILE;
    double sum = 0;
#pragma unroll
    for (int k = 0; k < TILE; k += THREADS * WIDTH) {
        Int64 i = first + k + (int)threadIdx.x * WIDTH;
        if (i + WIDTH <= count) {
            float values[WIDTH];
            get<Type>(x + i, values);
#pragma unroll
            for (int lane = 0; lane < WIDTH; ++lane) sum += (double)values[lane] * values[lane];
        } else {
            for (; i < count; ++i) sum += (double)Type::get(x + i) * Type::get(x + i);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Adds the tiles' sums; runs as one thread block.
static __global__ void __launch_bounds__(THREADS) total(const double* partial, Int64 tiles, double* out) {
    double sum = 0;
    for (Int64 tile = threadIdx.x; tile < tiles; tile += THREADS) sum += partial[tile];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

}  // namespace global_norm

using namespace global_norm;

// dtype: 0 float, 1 bfloat16, 2 half. partial: a double per tile.
extern "C" int sum_of_squares(const void* x, int dtype, Int64 count, double* partial, double* out, void* stream) {
    Int64 number = divided_up(count, TILE);
    with_type(dtype, [&](auto type) {
        typedef decltype(type) Type;
        const typename Type::Element* from = (const typename Type::Element*)x;
        if ((unsigned long long)x % (4 * sizeof(*from)) == 0)
            LAUNCH((tiles<Type, 4>), number, stream, from, count, partial);
        else
            LAUNCH((tiles<Type, 1>), number, stream, from, count, partial);
    });
    LAUNCH(global_norm::total, 1, stream, partial, number, out);
    return (int)cudaGetLastError();
}
