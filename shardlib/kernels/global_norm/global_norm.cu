// The launcher of the kernels in global_norm.cuh, as a C function. It returns the runtime's error code, 0 for none.
#include "global_norm.cuh"

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
