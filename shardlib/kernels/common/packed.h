// Integers of 8 or 4 bits in memory, a vector at a time.
#pragma once

#include "simd.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "nibbles are packed in pairs of bytes");

namespace {

typedef uint16_t Pairs __attribute__((vector_size(W)));           // two bytes of Bytes each
typedef uint8_t HalfBytes __attribute__((vector_size(W / 2)));    // one byte of each pair

// Stored values of 8 or 4 bits; two of 4 bits share a byte, the first in the low half.
template <int BITS>
struct Packed;

template <>
struct Packed<8> {
    static constexpr float LARGEST = 127;
    static Ints load(const uint8_t* values, int64_t i) {
        return widen(::load<Bytes>(values + i));
    }
    static int get(const uint8_t* values, int64_t i) { return int8_t(values[i]); }
    static void store(uint8_t* values, int64_t i, Ints q) { ::store(values + i, __builtin_convertvector(q, Bytes)); }
    static void put(uint8_t* values, int64_t i, int q) { values[i] = uint8_t(q); }
};

template <>
struct Packed<4> {
    static constexpr float LARGEST = 7;
    static Ints load(const uint8_t* values, int64_t i) {
        Pairs pairs = __builtin_convertvector(::load<HalfBytes>(values + i / 2), Pairs);
        Bytes nibbles = bitcast<Bytes>(Pairs((pairs | pairs << 4) & 0x0f0f));
        return widen((nibbles ^ 8) - 8);
    }
    static int get(const uint8_t* values, int64_t i) {
        int nibble = values[i / 2] >> (i % 2 * 4) & 15;
        return nibble - ((nibble & 8) << 1);
    }
    static void store(uint8_t* values, int64_t i, Ints q) {
        Pairs pairs = bitcast<Pairs>(__builtin_convertvector(q, Bytes));
        ::store(values + i / 2, __builtin_convertvector((pairs & 0x0f) | (pairs >> 4 & 0xf0), HalfBytes));
    }
    // In order: an even element clears the half above it, which the next one fills.
    static void put(uint8_t* values, int64_t i, int q) {
        values[i / 2] = uint8_t(i % 2 ? values[i / 2] | q << 4 : q & 15);
    }
};

}  // namespace
