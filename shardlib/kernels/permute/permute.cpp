// Permutation of rows on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/halves.h"
#include "../common/rows.h"

namespace {

// The rows of tokens' assignments.
struct Positions {
    const int64_t* at;
    int64_t tokens, k, count;

    // Calls body(row, assignment) for every assignment of a token that has a row.
    template <typename Body>
    void of(int64_t token, const Body& body) const {
        for (int64_t a = token * k; a < (token + 1) * k; ++a)
            if (uint64_t(at[a]) < uint64_t(count)) body(at[a], a);
    }
};

// Calls body(token) for every token, which sets filled[row] for each row that it writes; the others are set to 0.
template <typename Body>
void fill(const Positions& positions, int64_t columns, int64_t row_bytes, void* out, uint8_t* filled, int threads,
          const Body& body) {
    each_row(positions.tokens, positions.k * columns, threads, body);
    each_row(positions.count, columns, threads, [&](int64_t row) {
        if (!filled[row]) memset(static_cast<char*>(out) + row * row_bytes, 0, size_t(row_bytes));
    });
}

template <typename Type>
void gather(const typename Type::Element* rows, const Positions& positions, const float* weights, int64_t columns,
            typename Type::Element* y, int threads) {
    each_row(positions.tokens, positions.k * columns, threads, [&](int64_t token) {
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats total = {};
            positions.of(token, [&](int64_t row, int64_t a) {
                Floats term = get<Type>(rows + row * columns + i, n);
                total += weights ? all(weights[a]) * term : term;
            });
            put<Type>(y + token * columns + i, total, n);
        });
    });
}

template <typename Type>
void backward(const typename Type::Element* dy, const typename Type::Element* rows, const Positions& positions,
              const float* weights, int64_t columns, typename Type::Element* drows, float* dweights, uint8_t* filled,
              int threads) {
    memset(dweights, 0, size_t(positions.tokens * positions.k) * sizeof(float));
    fill(positions, columns, columns * int64_t(sizeof(*drows)), drows, filled, threads, [&](int64_t token) {
        positions.of(token, [&](int64_t row, int64_t a) {
            filled[row] = 1;
            Floats weight = all(weights[a]), total = {};
            vectors(columns, [&](int64_t i, int64_t n) {
                Floats d = get<Type>(dy + token * columns + i, n);
                total += d * get<Type>(rows + row * columns + i, n);
                put<Type>(drows + row * columns + i, weight * d, n);
            });
            dweights[a] = sum(total);
        });
    });
}

}  // namespace

// positions: [tokens][k]; filled: [count], all 0.
EXPORT(permute)(const void* x, int64_t element, const int64_t* positions, int64_t tokens, int64_t k, int64_t columns,
                int64_t count, void* out, uint8_t* filled, int threads) {
    const int64_t bytes = columns * element;
    Positions all_of{positions, tokens, k, count};
    fill(all_of, columns, bytes, out, filled, threads, [&](int64_t token) {
        all_of.of(token, [&](int64_t row, int64_t) {
            filled[row] = 1;
            memcpy(static_cast<char*>(out) + row * bytes, static_cast<const char*>(x) + token * bytes, size_t(bytes));
        });
    });
}

// weights may be null. dtype: 0 float, 1 bfloat16, 2 half.
EXPORT(unpermute)(const void* rows, int dtype, const int64_t* positions, const float* weights, int64_t tokens,
                  int64_t k, int64_t columns, void* y, int64_t count, int threads) {
    with_type(dtype, [&](auto type) {
        typedef typename decltype(type)::Element Element;
        gather<decltype(type)>(static_cast<const Element*>(rows), {positions, tokens, k, count}, weights, columns,
                               static_cast<Element*>(y), threads);
    });
}

EXPORT(unpermute_backward)(const void* dy, const void* rows, int dtype, const int64_t* positions, const float* weights,
                           int64_t tokens, int64_t k, int64_t columns, int64_t count, void* drows, float* dweights,
                           uint8_t* filled, int threads) {
    with_type(dtype, [&](auto type) {
        typedef typename decltype(type)::Element Element;
        backward<decltype(type)>(static_cast<const Element*>(dy), static_cast<const Element*>(rows),
                                 {positions, tokens, k, count}, weights, columns, static_cast<Element*>(drows),
                                 dweights, filled, threads);
    });
}
