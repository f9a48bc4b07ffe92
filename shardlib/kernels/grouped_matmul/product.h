// A product of matrices of bf16 by AMX tiles, summed in fp32: out = left · rightᵀ, both factors by their lines, plus a line that
// is added to each of the result's where there is one.
//
// A block of right lines is packed once, to fit the second-level cache, and multiplied by all left lines; these are packed a
// group at a time. Results are computed 32 by 32, in four tiles. Longer sums than DEEPEST are cut, and partial sums kept in
// fp32, for TALL left lines at a time.
#pragma once

#include "../common/panels.h"

namespace {

constexpr int64_t SIDE = 2 * LINES;            // rows and columns of the result at a time
constexpr int64_t DEEPEST = 1 << 11;           // numbers of a line that are packed at a time
constexpr int64_t BLOCK_PAIRS = 1 << 18;       // of the right lines of a block: 1 MB
constexpr int64_t GROUP = 128;                 // left lines that are packed at a time: 256 bytes of a row, where they lie across
constexpr int64_t TALL = 1 << 10;
constexpr int64_t GROUP_PAIRS = GROUP * DEEPEST / 2;
constexpr int64_t ROOM = BLOCK_PAIRS + GROUP_PAIRS + TALL * (BLOCK_PAIRS * 2 / DEEPEST);

// sums[32][32] = (add ? sums : 0) + left · right, for one or two panels of either.
template <int rows, int columns>
inline void multiply(const uint32_t* left, const uint32_t* right, int64_t deep, bool add, float* sums) {
    constexpr bool lower = rows == 2, second = columns == 2;
    float *below = sums + LINES * SIDE, *beside = sums + LINES, *across = below + LINES;
    const int64_t panel = deep * TILE;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    if (add) {
        tile_load<0>(sums, SIDE * 4);
        if constexpr (second) tile_load<1>(beside, SIDE * 4);
        if constexpr (lower) tile_load<2>(below, SIDE * 4);
        if constexpr (lower && second) tile_load<3>(across, SIDE * 4);
    }
    for (int64_t k = 0; k < deep; ++k, left += TILE, right += TILE) {
        tile_load<4>(left, LINES * 4);
        tile_load<6>(right, LINES * 4);
        if constexpr (second) tile_load<7>(right + panel, LINES * 4);
        if constexpr (lower) tile_load<5>(left + panel, LINES * 4);
        tile_multiply<0, 4, 6>();
        if constexpr (second) tile_multiply<1, 4, 7>();
        if constexpr (lower) tile_multiply<2, 5, 6>();
        if constexpr (lower && second) tile_multiply<3, 5, 7>();
    }
    tile_store<0>(sums, SIDE * 4);
    if constexpr (second) tile_store<1>(beside, SIDE * 4);
    if constexpr (lower) tile_store<2>(below, SIDE * 4);
    if constexpr (lower && second) tile_store<3>(across, SIDE * 4);
}

// 16 numbers of bf16 as fp32.
inline Floats widened(__m256i numbers) {
    return bitcast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

// Rounds sums[32][32], plus `added` where it is not null, to rows of the result, past the caches where they are whole cache lines: the result is rarely small
// enough to be found there.
inline void put(const float* sums, const uint16_t* added, int64_t rows, int64_t columns, uint16_t* to, int64_t stride) {
    const uint32_t mask = lowest(columns);
    const __m512i pairs = added ? _mm512_maskz_loadu_epi16(mask, added) : _mm512_setzero_si512();
    const Floats low = widened(_mm512_castsi512_si256(pairs)), high = widened(_mm512_extracti64x4_epi64(pairs, 1));
    for (int64_t i = 0; i < rows; ++i, to += stride, sums += SIDE) {
        const __m512i y = bitcast<__m512i>(_mm512_cvtne2ps_pbh(load<Floats>(sums + LINES) + high, load<Floats>(sums) + low));
        if (mask == ~0u && reinterpret_cast<uintptr_t>(to) % 64 == 0)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to), y);
        else
            _mm512_mask_storeu_epi16(to, mask, y);
    }
}

// A thread's share of the work, which is counted in steps, and its memory.
struct Share {
    int64_t first, last;
    uint32_t* room;
};

struct Product {
    Factor left, right;
    int64_t height, width, depth;
    uint16_t* out;                    // [height][width], contiguous
    const uint16_t* added = nullptr;  // [width], or null

    // Right lines of a block.
    int64_t block() const {
        return larger(SIDE, BLOCK_PAIRS * 2 / (larger(1, tiles(smaller(depth, DEEPEST))) * DEEP) / SIDE * SIDE);
    }
    int64_t groups() const { return (height + GROUP - 1) / GROUP; }
    int64_t steps() const { return groups() * larger(1, depth); }  // of a block
    int64_t work() const { return (width + block() - 1) / block() * steps(); }
    int64_t size() const { return height * width * depth; }

    // Computes the groups of left lines, by blocks of right ones, of which the first step, counted from `at`, lies in the share.
    void compute(int64_t at, const Share& share) const {
        const int64_t each = larger(1, depth);
        for (int64_t column = 0; column < width; column += block(), at += steps()) {
            auto group = [&](int64_t step) { return smaller(groups(), (larger(0, step - at) + each - 1) / each); };
            const int64_t last = smaller(height, group(share.last) * GROUP);
            const int64_t most = depth > DEEPEST ? TALL : larger(height, 1);
            for (int64_t row = group(share.first) * GROUP; row < last; row += most)
                columns(column, row, smaller(row + most, last), share.room);
        }
    }

   private:
    // The results of a block and of left lines first to last − 1.
    void columns(int64_t column, int64_t first, int64_t last, uint32_t* room) const {
        const int64_t count = smaller(block(), width - column);
        uint32_t *rights = room, *lefts = rights + BLOCK_PAIRS;
        float* partial = reinterpret_cast<float*>(lefts + GROUP_PAIRS);
        int64_t number = 0;
        do {
            const int64_t numbers = smaller(DEEPEST, depth - number);
            pack<false>(right.from(column, number), count, numbers, rights);
            for (int64_t row = first; row < last; row += GROUP) {
                const int64_t rows = smaller(GROUP, last - row);
                pack<true>(left.from(row, number), rows, numbers, lefts);
                for (int64_t i = 0; i < rows; i += SIDE)
                    for (int64_t j = 0; j < count; j += SIDE) {
                        const int64_t deep = tiles(numbers), panel = deep * TILE;
                        // Unless partial sums are kept, one place serves all.
                        const int64_t place = depth > DEEPEST ? ((row + i - first) * block() + j * SIDE) : 0;
                        float* sums = partial + place;
                        const auto function = rows - i > LINES ? (count - j > LINES ? multiply<2, 2> : multiply<2, 1>)
                                                               : (count - j > LINES ? multiply<1, 2> : multiply<1, 1>);
                        function(lefts + i / LINES * panel, rights + j / LINES * panel, deep, number > 0, sums);
                        if (number + numbers == depth)
                            put(sums, added ? added + column + j : nullptr, smaller(SIDE, rows - i), smaller(SIDE, count - j),
                                out + (row + i) * width + column + j, width);
                    }
            }
            number += numbers;
        } while (number < depth);
    }
};

// Computes product(0) to product(count − 1), in threads of equal shares of the work.
template <typename Of>
inline void multiply_all(int64_t count, uint32_t* scratch, int threads, const Of& product) {
    int64_t work = 0, size = 0;
    for (int64_t i = 0; i < count; ++i) work += product(i).work(), size += product(i).size();
    const int64_t shares = larger(1, worth(threads, size, 1 << 22));
    parallel(shares, int(shares), [&](int64_t from, int64_t to) {
        const Tiles shapes({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
        for (int64_t share = from; share < to; ++share) {
            int64_t at = 0;
            for (int64_t i = 0; i < count; at += product(i++).work())
                product(i).compute(at, {work * share / shares, work * (share + 1) / shares, scratch + share * ROOM});
        }
        _mm_sfence();  // other threads read what was stored past the caches
    });
}

}  // namespace
