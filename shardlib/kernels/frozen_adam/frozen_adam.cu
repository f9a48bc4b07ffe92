// Adam's steps with a frozen variance on a GPU; see __init__.py for the mathematics.
#include "../common/elementwise.cuh"

namespace steps {

// m̄: m where v is not zero, else zero, or NaN if m is not finite.
static __device__ inline float masked(float m, float v) { return v == 0 ? m - m : m; }

struct LocalMomentum {
    float* grad;
    const float* mu;
    const double* scale;
    float b1, rest1;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float g[WIDTH], m[WIDTH];
        get<Float32>(grad + i, g);
        get<Float32>(mu + i, m);
        float factor = scale ? (float)*scale : 1;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) g[k] = m[k] * b1 + g[k] * factor * rest1;
        put<Float32>(grad + i, g);
    }
};

template <typename Copy>
struct FrozenStep {
    float *param, *mu;
    const float* nu;
    typename Copy::Element* copy;
    float size, eps, weight_decay;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float p[WIDTH], m[WIDTH], v[WIDTH];
        get<Float32>(param + i, p);
        get<Float32>(mu + i, m);
        get<Float32>(nu + i, v);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            m[k] = masked(m[k], v[k]);
            p[k] += (m[k] / (sqrtf(v[k]) + eps) + p[k] * weight_decay) * size;
        }
        put<Float32>(mu + i, m);
        put<Float32>(param + i, p);
        put<Copy>(copy + i, p);
    }
};

struct LocalStep {
    const float* grad;
    float* mu;
    const float* nu;
    float* moved;
    const double* scale;
    float size, b1, rest1, eps;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float g[WIDTH], m[WIDTH], v[WIDTH], u[WIDTH];
        get<Float32>(grad + i, g);
        get<Float32>(mu + i, m);
        get<Float32>(nu + i, v);
        get<Float32>(moved + i, u);
        float factor = scale ? (float)*scale : 1;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            m[k] = m[k] * b1 + g[k] * factor * rest1;
            m[k] = masked(m[k], v[k]);
            u[k] += m[k] / (sqrtf(v[k]) + eps) * size;
        }
        put<Float32>(mu + i, m);
        put<Float32>(moved + i, u);
    }
};

struct FreshStep {
    float *mu, *before;
    const float* nu;
    float* fresh;
    const double* spread;
    float b1, rest1, b2, rest2, eps;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float m[WIDTH], b[WIDTH], v[WIDTH], f[WIDTH];
        get<Float32>(mu + i, m);
        get<Float32>(before + i, b);
        get<Float32>(nu + i, v);
        get<Float32>(fresh + i, f);
        float factor = (float)*spread;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            m[k] = masked(m[k] / factor, v[k]);
            float g = (m[k] - b[k] * b1) / rest1;
            f[k] = f[k] * b2 + g * g * rest2;
            b[k] = m[k] / (sqrtf(v[k]) + eps);
        }
        put<Float32>(mu + i, m);
        put<Float32>(fresh + i, f);
        put<Float32>(before + i, b);
    }
};

}  // namespace steps

// scale: may be null, here and below.
extern "C" int local_momentum(float* grad, const float* mu, Int64 count, float b1, float rest1, const double* scale,
                            void* stream) {
    steps::LocalMomentum op = {grad, mu, scale, b1, rest1};
    launch_sweep(op, count, address(grad) | address(mu), stream);
    return (int)cudaGetLastError();
}

// copy_dtype: 1 bfloat16, 2 half, -1 for none.
extern "C" int frozen_step(float* param, float* mu, const float* nu, unsigned short* copy, int copy_dtype, Int64 count,
                           float size, float eps, float weight_decay, void* stream) {
    with_copy(copy_dtype, [&](auto narrow) {
        steps::FrozenStep<decltype(narrow)> op = {param, mu, nu, copy, size, eps, weight_decay};
        launch_sweep(op, count, address(param) | address(mu) | address(nu) | address(copy), stream);
    });
    return (int)cudaGetLastError();
}

extern "C" int local_step(const float* grad, float* mu, const float* nu, float* moved, Int64 count, float size, float b1,
                          float rest1, float eps, const double* scale, void* stream) {
    steps::LocalStep op = {grad, mu, nu, moved, scale, size, b1, rest1, eps};
    launch_sweep(op, count, address(grad) | address(mu) | address(nu) | address(moved), stream);
    return (int)cudaGetLastError();
}

extern "C" int fresh_step(float* mu, float* before, const float* nu, float* fresh, Int64 count, float b1, float rest1,
                          float b2, float rest2, float eps, const double* spread, void* stream) {
    steps::FreshStep op = {mu, before, nu, fresh, spread, b1, rest1, b2, rest2, eps};
    launch_sweep(op, count, address(mu) | address(before) | address(nu) | address(fresh), stream);
    return (int)cudaGetLastError();
}
