// Weights [rows][columns] as they lie in memory, read as floats W columns at a time.
#pragma once

#include "packed.h"
#include "rows.h"

namespace {

// fp32 or bf16.
template <typename Type>
struct Plain {
    const typename Type::Element* at;
    int64_t columns;

    Floats load(int64_t row, int64_t i) const { return Type::load(at + row * columns + i); }
    Floats load(int64_t row, int64_t i, int64_t n) const { return get<Type>(at + row * columns + i, n); }
    const void* address(int64_t row, int64_t i) const { return at + row * columns + i; }
};

// Integers, with a scale for each block. Rows are whole blocks, and blocks are whole vectors.
template <int BITS>
struct Blocks {
    const uint8_t* at;
    const float* scales;
    int64_t columns, block;

    Floats load(int64_t row, int64_t i) const {
        const Floats values = __builtin_convertvector(Packed<BITS>::load(at, row * columns + i), Floats);
        return values * all(scales[(row * columns + i) / block]);
    }
    Floats load(int64_t row, int64_t i, int64_t) const { return load(row, i); }
    const void* address(int64_t row, int64_t i) const { return at + (row * columns + i) * BITS / 8; }
};

}  // namespace
