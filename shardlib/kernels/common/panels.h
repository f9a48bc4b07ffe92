// Factors of bf16 products as AMX tiles read them: panels of 16 lines, a tile of 16 × 16 pairs of numbers after the other.
// A line is a row of the left factor or a column of the right one. Lines and numbers that are missing in a tile are 0.
#pragma once

#include "amx.h"
#include "transpose.h"

namespace {

constexpr int64_t LINES = 16;       // of a panel
constexpr int64_t DEEP = 32;        // numbers of a line in a tile
constexpr int64_t TILE = 16 * 16;   // pairs

// A matrix of bf16: line i has its numbers side by side and begins at `at + i · stride`, or it has a number of each row: number
// k at `at + k · stride + i`.
struct Factor {
    const uint16_t* at;
    int64_t stride;
    bool along;

    Factor from(int64_t line, int64_t number) const {
        return {at + (along ? line * stride + number : number * stride + line), stride, along};
    }
};

inline int64_t tiles(int64_t depth) { return (depth + DEEP - 1) / DEEP; }

inline uint32_t lowest(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// A tile of pairs by line, or by number where its lines are `turned`, stored the other way round.
template <bool turned>
inline void store_tile(Floats (&pairs)[LINES], uint32_t* into) {
    if constexpr (turned) transpose(pairs);
    for (int i = 0; i < LINES; ++i) store(into + i * LINES, pairs[i]);
}

// `lines` lines of which each has its numbers side by side, a panel at a time.
template <bool left>
void pack_along(const Factor& from, int64_t lines, int64_t depth, uint32_t* into) {
    for (int64_t line = 0; line < lines; line += LINES) {
        for (int64_t k = 0; k < depth; k += DEEP, into += TILE) {
            const uint32_t mask = lowest(depth - k);
            Floats pairs[LINES];
            for (int i = 0; i < LINES; ++i) {
                const uint16_t* numbers = from.at + (line + i) * from.stride + k;
                pairs[i] = line + i < lines ? bitcast<Floats>(_mm512_maskz_loadu_epi16(mask, numbers)) : Floats{};
            }
            store_tile<!left>(pairs, into);
        }
    }
}

// Pairs of a row's and the next row's numbers, of 16 lines.
template <int half>
inline Floats paired_half(__m512i row, __m512i next) {
    return bitcast<Floats>(paired(bitcast<Shorts>(_mm512_extracti64x4_epi64(row, half)),
                                  bitcast<Shorts>(_mm512_extracti64x4_epi64(next, half))));
}

// `lines` lines across the matrix's rows, two panels (a cache line of each row) at a time.
template <bool left>
void pack_across(const Factor& from, int64_t lines, int64_t depth, uint32_t* into) {
    const int64_t panel = tiles(depth) * TILE;
    for (int64_t k = 0; k < depth; k += DEEP, into += TILE) {
        for (int64_t line = 0; line < lines; line += 2 * LINES) {
            const uint32_t mask = lowest(lines - line);
            auto row = [&](int64_t number) {
                return number < depth ? _mm512_maskz_loadu_epi16(mask, from.at + number * from.stride + line)
                                      : _mm512_setzero_si512();
            };
            Floats first[LINES], second[LINES];
            for (int i = 0; i < LINES; ++i) {
                const __m512i even = row(k + 2 * i), odd = row(k + 2 * i + 1);
                first[i] = paired_half<0>(even, odd), second[i] = paired_half<1>(even, odd);
            }
            uint32_t* pairs = into + line / LINES * panel;
            store_tile<left>(first, pairs);
            if (lines - line > LINES) store_tile<left>(second, pairs + panel);
        }
    }
}

// The panels of `lines` lines, each of `depth` numbers.
template <bool left>
inline void pack(const Factor& from, int64_t lines, int64_t depth, uint32_t* into) {
    from.along ? pack_along<left>(from, lines, depth, into) : pack_across<left>(from, lines, depth, into);
}

}  // namespace
