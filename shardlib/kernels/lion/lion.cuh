// Lion on a GPU; see op.py for the mathematics.
#pragma once
#include "../common/elementwise.cuh"

namespace lion {

template <typename Kept, typename Grad, typename Copy>
struct Lion {
    typename Kept::Element* param;
    const typename Grad::Element* grad;
    typename Kept::Element* mu;
    typename Copy::Element* copy;
    const double* scale;
    float b1, rest1, b2, rest2, decay, size;

    template <int WIDTH>
    __device__ void at(Int64 i) const {
        float p[WIDTH], g[WIDTH], m[WIDTH];
        get<Kept>(param + i, p);
        get<Grad>(grad + i, g);
        get<Kept>(mu + i, m);
        float factor = scale ? (float)*scale : 1;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            g[k] *= factor;
            float c = m[k] * b1 + g[k] * rest1;
            p[k] = p[k] * decay - (c > 0 ? size : c < 0 ? -size : c - c);  // NaN stays
            m[k] = m[k] * b2 + g[k] * rest2;
        }
        put<Kept>(mu + i, m);
        put<Kept>(param + i, p);
        put<Copy>(copy + i, p);
    }
};

}  // namespace lion
