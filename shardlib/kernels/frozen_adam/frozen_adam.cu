// Launchers of the kernels in frozen_adam.cuh, as C functions. They return the runtime's error code, 0 for none.
#include "frozen_adam.cuh"

// scale: may be null, here and below.
extern "C" int local_momentum(float* grad, const float* mu, Int64 count, float b1, float rest1, const double* scale,
                            void* stream) {
    frozen_adam::LocalMomentum op = {grad, mu, scale, b1, rest1};
    launch_sweep(op, count, address(grad) | address(mu), stream);
    return (int)cudaGetLastError();
}

// copy_dtype: 1 bfloat16, 2 half, -1 for none.
extern "C" int frozen_step(float* param, float* mu, const float* nu, unsigned short* copy, int copy_dtype, Int64 count,
                           float size, float eps, float weight_decay, void* stream) {
    with_copy(copy_dtype, [&](auto narrow) {
        frozen_adam::FrozenStep<decltype(narrow)> op = {param, mu, nu, copy, size, eps, weight_decay};
        launch_sweep(op, count, address(param) | address(mu) | address(nu) | address(copy), stream);
    });
    return (int)cudaGetLastError();
}

extern "C" int local_step(const float* grad, float* mu, const float* nu, float* moved, Int64 count, float size, float b1,
                          float rest1, float eps, const double* scale, void* stream) {
    frozen_adam::LocalStep op = {grad, mu, nu, moved, scale, size, b1, rest1, eps};
    launch_sweep(op, count, address(grad) | address(mu) | address(nu) | address(moved), stream);
    return (int)cudaGetLastError();
}

extern "C" int fresh_step(float* mu, float* before, const float* nu, float* fresh, Int64 count, const double* spread,
                          float b1, float rest1, float b2, float rest2, float eps, void* stream) {
    frozen_adam::FreshStep op = {mu, before, nu, fresh, spread, b1, rest1, b2, rest2, eps};
    launch_sweep(op, count, address(mu) | address(before) | address(nu) | address(fresh), stream);
    return (int)cudaGetLastError();
}
