// What a query sees: the keys of its blocks, and their scores with masks, bias and dropout.
#pragma once

#include "../common/counter.h"
#include "products.h"

namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// Sequences are padded to whole panels: `length` positions count, `padded` are there. Scores are in units of ln 2.
struct Problem {
    const int32_t *row_offsets, *columns;
    int64_t heads;  // of the layout
    int64_t batch, query_heads, key_heads, length, padded, size, block;
    const float* key_bias;  // [batch, padded]: 0, or −∞ for keys that nobody sees
    const float* bias;      // [bias_heads, 2 · padded] by key − query + padded − 1, or null
    int64_t bias_heads;
    float scale;
    int causal;
    int64_t threshold;  // 24 bits; 0: no dropout
    float kept;         // what dropout multiplies by
    int64_t seed, counter;
};

// The queries of a tile.
struct Tile {
    int64_t sample, head, query;
};

// The panels that a tile sees, in order.
class Panels {
   public:
    Panels(const Problem& problem, const Tile& tile) : block_(problem.block) {
        int64_t row = tile.query / block_, rows = (problem.padded + block_ - 1) / block_;
        const int32_t* offsets = problem.row_offsets + (problem.heads > 1 ? tile.head * (rows + 1) : 0) + row;
        at_ = problem.columns + offsets[0];
        end_ = problem.columns + offsets[1];
        limit_ = problem.causal ? tile.query + TILE : problem.padded;
    }

    // The first keys of the next panels, GROUP at most; returns how many.
    int next(int64_t (&keys)[GROUP]) {
        int found = 0;
        while (found < GROUP && at_ < end_) {
            int64_t key = *at_ * block_ + inside_;
            if (key >= limit_) break;  // as are those that follow
            keys[found++] = key;
            inside_ += TILE;
            if (inside_ == block_) inside_ = 0, ++at_;
        }
        return found;
    }

   private:
    const int32_t *at_, *end_;
    int64_t block_, limit_, inside_ = 0;
};

inline Ints lanes() {
    Ints numbers = {};
    for (int lane = 0; lane < W; ++lane) numbers[lane] = lane;
    return numbers;
}

// What dropout multiplies the weights of a query and W keys by: the generator of rng.py, by the number of the weight.
inline Floats dropout(const Problem& p, const Tile& tile, int64_t query, int64_t key) {
    int64_t row = (tile.sample * p.query_heads + tile.head) * p.length + query;
    uint64_t number = uint64_t(p.counter + row * p.length + key);
    Words first = Words{} + uint32_t(number), low = first + (Words)lanes();
    Words high = Words{} + uint32_t(number >> 32) - (Words)(low < first);  // carries
    Words bits = mix(mix(low ^ uint32_t(p.seed)) ^ mix(high ^ uint32_t(uint64_t(p.seed) >> 32))) >> 8;
    return bits >= uint32_t(p.threshold) ? all(p.kept) : Floats{};
}

// Where the bias of a query and a key lies; that of the next key follows.
inline int64_t bias_place(const Problem& p, int64_t query, int64_t key) { return key - query + p.padded - 1; }

// The scores of a query and W keys from their products; −∞ where a key is not seen.
inline Floats seen(const Problem& p, const Tile& tile, int64_t query, int64_t key, Floats product) {
    Floats score = fma(product, all(p.scale * LOG2E), load<Floats>(p.key_bias + tile.sample * p.padded + key));
    if (p.bias) {
        const float* bias = p.bias + (p.bias_heads > 1 ? tile.head : 0) * 2 * p.padded;
        score += load<Floats>(bias + bias_place(p, query, key));
    }
    if (p.causal && key + W - 1 > query) score = lanes() > int(query - key) ? all(-__builtin_inff()) : score;
    return score;
}

// Panels of one head's keys or values as factors, made when first asked for: their rows are summed over, or their columns.
template <typename Type, bool columns>
class Source {
    typedef Products<Type> P;

   public:
    Source(typename P::Held* room, uint8_t* done, const Problem& problem) : room_(room), done_(done), problem_(problem) {}

    void begin(const typename Type::Element* from) {
        if (from == from_) return;
        from_ = from;
        memset(done_, 0, size_t(problem_.padded / TILE));
    }

    const typename P::Held* panel(int64_t row) {
        const typename Type::Element* from = from_ + row * problem_.size;
        if constexpr (!columns && P::AS_THEY_LIE) {
            return from;
        } else {
            typename P::Held* into = room_ + row * problem_.size;
            if (done_[row / TILE]) return into;
            done_[row / TILE] = 1;
            prefetch_next(from, problem_.size);
            (columns ? P::columns : P::rows)(from, problem_.size, into);
            return into;
        }
    }

   private:
    const typename Type::Element* from_ = nullptr;
    typename P::Held* room_;
    uint8_t* done_;
    const Problem& problem_;
};

// The gradients of one head's keys and values while they are summed over queries: panels are zero when first asked for.
class KeySums {
   public:
    KeySums(float* room, uint8_t* begun, const Problem& problem)
        : room_(room), begun_(begun), size_(problem.size), padded_(problem.padded) {}

    // Summed in the thread's own room, [2, padded, size], or where there is none in place.
    void begin(float* dk, float* dv) {
        dk_ = room_ ? room_ : dk;
        dv_ = room_ ? room_ + padded_ * size_ : dv;
        memset(begun_, 0, size_t(padded_ / TILE));
    }

    void ready(int64_t row) {
        if (begun_[row / TILE]) return;
        begun_[row / TILE] = 1;
        memset(dk_ + row * size_, 0, size_t(TILE * size_) * sizeof(float));
        memset(dv_ + row * size_, 0, size_t(TILE * size_) * sizeof(float));
    }

    // body(row, dk, dv) for all panels.
    template <typename Body>
    void end(const Body& body) {
        for (int64_t row = 0; row < padded_; row += TILE) {
            ready(row);
            body(row * size_, dk_ + row * size_, dv_ + row * size_);
        }
    }

    float* dk() const { return dk_; }
    float* dv() const { return dv_; }

   private:
    float *room_, *dk_ = nullptr, *dv_ = nullptr;
    uint8_t* begun_;
    int64_t size_, padded_;
};

// Numbers that are given out to whichever thread is free.
class Queue {
   public:
    explicit Queue(int64_t count) : count_(count) {}
    bool take(int64_t& number) {
        number = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
        return number < count_;
    }

   private:
    int64_t next_ = 0, count_;
};

}  // namespace
