// Lion on a GPU; see __init__.py for the mathematics.
#include "../common/elementwise.cuh"

namespace steps {

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

}  // namespace steps

// scale: may be null.
extern "C" int lion(void* param, int dtype, const void* grad, int grad_dtype, void* mu, unsigned short* copy,
                    int copy_dtype, Int64 count, float b1, float rest1, float b2, float rest2, float decay, float size,
                    const double* scale, void* stream) {
    with_types(dtype, grad_dtype, copy_dtype, [&](auto kept, auto read, auto narrow) {
        typedef decltype(kept) Kept;
        typedef decltype(read) Grad;
        typedef typename Kept::Element Element;
        steps::Lion<Kept, Grad, decltype(narrow)> op = {
            (Element*)param, (const typename Grad::Element*)grad, (Element*)mu, copy, scale,
            b1, rest1, b2, rest2, decay, size};
        launch_sweep(op, count, address(op.param) | address(op.grad) | address(op.mu) | address(copy), stream);
    });
    return (int)cudaGetLastError();
}
