// The launcher of the kernel in lion.cuh, as a C function. It returns the runtime's error code, 0 for none.
#include "lion.cuh"

// dtypes: 0 float, 1 bfloat16, 2 half; of the copy -1 for none. scale: may be null.
extern "C" int lion_step(void* param, int dtype, const void* grad, int grad_dtype, void* mu, unsigned short* copy,
                         int copy_dtype, Int64 count, float b1, float rest1, float b2, float rest2, float decay,
                         float size, const double* scale, void* stream) {
    with_type(dtype, [&](auto kept) {
        with_type(grad_dtype, [&](auto read) {
            with_copy(copy_dtype, [&](auto narrow) {
                typedef decltype(kept) Kept;
                typedef decltype(read) Grad;
                typedef typename Kept::Element Element;
                lion::Lion<Kept, Grad, decltype(narrow)> op = {
                    (Element*)param, (const typename Grad::Element*)grad, (Element*)mu, copy, scale,
                    b1, rest1, b2, rest2, decay, size};
                launch_sweep(op, count, address(op.param) | address(op.grad) | address(op.mu) | address(copy), stream);
            });
        });
    });
    return (int)cudaGetLastError();
}
