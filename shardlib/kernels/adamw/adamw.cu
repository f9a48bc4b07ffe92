// AdamW and Adam's direction on a GPU; see __init__.py for the mathematics.
#include "../common/elementwise.cuh"

namespace steps {

template <typename Kept, typename Grad, typename Copy>
struct AdamW {
    typename Kept::Element* param;
    const typename Grad::Element* grad;
    typename Kept::Element *mu, *nu;
    typename Copy::Element* copy;
    const double* scale;
    float b1, rest1, b2, rest2, decay, size, root, eps;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float p[WIDTH], g[WIDTH], m[WIDTH], v[WIDTH];
        get<Kept>(param + i, p);
        get<Grad>(grad + i, g);
        get<Kept>(mu + i, m);
        get<Kept>(nu + i, v);
        float factor = scale ? (float)*scale : 1;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            g[k] *= factor;
            m[k] = m[k] * b1 + g[k] * rest1;
            v[k] = v[k] * b2 + g[k] * g[k] * rest2;
            p[k] = p[k] * decay - m[k] * size / (sqrtf(v[k]) * root + eps);
        }
        put<Kept>(mu + i, m);
        put<Kept>(nu + i, v);
        put<Kept>(param + i, p);
        put<Copy>(copy + i, p);
    }
};

struct Direction {
    const float* param;
    float *grad, *mu, *nu;
    const double* scale;
    float b1, rest1, b2, rest2, weight_decay, size, root, eps;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float p[WIDTH], g[WIDTH], m[WIDTH], v[WIDTH];
        get<Float32>(param + i, p);
        get<Float32>(grad + i, g);
        get<Float32>(mu + i, m);
        get<Float32>(nu + i, v);
        float factor = scale ? (float)*scale : 1;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            g[k] *= factor;
            m[k] = m[k] * b1 + g[k] * rest1;
            v[k] = v[k] * b2 + g[k] * g[k] * rest2;
            g[k] = m[k] * size / (sqrtf(v[k]) * root + eps) + p[k] * weight_decay;
        }
        put<Float32>(mu + i, m);
        put<Float32>(nu + i, v);
        put<Float32>(grad + i, g);
    }
};

}  // namespace steps

// scale: may be null, here and below.
extern "C" int adamw(void* param, int dtype, const void* grad, int grad_dtype, void* mu, void* nu, unsigned short* copy,
                     int copy_dtype, Int64 count, float b1, float rest1, float b2, float rest2, float decay, float size,
                     float root, float eps, const double* scale, void* stream) {
    with_types(dtype, grad_dtype, copy_dtype, [&](auto kept, auto read, auto narrow) {
        typedef decltype(kept) Kept;
        typedef decltype(read) Grad;
        typedef typename Kept::Element Element;
        steps::AdamW<Kept, Grad, decltype(narrow)> op = {
            (Element*)param, (const typename Grad::Element*)grad, (Element*)mu, (Element*)nu, copy, scale,
            b1, rest1, b2, rest2, decay, size, root, eps};
        launch_sweep(op, count, address(op.param) | address(op.grad) | address(op.mu) | address(op.nu) | address(copy),
                     stream);
    });
    return (int)cudaGetLastError();
}

extern "C" int adam_direction(const float* param, float* grad, float* mu, float* nu, Int64 count, float b1, float rest1,
                              float b2, float rest2, float weight_decay, float size, float root, float eps,
                              const double* scale, void* stream) {
    steps::Direction op = {param, grad, mu, nu, scale, b1, rest1, b2, rest2, weight_decay, size, root, eps};
    launch_sweep(op, count, address(param) | address(grad) | address(mu) | address(nu), stream);
    return (int)cudaGetLastError();
}
