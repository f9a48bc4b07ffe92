// AdamW and Adam's direction on a GPU; see op.py for the mathematics.
#pragma once
#include "../common/elementwise.cuh"

namespace adamw {

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
    float b1, rest1, b2, rest2, size, root, eps, weight_decay;

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

}  // namespace adamw
