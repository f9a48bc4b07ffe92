// Launchers of the kernels in adamw.cuh, as C functions. They return the runtime's error code, 0 for none.
#include "adamw.cuh"

// dtypes: 0 float, 1 bfloat16, 2 half; of the copy -1 for none. scale: may be null.
extern "C" int adamw_step(void* param, int dtype, const void* grad, int grad_dtype, void* mu, void* nu,
                          unsigned short* copy, int copy_dtype, Int64 count, float b1, float rest1, float b2,
                          float rest2, float decay, float size, float root, float eps, const double* scale,
                          void* stream) {
    with_type(dtype, [&](auto kept) {
        with_type(grad_dtype, [&](auto read) {
            with_copy(copy_dtype, [&](auto narrow) {
                typedef decltype(kept) Kept;
                typedef decltype(read) Grad;
                typedef typename Kept::Element Element;
                adamw::AdamW<Kept, Grad, decltype(narrow)> op = {
                    (Element*)param, (const typename Grad::Element*)grad, (Element*)mu, (Element*)nu, copy, scale,
                    b1, rest1, b2, rest2, decay, size, root, eps};
                launch_sweep(op, count, address(op.param) | address(op.grad) | address(op.mu) | address(op.nu) | address(copy),
                             stream);
            });
        });
    });
    return (int)cudaGetLastError();
}

// scale: may be null.
extern "C" int adam_direction(const float* param, float* grad, float* mu, float* nu, Int64 count, float b1, float rest1,
                              float b2, float rest2, float size, float root, float eps, float weight_decay,
                              const double* scale, void* stream) {
    adamw::Direction op = {param, grad, mu, nu, scale, b1, rest1, b2, rest2, size, root, eps, weight_decay};
    launch_sweep(op, count, address(param) | address(grad) | address(mu) | address(nu), stream);
    return (int)cudaGetLastError();
}
